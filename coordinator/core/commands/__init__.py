"""Handlers of client commands, one for each message.

A refused command raises a typed error that names what is wrong, and has changed nothing. Handlers validate and
delegate; the layers below keep the invariants.

The machine calls the handlers. Reports may also use those that only read (`find`, `info`).
"""
