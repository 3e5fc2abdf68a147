"""The live page at `/`: blocks, tenants, requests and workers in a browser.

Invariant: viewers cost the coordinator next to nothing. One `Sampler` per process reads the shared tables and sends a
few queries a second for all viewers together, and none without viewers. Updates are computed from the current state for
each viewer, so nothing queues up for a slow one. Only `actions` changes anything, and only for callers with the right
to.
"""
