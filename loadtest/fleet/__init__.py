"""A real coordinator with simulated workers, which answer steps after the times of a table."""
