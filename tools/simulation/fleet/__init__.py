"""Simulated fleet: a gateway's own routing and moving of requests, over replicas that die, hang and drain."""
