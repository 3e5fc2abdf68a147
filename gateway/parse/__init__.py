"""From what a model writes to a message: content, reasoning and tool calls, as they come.

Law: whatever way the text is split, the events joined give the same message. One engine; a table for each format.

What looks like a call and is none (no name, JSON that breaks off before it, an unknown tool where no marker says that
it is a call) is content, with its markers. A call that was begun stays one: its arguments are what the model wrote of
them, broken off or not, up to the mark that ends the call; what follows is read as ever.
"""

from .formats import Format, choose
from .parser import Parser

__all__ = ["Format", "Parser", "choose"]
