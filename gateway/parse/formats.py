"""The formats: how each family of models writes reasoning and calls, and which one a chat template speaks.

Sources: the chat templates of the models themselves.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from kvforge.protocol.errors import InvalidConfiguration

from .bodies import Body, json_call, llama, mistral, named_json, pythonic, tagged
from .fenced import fenced
from .harmony import harmony
from .reader import Reading
from .writer import Writer

THINK = ("<think>", "</think>")
NO_THINK = ("", "")


@dataclass(frozen=True, slots=True, eq=False)
class Format:
    """think: the markers of reasoning, or "". calls: what opens a call, and how its body is read. bare: a call without
    a marker begins with one of these characters. answer: reads all of it, where it is no content with markers in it.
    special_tokens: what of it are special tokens, which have to stay visible."""

    name: str
    think: tuple[str, str] = NO_THINK
    calls: Mapping[str, Body] = field(default_factory=dict)
    bare: tuple[str, Body] | None = None
    answer: Callable[[Writer, bool], Reading] | None = None
    special_tokens: frozenset[str] = frozenset()

    def starts_in_reasoning(self, prompt: str) -> bool:
        """Whether the prompt, as the template wrote it, has begun the model's reasoning."""
        return bool(self.think[0]) and prompt.rstrip().endswith(self.think[0].rstrip())


def _special(*tokens: str) -> frozenset[str]:
    return frozenset(tokens)


_TOOL_CALL = ("<tool_call>", "</tool_call>")
_DEEPSEEK = {
    "begin": "<｜tool▁calls▁begin｜>",
    "end": "<｜tool▁calls▁end｜>",
    "call": "<｜tool▁call▁begin｜>",
    "call_end": "<｜tool▁call▁end｜>",
    "sep": "<｜tool▁sep｜>",
}


def _opening(writer: Writer, opened: str) -> Reading:
    """A bracket before calls."""
    writer.mark(opened)
    yield from ()


def _closing(writer: Writer, opened: str) -> Reading:
    """One behind them, if there were any."""
    if not writer.called:
        writer.content(opened)
    yield from ()


FORMATS: dict[str, Format] = {
    format_.name: format_
    for format_ in (
        Format("plain"),
        Format("think", think=THINK, special_tokens=_special(*THINK)),
        Format(
            "hermes",
            think=THINK,
            calls={"<tool_call>": json_call("</tool_call>")},
            special_tokens=_special(*THINK, *_TOOL_CALL),
        ),
        Format(
            "qwen3_coder",
            think=THINK,
            calls={
                "<tool_call>": _opening,
                "</tool_call>": _closing,
                "<function=": tagged((">",), "<parameter=", ">", "", "</parameter>", "</function>", "\n"),
            },
            special_tokens=_special(*THINK, *_TOOL_CALL),
        ),
        Format(
            "llama3_json",
            calls={
                "<|python_tag|>": llama(""),
                "<|python_start|>": llama("<|python_end|>"),
                "<|python_end|>": _closing,
            },
            bare=("{[", llama("")),
            special_tokens=_special("<|python_tag|>", "<|python_start|>", "<|python_end|>"),
        ),
        Format(
            "llama_pythonic",
            calls={"<|python_start|>": llama("<|python_end|>"), "<|python_end|>": _closing},
            bare=("{[", llama("<|python_end|>")),
            special_tokens=_special("<|python_start|>", "<|python_end|>"),
        ),
        Format(
            "mistral",
            think=("[THINK]", "[/THINK]"),
            calls={"[TOOL_CALLS]": mistral},
            special_tokens=_special("[TOOL_CALLS]", "[ARGS]", "[CALL_ID]", "[THINK]", "[/THINK]"),
        ),
        Format(
            "deepseek_v3",
            think=THINK,
            calls={
                _DEEPSEEK["begin"]: _opening,
                _DEEPSEEK["end"]: _closing,
                _DEEPSEEK["call"]: named_json(
                    _DEEPSEEK["sep"], _DEEPSEEK["call_end"], before_name="function", fence=True
                ),
            },
            special_tokens=_special(*_DEEPSEEK.values(), *THINK),
        ),
        Format(
            "glm45",
            think=THINK,
            calls={
                "<tool_call>": tagged(("\n",), "<arg_key>", "</arg_key>", "<arg_value>", "</arg_value>", "</tool_call>")
            },
            special_tokens=_special(*THINK, *_TOOL_CALL, "<arg_key>", "</arg_key>", "<arg_value>", "</arg_value>"),
        ),
        Format(
            "harmony",
            answer=harmony,
            special_tokens=_special(
                *("<|channel|>", "<|message|>", "<|start|>", "<|end|>", "<|call|>", "<|return|>", "<|constrain|>")
            ),
        ),
        Format(
            "gemma4",
            think=("<|channel>thought\n", "<channel|>"),
            calls={"<|tool_call>": fenced('<|"|>', "<tool_call|>")},
            special_tokens=_special("<|channel>", "<channel|>", "<|tool_call>", "<tool_call|>", '<|"|>'),
        ),
        Format(
            "functiongemma",
            calls={"<start_function_call>": fenced("<escape>", "<end_function_call>")},
            special_tokens=_special("<start_function_call>", "<end_function_call>", "<escape>"),
        ),
        Format("gemma", calls={"```tool_code\n": pythonic("```", listed=False)}),
    )
}

# What a template holds that no other family's does; the first that is found decides.
_SIGNS = (
    ("<|channel|>", "harmony"),
    ("<|tool_call>", "gemma4"),
    ("<start_function_call>", "functiongemma"),
    (_DEEPSEEK["call"], "deepseek_v3"),
    ("<arg_key>", "glm45"),
    ("<function=", "qwen3_coder"),
    ("<tool_call>", "hermes"),
    ("[TOOL_CALLS]", "mistral"),
    ("[func_name1(", "llama_pythonic"),
    ("<|python_start|>", "llama3_json"),
    ("<|python_tag|>", "llama3_json"),
    ("<|start_header_id|>", "llama3_json"),
    ("<start_of_turn>", "gemma"),
    ("</think>", "think"),
)


def choose(template: str, name: str = "") -> Format:
    """The format that a chat template speaks, or the one of that name. Raises InvalidConfiguration naming
    `tool_format`."""
    if name:
        if name not in FORMATS:
            raise InvalidConfiguration("tool_format", f"is {name!r}; it must be one of {', '.join(FORMATS)}")
        return FORMATS[name]
    return FORMATS[next((format_ for sign, format_ in _SIGNS if sign in template), "plain")]
