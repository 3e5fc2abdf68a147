"""Code that every process needs to begin and end: command line, signals, the leash of a child, stopping a command.

Its law: it knows nothing of kvforge but the protocol, so that everything may use it; a signal's handler sets a
flag and no more, unless who waits asked to be interrupted.

From outside: all of it. `leash.py` is also run, as the child's first program.
"""
