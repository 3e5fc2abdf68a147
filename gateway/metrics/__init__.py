"""/metrics for Prometheus, read from the shared tables: no message to the coordinator."""
