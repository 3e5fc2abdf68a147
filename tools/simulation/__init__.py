"""A seeded simulator: the real core, its workers and clients as models, faults at any event, and an oracle."""
