"""What a model may write where it must call a tool, or must call it rightly: a grammar for each format, in llguidance's
dialect of Lark.

A marker that the vocabulary has as a special token is that token; any other is its text.
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
class Offered:
    """A tool. parameters: the schema that its arguments follow; strict: in all that it says."""

    name: str
    parameters: Mapping[str, Any]
    strict: bool = False


@dataclass(frozen=True, slots=True)
class Shaped:
    """A shape of plain text.

    Attributes:
        kind: json_schema, json_object or regex.
        text: The schema or the expression.
    """

    kind: str
    text: str

    def rule(self, writing: Writing) -> str:
        """Adds the rule, or the terminal, that allows this text alone; returns its name."""
        if self.kind == "regex":
            return writing.terminal("/" + self.text.replace("/", "\\/") + "/")
        return writing.json(json.loads(self.text) if self.kind == "json_schema" else OBJECT)


class Writing:
    """A grammar that is being written. special: the ids of special tokens by their spelling."""

    def __init__(self, special: Mapping[str, int]) -> None:
        self._special = special
        self.rules: list[str] = []

    def mark(self, text: str) -> str:
        """A marker, or text that may hold some."""
        inside = [re.escape(token) for token in sorted(self._special, key=len, reverse=True) if token in text]
        parts = re.split(f"({'|'.join(inside)})", text) if inside else [text]
        return " ".join(
            f"<[{self._special[part]}]>" if part in self._special else json.dumps(part, ensure_ascii=False)
            for part in parts
            if part
        )

    def free(self, *without: str, length: tuple[int, int | None] = (0, None)) -> str:
        """A terminal: any text in which none of these stands. Special tokens are no text. length: in characters."""
        least, most = length
        some = "*" if length == (0, None) else f"{{{least},{'' if most is None else most}}}"
        plain = [text for text in without if text not in self._special]
        words = [f"~/(.|\\n)*{re.escape(text).replace('/', chr(92) + '/')}(.|\\n)*/" for text in plain]
        return self.terminal(" & ".join([f"/(.|\\n){some}/", *words]))

    def terminal(self, body: str) -> str:
        """A new terminal's name."""
        name = f"T{len(self.rules)}"
        self.rules.append(f"{name}: {body}")
        return name

    def rule(self, body: str) -> str:
        """A new rule's name."""
        name = f"r{len(self.rules)}"
        self.rules.append(f"{name}: {body}")
        return name

    def json(self, schema: Mapping[str, Any]) -> str:
        """A rule for JSON that a schema allows."""
        return self.rule(f"%json {json.dumps(schema, ensure_ascii=False)}")

    def text(self, start: str) -> str:
        """The whole of it."""
        return "\n".join([f"start: {start}", *self.rules]) + "\n"


Call = Callable[[Writing, Offered], str]


def _object(name: str, arguments: str) -> Call:
    def call(writing: Writing, tool: Offered) -> str:
        head = f'{{"{name}": {json.dumps(tool.name)}, "{arguments}": '
        return f"{writing.mark(head)} {writing.json(tool.parameters)} {writing.mark('}')}"

    return call


def _between(before: str, after: str) -> Call:
    """before: with `{}` for the name."""

    def call(writing: Writing, tool: Offered) -> str:
        head = before.replace("{}", tool.name)
        return f"{writing.mark(head)} {writing.json(tool.parameters)} {writing.mark(after)}".strip()

    return call


def _kimi(writing: Writing, tool: Offered) -> str:
    """Each call has its number."""
    number = writing.terminal("/[0-9]{1,2}/")
    head = f"{writing.mark(f'<|tool_call_begin|>functions.{tool.name}:')} {number}"
    begin, end = writing.mark("<|tool_call_argument_begin|>"), writing.mark("<|tool_call_end|>")
    return f"{head} {begin} {writing.json(tool.parameters)} {end}"


def _tags(before: str, key: str, value_end: str, after: str) -> Call:
    """Arguments between tags, those that a schema has in its order. key: with `{}` for the name of one, `{string}` for
    whether it is text."""

    def call(writing: Writing, tool: Offered) -> str:
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


def _text(writing: Writing, tool: Offered, name: str, schema: Mapping[str, Any], end: str) -> str:
    """A string without quotes. Raises InvalidRequest for what cannot be said of one, where it must be."""
    if values := schema.get("enum", [schema["const"]] if "const" in schema else []):
        return f"({' | '.join(writing.mark(str(value)) for value in values)})"
    beyond = sorted({"pattern", "format"} & schema.keys())
    if beyond and tool.strict:
        problem = f"{beyond[0]}: cannot be enforced in the way in which this model writes arguments"
        raise InvalidRequest(f"tools.{tool.name}.parameters.properties.{name}", problem)
    return writing.free(end, length=(schema.get("minLength", 0), schema.get("maxLength")))


@dataclass(frozen=True, slots=True)
class Written:
    """How a format writes calls. opened: before the first; each; between: two of them; closed: after the last. begins:
    by what a call is known in free text, "": it stands only where an answer begins."""

    each: Call
    opened: str = ""
    between: str = ""
    closed: str = ""
    begins: str = ""


