"""gpt-oss: messages on channels, each with a head that says what it is."""

from __future__ import annotations

import re

from .reader import Reading, markers
from .writer import Writer

RECIPIENT = re.compile(r"to=(?:functions\.)?([^\s<]+)")


def harmony(writer: Writer, in_reasoning: bool) -> Reading:  # noqa: ARG001 - channels say it
    """What the prompt has begun is the head of the first message."""
    reader = writer.reader
    while True:
        head, stop = yield from reader.collect(markers("<|message|>"))
        if not stop:
            # A text that is no message at all.
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
