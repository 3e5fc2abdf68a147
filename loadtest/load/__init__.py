"""What is asked: sessions of requests, when each begins, what each holds. Nothing here knows a server."""