_DEEPSEEK_CALL = "<｜tool▁call▁begin｜>function<｜tool▁sep｜>{}\n```json\n"
WRITTEN: dict[str, Written] = {
    "hermes": Written(
        _object("name", "arguments"), "<tool_call>\n", "\n</tool_call>\n<tool_call>\n", "\n</tool_call>", "<tool_call>"
    ),
    "llama3_json": Written(_object("name", "parameters"), between="; "),
    "mistral": Written(_object("name", "arguments"), "[TOOL_CALLS][", ", ", "]", "[TOOL_CALLS]"),
    "deepseek_v3": Written(
        _between(_DEEPSEEK_CALL, "\n```<｜tool▁call▁end｜>"),
        "<｜tool▁calls▁begin｜>",
        "\n",
        "<｜tool▁calls▁end｜>",
        "<｜tool▁calls▁begin｜>",
    ),
    "qwen3_coder": Written(
        _tags("<tool_call>\n<function={}>\n", "<parameter={}>\n", "\n</parameter>\n", "</function>\n</tool_call>"),
        between="\n",
        begins="<tool_call>",
    ),
    "glm45": Written(
        _tags("<tool_call>{}\n", "<arg_key>{}</arg_key>\n<arg_value>", "</arg_value>\n", "</tool_call>"),
        between="\n",
        begins="<tool_call>",
    ),
    "lfm2": Written(
        *(_object("name", "arguments"), "<|tool_call_start|>[", ", ", "]<|tool_call_end|>", "<|tool_call_start|>")
    ),
    "kimi_k2": Written(
        _kimi, "<|tool_calls_section_begin|>", "", "<|tool_calls_section_end|>", "<|tool_calls_section_begin|>"
    ),
    "granite": Written(_object("name", "arguments"), "<|tool_call|>[", ", ", "]", "<|tool_call|>"),
    "minimax": Written(
        _tags('<invoke name="{}">\n', '<parameter name="{}">', "</parameter>\n", "</invoke>\n"),
        *("<minimax:tool_call>\n", "", "</minimax:tool_call>", "<minimax:tool_call>"),
    ),
    "nemotron": Written(_object("name", "arguments"), "<TOOLCALL>[", ", ", "]</TOOLCALL>", "<TOOLCALL>"),
    "command_a": Written(
        *(_object("tool_name", "parameters"), "<|START_ACTION|>[\n    ", ",\n    ", "\n]<|END_ACTION|>"),
        "<|START_ACTION|>",
    ),
    "hunyuan": Written(_object("name", "arguments"), "<tool_calls>[", ", ", "]</tool_calls>", "<tool_calls>"),
    "deepseek_v32": Written(
        _tags(
            '<｜DSML｜invoke name="{}">\n',
            '<｜DSML｜parameter name="{}" string="{string}">',
            "</｜DSML｜parameter>\n",
            "</｜DSML｜invoke>\n",
        ),
        *("<｜DSML｜function_calls>\n", "", "</｜DSML｜function_calls>", "<｜DSML｜function_calls>"),
    ),
    "seed_oss": Written(
        _tags(
            "<seed:tool_call>\n<function={}>\n", "<parameter={}>", "</parameter>\n", "</function>\n</seed:tool_call>"
        ),
        between="\n",
        begins="<seed:tool_call>",
    ),
    "harmony": Written(
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
    """Write the grammar of an answer that may call tools.

    Args:
        format_: How the model writes calls.
        tools: The parameters of each tool, by its name.
        special: The ids of special tokens, by their spelling.
        must: Whether the answer is at least one call.
        parallel: Whether it may be several.
        in_reasoning: Whether the prompt has begun to reason.
        strict: Names of the tools with enforced schemas; other schemas are enforced as far as possible.
        otherwise: The shape of an answer that calls no tool. None: any text, which calls may follow.

    Raises:
        InvalidRequest: Names `tools` or `tool_choice`.
    """
    written = WRITTEN.get(format_.name)
    if written is None:
        problem = f"calls cannot be enforced in this model's format, {format_.name}"
        raise InvalidRequest("tool_choice" if must else "tools", f"{problem}; see tool_format in gateway.toml")
    writing = Writing(special)
    each = " | ".join(
        writing.rule(written.each(writing, Offered(name, _schema(name, schema, name in strict), name in strict)))
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
        # What does not begin as a call does is none.
        start = f"{start} | {writing.terminal('/[^{](.|' + chr(92) + 'n)*/')}"
    if in_reasoning:
        start = f"{_reasoning(writing, format_)} ({start})"
    return writing.text(start)


def after_reasoning(format_: Format, special: Mapping[str, int], shaped: Shaped) -> str:
    """Write the grammar of a shape behind reasoning that the prompt has begun."""
    writing = Writing(special)
    shape = shaped.rule(writing)
    return writing.text(f"{_reasoning(writing, format_)} {shape}")


def _reasoning(writing: Writing, format_: Format) -> str:
    close = format_.think[1]
    return f"{writing.free(close)} {writing.mark(close)} {writing.terminal('/[ ' + chr(92) + 'n]{0,4}/')}"


def _mark(writing: Writing, text: str) -> str:
    return writing.mark(text) if text else ""


def schema_grammar(schema: Mapping[str, Any]) -> Grammar:
    """Return the grammar that `calls_grammar` checks for a tool's parameters."""
    return Grammar(kind="json_schema", text=json.dumps({"type": "object", **schema}))


def _schema(name: str, schema: Mapping[str, Any], strict: bool) -> Mapping[str, Any]:
    """The schema of a tool's arguments as far as it can be enforced. Raises InvalidRequest where it must be."""
    whole = {"type": "object", **schema}
    try:
        check(schema_grammar(schema), f"tools.{name}.parameters")
    except InvalidRequest:
        if strict:
            raise
        return OBJECT
    return whole
