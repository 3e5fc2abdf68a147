"""Streaming parsers: from a model's text to content, reasoning and tool calls.

Invariant: the joined events give the same message, however the text was split. There is one engine, and a table for
each format.

Text that looks like a tool call but is none is content, with its markers: it lacks a name, its JSON breaks off before
one, or it calls an unknown tool without a marker. A call that has begun stays a call: its arguments are what the model
wrote, truncated or not, up to the closing marker. Parsing then continues as usual.
"""

from .formats import Format, choose
from .parser import Parser

__all__ = ["Format", "Parser", "choose"]
