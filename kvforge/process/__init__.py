"""Code that every process needs to start and end: command line, signals, the leash of a child, stopping a command.

It depends on nothing of kvforge but the protocol, so that all packages may use it. A signal handler only sets a flag,
unless the waiting code asked to be interrupted.

Other code uses all its modules. `leash.py` is also run, as the first program of a child.
"""
