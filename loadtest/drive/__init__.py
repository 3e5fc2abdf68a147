"""The driver: the event loop of one driver process, its targets, and the supervision of several processes."""
