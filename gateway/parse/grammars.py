"""Grammars that force a tool call or valid arguments, for each format, in llguidance's dialect of Lark.

A marker that is a special token of the vocabulary becomes that token; any other is plain text.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from kvforge.protocol.errors import InvalidRequest
from kvforge.protocol.messages import Grammar
from kvforge.text.grammar import check

from .formats import Format

OBJECT: Mapping[str, Any] = {"type": "object"}


@dataclass(frozen=True, slots=True)
class OfferedTool:
    """A tool.

    Attributes:
        name: Its name.
        parameters: The schema of its arguments.
        strict: Whether the whole schema is enforced, or as much as possible.
    """

    name: str
    parameters: Mapping[str, Any]
    strict: bool = False


@dataclass(frozen=True, slots=True)
class Shaped:
    """An output constraint on plain text.

    Attributes:
        kind: json_schema, json_object or regex.
        text: The schema or the expression.
    """

    kind: str
    text: str

    def rule(self, writing: GrammarBuilder) -> str:
        """Add the rule or terminal for this text and return its name."""
        if self.kind == "regex":
            return writing.terminal("/" + self.text.replace("/", "\\/") + "/")
        return writing.json(json.loads(self.text) if self.kind == "json_schema" else OBJECT)


class GrammarBuilder:
    """A grammar under construction. `special` maps special tokens to their ids."""

    def __init__(self, special: Mapping[str, int]) -> None:
        self._special = special
        self.rules: list[str] = []

    def mark(self, text: str) -> str:
        """Return the symbols of a text that may contain markers."""
        inside = [re.escape(token) for token in sorted(self._special, key=len, reverse=True) if token in text]
        parts = re.split(f"({'|'.join(inside)})", text) if inside else [text]
        return " ".join(
            f"<[{self._special[part]}]>" if part in self._special else json.dumps(part, ensure_ascii=False)
            for part in parts
            if part
        )

    def free(self, *without: str, length: tuple[int, int | None] = (0, None)) -> str:
        """Add a terminal for text without special tokens and without any of these strings.

        Args:
            without: The excluded strings.
            length: The limits of its length in characters.

        Returns:
            Its name.
        """
        least, most = length
        some = "*" if length == (0, None) else f"{{{least},{'' if most is None else most}}}"
        plain = [text for text in without if text not in self._special]
        words = [f"~/(.|\\n)*{re.escape(text).replace('/', chr(92) + '/')}(.|\\n)*/" for text in plain]
        return self.terminal(" & ".join([f"/(.|\\n){some}/", *words]))

    def terminal(self, body: str) -> str:
        """Add a terminal and return its name."""
        name = f"T{len(self.rules)}"
        self.rules.append(f"{name}: {body}")
        return name

    def rule(self, body: str) -> str:
        """Add a rule and return its name."""
        name = f"r{len(self.rules)}"
        self.rules.append(f"{name}: {body}")
        return name

    def json(self, schema: Mapping[str, Any]) -> str:
        """Add a rule for JSON that follows a schema and return its name."""
        return self.rule(f"%json {json.dumps(schema, ensure_ascii=False)}")

    def text(self, start: str) -> str:
        """Return the complete grammar."""
        return "\n".join([f"start: {start}", *self.rules]) + "\n"


Call = Callable[[GrammarBuilder, OfferedTool], str]


def _object(name: str, arguments: str) -> Call:
    def call(writing: GrammarBuilder, tool: OfferedTool) -> str:
        head = f'{{"{name}": {json.dumps(tool.name)}, "{arguments}": '
        return f"{writing.mark(head)} {writing.json(tool.parameters)} {writing.mark('}')}"

    return call


def _between(before: str, after: str) -> Call:
    """Return a writer of calls with JSON arguments; `{}` in `before` is the name."""

    def call(writing: GrammarBuilder, tool: OfferedTool) -> str:
        head = before.replace("{}", tool.name)
        return f"{writing.mark(head)} {writing.json(tool.parameters)} {writing.mark(after)}".strip()

    return call


def _kimi(writing: GrammarBuilder, tool: OfferedTool) -> str:
    """Write a call with its number."""
    number = writing.terminal("/[0-9]{1,2}/")
    head = f"{writing.mark(f'<|tool_call_begin|>functions.{tool.name}:')} {number}"
    begin, end = writing.mark("<|tool_call_argument_begin|>"), writing.mark("<|tool_call_end|>")
    return f"{head} {begin} {writing.json(tool.parameters)} {end}"


def _tags(before: str, key: str, value_end: str, after: str) -> Call:
    """Return a writer of calls with arguments between tags, in the order of the schema.

    In `key`, `{}` is the name of an argument and `{string}` whether it is a string.
    """

    def call(writing: GrammarBuilder, tool: OfferedTool) -> str:
        properties = tool.parameters.get("properties") or {}
        required = tool.parameters.get("required") or ()
        parts = [writing.mark(before.replace("{}", tool.name))]
        for name, schema in properties.items():
            text = isinstance(schema, Mapping) and schema.get("type") == "string"
            value = _text(writing, tool, name, schema, value_end.strip()) if text else writing.json(schema)
            begin = key.replace("{}", name).replace("{string}", "true" if text else "false")
            one = f"({writing.mark(begin)} {value} {writing.mark(value_end)})"
            parts.append(one if name in required else f"{one}?")
        return " ".join([*parts, writing.mark(after)])

    return call


def _text(writing: GrammarBuilder, tool: OfferedTool, name: str, schema: Mapping[str, Any], end: str) -> str:
    """Write an unquoted string. Raises InvalidRequest for an enforced constraint that has no grammar."""
    if values := schema.get("enum", [schema["const"]] if "const" in schema else []):
        return f"({' | '.join(writing.mark(str(value)) for value in values)})"
    beyond = sorted({"pattern", "format"} & schema.keys())
    if beyond and tool.strict:
        problem = f"{beyond[0]}: cannot be enforced in this model's format of arguments"
        raise InvalidRequest(f"tools.{tool.name}.parameters.properties.{name}", problem)
    return writing.free(end, length=(schema.get("minLength", 0), schema.get("maxLength")))


@dataclass(frozen=True, slots=True)
class CallSyntax:
    """How a format writes calls.

    Attributes:
        each: Writes one call.
        opened: The text before the first call.
        between: The text between two calls.
        closed: The text behind the last call.
        begins: The marker that starts a call within text; "": a call stands only at the start of an answer.
    """

    each: Call
    opened: str = ""
    between: str = ""
    closed: str = ""
    begins: str = ""


_DEEPSEEK_CALL = "<｜tool▁call▁begin｜>function<｜tool▁sep｜>{}\n```json\n"
WRITTEN: dict[str, CallSyntax] = {
    "hermes": CallSyntax(
        _object("name", "arguments"), "<tool_call>\n", "\n</tool_call>\n<tool_call>\n", "\n</tool_call>", "<tool_call>"
    ),
    "llama3_json": CallSyntax(_object("name", "parameters"), between="; "),
    "mistral": CallSyntax(_object("name", "arguments"), "[TOOL_CALLS][", ", ", "]", "[TOOL_CALLS]"),
    "deepseek_v3": CallSyntax(
        _between(_DEEPSEEK_CALL, "\n```<｜tool▁call▁end｜>"),
        "<｜tool▁calls▁begin｜>",
        "\n",
        "<｜tool▁calls▁end｜>",
        "<｜tool▁calls▁begin｜>",
    ),
    "qwen3_coder": CallSyntax(
        _tags("<tool_call>\n<function={}>\n", "<parameter={}>\n", "\n</parameter>\n", "</function>\n</tool_call>"),
        between="\n",
        begins="<tool_call>",
    ),
    "glm45": CallSyntax(
        _tags("<tool_call>{}\n", "<arg_key>{}</arg_key>\n<arg_value>", "</arg_value>\n", "</tool_call>"),
        between="\n",
        begins="<tool_call>",
    ),
    "lfm2": CallSyntax(
        *(_object("name", "arguments"), "<|tool_call_start|>[", ", ", "]<|tool_call_end|>", "<|tool_call_start|>")
    ),
    "kimi_k2": CallSyntax(
        _kimi, "<|tool_calls_section_begin|>", "", "<|tool_calls_section_end|>", "<|tool_calls_section_begin|>"
    ),
    "granite": CallSyntax(_object("name", "arguments"), "<|tool_call|>[", ", ", "]", "<|tool_call|>"),
    "minimax": CallSyntax(
        _tags('<invoke name="{}">\n', '<parameter name="{}">', "</parameter>\n", "</invoke>\n"),
        *("<minimax:tool_call>\n", "", "</minimax:tool_call>", "<minimax:tool_call>"),
    ),
    "nemotron": CallSyntax(_object("name", "arguments"), "<TOOLCALL>[", ", ", "]</TOOLCALL>", "<TOOLCALL>"),
    "command_a": CallSyntax(
        *(_object("tool_name", "parameters"), "<|START_ACTION|>[\n    ", ",\n    ", "\n]<|END_ACTION|>"),
        "<|START_ACTION|>",
    ),
    "hunyuan": CallSyntax(_object("name", "arguments"), "<tool_calls>[", ", ", "]</tool_calls>", "<tool_calls>"),
    "deepseek_v32": CallSyntax(
        _tags(
            '<｜DSML｜invoke name="{}">\n',
            '<｜DSML｜parameter name="{}" string="{string}">',
            "</｜DSML｜parameter>\n",
            "</｜DSML｜invoke>\n",
        ),
        *("<｜DSML｜function_calls>\n", "", "</｜DSML｜function_calls>", "<｜DSML｜function_calls>"),
    ),
    "seed_oss": CallSyntax(
        _tags(
            "<seed:tool_call>\n<function={}>\n", "<parameter={}>", "</parameter>\n", "</function>\n</seed:tool_call>"
        ),
        between="\n",
        begins="<seed:tool_call>",
    ),
    "harmony": CallSyntax(
        _between("<|channel|>commentary to=functions.{} <|constrain|>json<|message|>", ""),
        begins="<|channel|>commentary to=",
    ),
}


def calls_grammar(
    format_: Format,
    tools: Mapping[str, Mapping[str, Any]],
    *,
    special: Mapping[str, int],
    must: bool,
    parallel: bool,
    in_reasoning: bool,
    strict: Sequence[str] = (),
    otherwise: Shaped | None = None,
) -> str:
    """Return the grammar of an answer that may call tools.

    Args:
        format_: How the model writes calls.
        tools: The parameters of each tool, by name.
        special: The ids of special tokens, by spelling.
        must: Whether the answer must be at least one call.
        parallel: Whether several calls are allowed.
        in_reasoning: Whether the prompt opens the reasoning.
        strict: The names of tools with enforced schemas; other schemas are enforced as far as possible.
        otherwise: The constraint on an answer without calls; None for any text, which calls may follow.

    Raises:
        InvalidRequest: Names `tools` or `tool_choice`.
    """
    written = WRITTEN.get(format_.name)
    if written is None:
        problem = f"calls cannot be enforced in this model's format, {format_.name}"
        raise InvalidRequest("tool_choice" if must else "tools", f"{problem}; see tool_format in gateway.toml")
    writing = GrammarBuilder(special)
    each = " | ".join(
        writing.rule(written.each(writing, OfferedTool(name, _schema(name, schema, name in strict), name in strict)))
        for name, schema in tools.items()
    )
    one = writing.rule(f"({each})")
    more = f" ({writing.mark(written.between)} {one})*" if parallel and format_.name != "harmony" else ""
    calls = " ".join(
        part for part in (_mark(writing, written.opened), one + more, _mark(writing, written.closed)) if part
    )
    start = f"({calls})"
    if not must and otherwise is not None:
        start = f"{start} | {otherwise.rule(writing)}"
    elif not must and written.begins:
        start = f"{writing.free(written.begins)} {start}?"
    elif not must:
        # Text that does not begin like a call is not a call.
        start = f"{start} | {writing.terminal('/[^{](.|' + chr(92) + 'n)*/')}"
    if in_reasoning:
        start = f"{_reasoning(writing, format_)} ({start})"
    return writing.text(start)


def after_reasoning(format_: Format, special: Mapping[str, int], shaped: Shaped) -> str:
    """Return the grammar of a constraint behind reasoning that the prompt opens."""
    writing = GrammarBuilder(special)
    shape = shaped.rule(writing)
    return writing.text(f"{_reasoning(writing, format_)} {shape}")


def _reasoning(writing: GrammarBuilder, format_: Format) -> str:
    close = format_.think[1]
    return f"{writing.free(close)} {writing.mark(close)} {writing.terminal('/[ ' + chr(92) + 'n]{0,4}/')}"


def _mark(writing: GrammarBuilder, text: str) -> str:
    return writing.mark(text) if text else ""


def schema_grammar(schema: Mapping[str, Any]) -> Grammar:
    """Return the grammar of a tool's parameters as `calls_grammar` checks it."""
    return Grammar(kind="json_schema", text=json.dumps({"type": "object", **schema}))


def _schema(name: str, schema: Mapping[str, Any], strict: bool) -> Mapping[str, Any]:
    """Return the enforceable schema of a tool's arguments. Raises InvalidRequest if a strict one cannot be enforced."""
    whole = {"type": "object", **schema}
    try:
        check(schema_grammar(schema), f"tools.{name}.parameters")
    except InvalidRequest:
        if strict:
            raise
        return OBJECT
    return whole
