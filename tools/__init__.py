"""Tools of development: what tests and people run to break kvforge, and to generate parts of it."""
