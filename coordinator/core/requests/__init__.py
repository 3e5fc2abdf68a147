"""Requests: the record of each, its life, its deadlines, and what its client is to be told.

Law: a request moves only as the table of transitions says, and is in one table, alive or ended; what was streamed never
changes, repeats or vanishes; everything that is kept has a bound. It knows nothing of blocks or steps.

From outside: a request's fields are written by scheduling and commands; its `state` only by `Request.move`.
"""
