"""The load: sessions of requests, their arrivals and their contents. Independent of any server."""
