"""`python -m gateway`: serves until it is told to end."""
