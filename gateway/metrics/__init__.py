"""`/metrics` for Prometheus, read from the shared tables without a message to the coordinator."""
