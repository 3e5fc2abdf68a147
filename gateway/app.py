"""Which path leads where."""
