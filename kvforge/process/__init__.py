"""What a process of ours needs to end well: signals, the leash that ends a child with its parent, how a command stops.

Its law: it knows nothing of kvforge, so that everything may use it; a signal's handler sets a flag and no more, unless
who waits asked to be interrupted.

From outside: all of it. `leash.py` is also run, as the child's first program.
"""
