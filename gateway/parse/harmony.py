"""gpt-oss: messages on channels, each with a header that names its channel and recipient."""

from __future__ import annotations

import re

from .reader import Reading, markers
from .writer import Writer

RECIPIENT = re.compile(r"to=(?:functions\.)?([^\s<]+)")


def harmony(writer: Writer, in_reasoning: bool) -> Reading:  # noqa: ARG001 - the channel decides
    """Read an answer. It begins within the header of the first message, which the prompt opens."""
    reader = writer.reader
    while True:
        head, stop = yield from reader.collect(markers("<|message|>"))
        if not stop:
            # Text without a message header.
            writer.content(head)
            return
        recipient = RECIPIENT.search(head)
        ends = markers("<|end|>", "<|call|>", "<|return|>", "<|start|>")
        if "analysis" in head and recipient is None:
            yield from reader.until(ends, writer.reasoning)
        elif recipient is not None and writer.calling:
            writer.call(recipient[1])
            if (yield from reader.starts_with("<|")):
                writer.arguments("{}")
            yield from reader.until(ends, writer.arguments)
        else:
            yield from reader.until(ends, writer.content)
        if not (yield from reader.peek()):
            return
