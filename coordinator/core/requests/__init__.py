"""Requests: records, lifecycle, deadlines, and pending stream messages.

A request moves only along the transition table, and is in one table, live or finished. Streamed tokens never change,
repeat or vanish. Everything that is kept is bounded. The package does not know blocks or steps.

Scheduling and commands write a request's fields; only `Request.move` writes its `state`.
"""
