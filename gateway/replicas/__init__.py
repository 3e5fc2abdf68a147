"""Several coordinators behind one gateway: health checks, routing and failover."""
