"""python -m tests.gateway.documented: generate the tables of fields in docs/http.md from the code."""

from __future__ import annotations

import sys
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path

import msgspec

from kvforge.gateway.anthropic import request_body as messages
from kvforge.gateway.anthropic import unimplemented_fields as anthropic_fields
from kvforge.gateway.http.fields import UnimplementedField
from kvforge.gateway.openai import fields, responses_body, shapes, unimplemented_fields
from kvforge.gateway.openai import request_body as chat

FILE = Path(__file__).parents[2] / "docs" / "http.md"
BEGIN, END = "<!-- fields: python -m tests.gateway.documented -->\n", "<!-- end of fields -->\n"
# The place of a structure: the APIs, and the position in a body.
PLACES: Mapping[type[msgspec.Struct], tuple[str, str]] = {
    fields.Common: ("chat, completions", ""),
    chat.Completion: ("completions", ""),
    chat.Chat: ("chat", ""),
    chat.Message: ("chat", "messages[]."),
    chat.CalledFunction: ("chat", "messages[].tool_calls[].function."),
    chat.Part: ("chat, responses", "content[]."),
    shapes.StructuredOutputs: ("chat, completions, responses", "structured_outputs."),
    responses_body.Create: ("responses", ""),
    responses_body.Item: ("responses", "input[]."),
    responses_body.FunctionTool: ("responses", "tools[]."),
    responses_body.Reasoning: ("responses", "reasoning."),
    messages.Conversation: ("messages", ""),
    messages.Message: ("messages", "messages[]."),
    messages.OutputConfig: ("messages", "output_config."),
    messages.Thinking: ("messages", "thinking."),
    messages.Create: ("messages", ""),
    messages.Block: ("messages", "content[]."),
    messages.Tool: ("messages", "tools[]."),
}
HEADS = (
    (
        "### Fields without effect\n\n"
        "These fields are accepted and have no effect; the last column names the few values that are refused:",
        "| field | API | why |\n|---|---|---|\n",
    ),
    (
        "### Refused fields\n\n"
        "These fields get a 400 that names them, unless the value is `null` or in the column `accepted`:",
        "| field | API | accepted | why |\n|---|---|---|---|\n",
    ),
    (
        "### Fields left out\n\n"
        "These fields are ignored and named in `x-kvforge-ignored`, unless the value is `null` or in the column "
        "`accepted`:",
        "| field | API | accepted | why |\n|---|---|---|---|\n",
    ),
)
Row = tuple[str, str, UnimplementedField]


def document() -> str:
    """Return the page with its tables."""
    text = FILE.read_text(encoding="utf-8")
    before, _, rest = text.partition(BEGIN)
    _, _, after = rest.partition(END)
    return f"{before}{BEGIN}{tables()}{END}{after}"


def tables() -> str:
    """The three tables."""
    rows = sorted(_joined(_rows()), key=lambda row: (row[0], row[1]))
    effectless = [f"| `{name}` | {where} | {one.why} |\n" for name, where, one in rows if one.harmless is None]
    parts: list[str] = []
    for (title, head), lines in zip(
        HEADS, (effectless, list(_refused(rows, False)), list(_refused(rows, True))), strict=True
    ):
        parts += [f"\n{title}\n\n", head, *lines]
    return "".join([*parts, "\n"])


def _refused(rows: Iterable[Row], left_out: bool) -> Iterator[str]:
    for name, where, one in rows:
        if one.harmless is not None and one.left_out == left_out:
            yield f"| `{name}` | {where} | {one.accepted.removeprefix('`null`').removeprefix(', ')} | {one.why} |\n"


def _rows() -> Iterator[Row]:
    for name, why in fields.IGNORED.items():
        too = name in responses_body.Create.__struct_fields__
        yield name, "chat, completions, responses" if too else "chat, completions", UnimplementedField(why)
    for where, table in (
        ("chat", chat.IGNORED),
        ("responses", responses_body.IGNORED),
        ("messages", messages.IGNORED),
    ):
        for name, why in table.items():
            yield name, where, UnimplementedField(why)
    for kind, table in (*unimplemented_fields.UNIMPLEMENTED.items(), *anthropic_fields.UNIMPLEMENTED.items()):
        for name, one in table.items():
            where, prefix = PLACES[kind]
            yield prefix + name, "count_tokens" if one.why == anthropic_fields.NOT_COUNTED else where, one


def _joined(rows: Iterable[Row]) -> list[Row]:
    """Join the rows of a field with the same meaning in several APIs."""
    found: dict[tuple[str, str, str, bool], tuple[list[str], UnimplementedField]] = {}
    for name, where, one in rows:
        apis, _ = found.setdefault((name, one.why, one.accepted, one.left_out), ([], one))
        apis += [api for api in where.split(", ") if api not in apis]
    return [(name, ", ".join(apis), one) for (name, *_), (apis, one) in found.items()]


if __name__ == "__main__":
    FILE.write_text(document(), encoding="utf-8")
    sys.exit(0)
