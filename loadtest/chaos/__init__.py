"""Fault injection: processes are killed during a run, then every request and answer is checked."""
