"""From what a model writes to a message: content, reasoning and tool calls, as they come.

Law: whatever way the text is split, the events joined give the same message. One engine; a table for each format.
"""

from .formats import Format, choose
from .parser import Parser

__all__ = ["Format", "Parser", "choose"]
