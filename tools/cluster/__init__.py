"""A coordinator and workers as real processes on this host, for tests, chaos and benchmarks."""
