"""Messages as each format writes them, for the tests of the parsers."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from kvforge.gateway.parse import Parser
from kvforge.gateway.parse.events import Arguments, Content, Event, Reasoning, ToolCall
from kvforge.gateway.parse.formats import FORMATS

Call = tuple[str, dict[str, Any]]
TOOLS: dict[str, Any] = {
    "weather": {"properties": {"city": {"type": "string"}, "days": {"type": "integer"}, "tags": {"type": "array"}}},
    "now": {"properties": {}},
}


@dataclass
class Read:
    """The message that a client assembles."""

    content: str = ""
    reasoning: str = ""
    calls: list[list[str]] = field(default_factory=list)

    @property
    def called(self) -> list[Call]:
        """The calls, with their arguments as values."""
        return [(name, json.loads(arguments)) for name, arguments in self.calls]


def joined(events: Sequence[Event]) -> Read:
    """Join events to a message."""
    read = Read()
    for event in events:
        match event:
            case Content(text):
                assert text.encode()
                read.content += text
            case Reasoning(text):
                assert text.encode()
                read.reasoning += text
            case ToolCall(index, name):
                assert index == len(read.calls)
                assert name.encode()
                read.calls.append([name, ""])
            case Arguments(index, text):
                assert text.encode()
                assert index == len(read.calls) - 1
                read.calls[index][1] += text
    return read


def events_of(name: str, pieces: Sequence[str], *, tools: Any = TOOLS, in_reasoning: bool = False) -> list[Event]:
    """Return the events of a text that arrives in these pieces."""
    parser = Parser(FORMATS[name], tools, in_reasoning=in_reasoning)
    return [event for piece in pieces for event in parser.feed(piece)] + parser.finish()


def _json(key: str) -> Callable[[Call], str]:
    return lambda call: json.dumps({"name": call[0], key: call[1]}, ensure_ascii=False)


def _xml(value: Any) -> str:
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)


def _hermes(calls: Sequence[Call]) -> str:
    return "\n".join(f"<tool_call>\n{_json('arguments')(call)}\n</tool_call>" for call in calls)


def _coder(calls: Sequence[Call]) -> str:
    return "\n".join(
        f"<tool_call>\n<function={name}>\n"
        + "".join(f"<parameter={key}>\n{_xml(value)}\n</parameter>\n" for key, value in arguments.items())
        + "</function>\n</tool_call>"
        for name, arguments in calls
    )


def _glm(calls: Sequence[Call]) -> str:
    return "\n".join(
        f"<tool_call>{name}\n"
        + "".join(
            f"<arg_key>{key}</arg_key>\n<arg_value>{_xml(value)}</arg_value>\n" for key, value in arguments.items()
        )
        + "</tool_call>"
        for name, arguments in calls
    )


def _deepseek(calls: Sequence[Call]) -> str:
    each = "\n".join(
        f"<｜tool▁call▁begin｜>function<｜tool▁sep｜>{name}\n```json\n{json.dumps(arguments)}\n```<｜tool▁call▁end｜>"
        for name, arguments in calls
    )
    return f"<｜tool▁calls▁begin｜>{each}<｜tool▁calls▁end｜>"


def _deepseek_31(calls: Sequence[Call]) -> str:
    each = "".join(
        f"<｜tool▁call▁begin｜>{name}<｜tool▁sep｜>{json.dumps(arguments)}<｜tool▁call▁end｜>"
        for name, arguments in calls
    )
    return f"<｜tool▁calls▁begin｜>{each}<｜tool▁calls▁end｜>"


def _mistral(calls: Sequence[Call]) -> str:
    return f"[TOOL_CALLS][{', '.join(_json('arguments')(call) for call in calls)}]"


def _mistral_new(calls: Sequence[Call]) -> str:
    return "".join(f"[TOOL_CALLS]{name}[ARGS]{json.dumps(arguments)}" for name, arguments in calls)


def _python(calls: Sequence[Call]) -> str:
    return ", ".join(
        f"{name}({', '.join(f'{key}={value!r}' for key, value in arguments.items())})" for name, arguments in calls
    )


def _harmony(calls: Sequence[Call]) -> str:
    return "<|start|>assistant".join(
        f"<|channel|>commentary to=functions.{name} <|constrain|>json<|message|>{json.dumps(arguments)}<|call|>"
        for name, arguments in calls
    )


def _gemma(fence: str, opening: str, close: str) -> Callable[[Sequence[Call]], str]:
    def said(value: Any) -> str:
        if isinstance(value, str):
            return f"{fence}{value}{fence}"
        if isinstance(value, list):
            return f"[{','.join(said(one) for one in value)}]"
        return json.dumps(value)

    def write(calls: Sequence[Call]) -> str:
        each = ((name, ",".join(f"{key}:{said(value)}" for key, value in found.items())) for name, found in calls)
        return "".join(f"{opening}call:{name}{{{arguments}}}{close}" for name, arguments in each)

    return write


def _lists(begin: str, end: str, key: str = "arguments", name: str = "name") -> Callable[[Sequence[Call]], str]:
    def one(call: Call) -> str:
        return json.dumps({name: call[0], key: call[1]}, ensure_ascii=False)

    return lambda calls: f"{begin}[{', '.join(one(call) for call in calls)}]{end}"


def _kimi(calls: Sequence[Call]) -> str:
    each = "".join(
        f"<|tool_call_begin|>functions.{name}:{at}<|tool_call_argument_begin|>{json.dumps(found)}<|tool_call_end|>"
        for at, (name, found) in enumerate(calls)
    )
    return f"<|tool_calls_section_begin|>{each}<|tool_calls_section_end|>"


def _invoked(mark: str, block: str, attribute: bool) -> Callable[[Sequence[Call]], str]:
    def argument(key: str, value: Any) -> str:
        kind = f' string="{str(isinstance(value, str)).lower()}"' if attribute else ""
        return f'<{mark}parameter name="{key}"{kind}>{_xml(value)}</{mark}parameter>\n'

    def write(calls: Sequence[Call]) -> str:
        each = "".join(
            f'<{mark}invoke name="{name}">\n'
            + "".join(argument(key, value) for key, value in found.items())
            + f"</{mark}invoke>\n"
            for name, found in calls
        )
        return f"<{block}>\n{each}</{block}>"

    return write


def _seed(calls: Sequence[Call]) -> str:
    return "\n".join(
        f"<seed:tool_call>\n<function={name}>\n"
        + "".join(f"<parameter={key}>{_xml(value)}</parameter>\n" for key, value in found.items())
        + "</function>\n</seed:tool_call>"
        for name, found in calls
    )


# The format, its style of calls, and whether content may precede them.
WAYS: dict[str, tuple[str, Callable[[Sequence[Call]], str], bool]] = {
    "hermes": ("hermes", _hermes, True),
    "qwen3_coder": ("qwen3_coder", _coder, True),
    "glm45": ("glm45", _glm, True),
    "deepseek_v3": ("deepseek_v3", _deepseek, True),
    "deepseek_v3.1": ("deepseek_v3", _deepseek_31, True),
    "mistral": ("mistral", _mistral, True),
    "mistral, newer": ("mistral", _mistral_new, True),
    "llama3_json": ("llama3_json", lambda calls: "; ".join(_json("parameters")(call) for call in calls), False),
    "llama_pythonic": ("llama_pythonic", lambda calls: f"[{_python(calls)}]", False),
    "gemma": ("gemma", lambda calls: f"```tool_code\n{_python(calls[:1])}\n```", True),
    "gemma4": ("gemma4", _gemma('<|"|>', "<|tool_call>", "<tool_call|>"), True),
    "functiongemma": (
        "functiongemma",
        _gemma("<escape>", "<start_function_call>", "<end_function_call>"),
        True,
    ),
    "harmony": ("harmony", _harmony, False),
    "lfm2": ("lfm2", lambda calls: f"<|tool_call_start|>[{_python(calls)}]<|tool_call_end|>", True),
    "lfm2, JSON": ("lfm2", _lists("<|tool_call_start|>", "<|tool_call_end|>"), True),
    "kimi_k2": ("kimi_k2", _kimi, True),
    "granite": ("granite", _lists("<|tool_call|>", ""), True),
    "minimax": ("minimax", _invoked("", "minimax:tool_call", attribute=False), True),
    "minimax, first": (
        "minimax",
        lambda calls: "<tool_calls>\n" + "\n".join(map(_json("arguments"), calls)) + "\n</tool_calls>",
        True,
    ),
    "nemotron": ("nemotron", _lists("<TOOLCALL>", "</TOOLCALL>"), True),
    "command_a": ("command_a", _lists("<|START_ACTION|>", "<|END_ACTION|>", "parameters", "tool_name"), True),
    "hunyuan": ("hunyuan", _lists("<tool_calls>", "</tool_calls>"), True),
    "deepseek_v32": ("deepseek_v32", _invoked("｜DSML｜", "｜DSML｜function_calls", attribute=True), True),
    "seed_oss": ("seed_oss", _seed, True),
}
