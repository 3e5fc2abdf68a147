"""A simulated fleet: a gateway's own routing and moving of requests, among replicas that die, hang and drain."""
