"""Calls as elements with attributes: MiniMax's `<invoke name="f">` and DeepSeek's `<｜DSML｜invoke name="f">`."""

from __future__ import annotations

import json
from collections.abc import Generator

from .bodies import Body, text_value, typed
from .reader import Reading, markers
from .writer import Writer


def invoked(mark: str, close: str) -> Body:
    """Read calls up to `close`.

    Args:
        mark: The prefix of each element's name ("" or DeepSeek's).
        close: The closing marker of the block.
    """
    begin, end = f'<{mark}invoke name="', f"</{mark}invoke>"
    key_begin, value_end = f'<{mark}parameter name="', f"</{mark}parameter>"

    def body(writer: Writer, opened: str) -> Reading:
        reader = writer.reader
        called = False
        while True:
            reader.keep()
            between, stop = yield from reader.collect(markers(begin, close))
            if stop == begin:
                name, quote = yield from reader.collect(markers('"', close))
                attributes, head_end = (yield from reader.collect(markers(">"))) if quote == '"' else ("", "")
                read = reader.kept()
                if not head_end or not name.strip() or attributes.strip():
                    writer.content(("" if called else opened) + read)
                    return
                if called and between.strip():
                    writer.content(between)
                called = True
                if not (yield from _call(writer, name.strip(), end, close, key_begin, value_end)):
                    return
                continue
            read = reader.kept()
            if not called:
                writer.content(opened + read)
            elif between.strip():
                writer.content(between)
            return

    return body


def _call(
    writer: Writer, name: str, end: str, close: str, key_begin: str, value_end: str
) -> Generator[None, None, bool]:
    """Read one call's arguments. Return whether another call may follow."""
    reader = writer.reader
    writer.call(name)
    first, astray = True, list[str]()
    while True:
        between, stop = yield from reader.collect(markers(key_begin, end, close))
        if between.strip():
            astray.append(between)
        if stop != key_begin:
            break
        writer.arguments("{" if first else ", ")
        first = False
        key, quote = yield from reader.collect(markers('"'))
        attributes, head_end = (yield from reader.collect(markers(">"))) if quote else ("", "")
        if not head_end:
            return False
        writer.arguments(f"{json.dumps(key.strip(), ensure_ascii=False)}: ")
        kinds = writer.argument_types(name, key.strip())
        if 'string="true"' in attributes or kinds == {"string"}:
            yield from text_value(writer, value_end, "")
        else:
            text, _ = yield from reader.collect(markers(value_end))
            writer.arguments(typed(text, kinds))
    if first:
        # Malformed arguments are passed on as text: a tool is never called with less than the model wrote.
        writer.arguments("".join(astray).strip() or "{}")
        return stop == end
    writer.arguments("}")
    for text in astray:
        writer.content(text)
    return stop == end
