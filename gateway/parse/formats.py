"""The formats: how each model family writes reasoning and calls, and how to detect it from a chat template.

Source: the models' own chat templates.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from kvforge.protocol.errors import InvalidConfiguration

from .bodies import Body, json_call, llama, mistral, named_json, pythonic, tagged
from .fenced import fenced
from .harmony import harmony
from .invoked import invoked
from .lists import before_answer, behind_answer, id_and_json, json_list, python_or_json
from .reader import Reading
from .writer import Writer

THINK = ("<think>", "</think>")
NO_THINK = ("", "")


@dataclass(frozen=True, slots=True, eq=False)
class Format:
    """The markers of a model family's answers, and the readers of their parts.

    Attributes:
        name: Its name in `tool_format`.
        think: The markers of reasoning, or "".
        calls: The opening marker of a call, and the reader of its body.
        wraps: Markers around content, dropped even if calls are not parsed.
        bare: The first characters of a call without a marker, and its reader.
        answer: Reads the whole answer if it is not content with markers in it.
        special_tokens: Special tokens among the markers, which the detokenizer must keep.
        write_calls: Writes calls as the model does, for templates that drop the calls of a conversation.
    """

    name: str
    think: tuple[str, str] = NO_THINK
    calls: Mapping[str, Body] = field(default_factory=dict)
    wraps: Mapping[str, Body] = field(default_factory=dict)
    bare: tuple[str, Body] | None = None
    answer: Callable[[Writer, bool], Reading] | None = None
    special_tokens: frozenset[str] = frozenset()
    write_calls: Callable[[Sequence[tuple[str, Mapping[str, Any]]]], str] | None = None

    @property
    def has_calls(self) -> bool:
        """Whether calls of this format can be parsed."""
        return bool(self.calls) or self.bare is not None or self.answer is not None

    def starts_in_reasoning(self, prompt: str) -> bool:
        """Return whether the rendered prompt already opens the model's reasoning."""
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

_KIMI = {
    "begin": "<|tool_calls_section_begin|>",
    "end": "<|tool_calls_section_end|>",
    "call": "<|tool_call_begin|>",
    "arguments": "<|tool_call_argument_begin|>",
    "call_end": "<|tool_call_end|>",
}
WrittenCalls = Sequence[tuple[str, Mapping[str, Any]]]


def write_python(calls: WrittenCalls) -> str:
    """Return calls as LFM2 writes them."""
    each = (f"{name}({', '.join(f'{key}={value!r}' for key, value in arguments.items())})" for name, arguments in calls)
    return f"<|tool_call_start|>[{', '.join(each)}]<|tool_call_end|>"


def write_kimi(calls: WrittenCalls) -> str:
    """Return calls as Kimi K2 writes them."""
    each = (
        f"{_KIMI['call']}functions.{name}:{at}{_KIMI['arguments']}"
        f"{json.dumps(arguments, ensure_ascii=False)}{_KIMI['call_end']}"
        for at, (name, arguments) in enumerate(calls)
    )
    return f"{_KIMI['begin']}{''.join(each)}{_KIMI['end']}"


def _opening(writer: Writer, opened: str) -> Reading:
    """Read a marker before calls."""
    writer.mark(opened)
    yield from ()


def _closing(writer: Writer, opened: str) -> Reading:
    """Read a marker behind calls; without calls it is content."""
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
        Format(
            "lfm2",
            think=THINK,
            calls={"<|tool_call_start|>": python_or_json("<|tool_call_end|>"), "<|tool_call_end|>": _closing},
            special_tokens=_special(*THINK, "<|tool_call_start|>", "<|tool_call_end|>"),
            write_calls=write_python,
        ),
        Format(
            "kimi_k2",
            think=THINK,
            calls={
                _KIMI["begin"]: _opening,
                _KIMI["end"]: _closing,
                _KIMI["call"]: id_and_json(_KIMI["arguments"], _KIMI["call_end"]),
            },
            special_tokens=_special(*THINK, *_KIMI.values()),
            write_calls=write_kimi,
        ),
        Format(
            "granite",
            think=THINK,
            calls={
                "<|tool_call|>": json_list(""),
                "<|/tool_call|>": _closing,
                "<tool_call>": json_list("</tool_call>"),
            },
            wraps={"<response>": before_answer, "</response>": behind_answer("<|tool_call|>", "<tool_call>")},
            special_tokens=_special(*THINK, "<|tool_call|>", "<|/tool_call|>", *_TOOL_CALL),
        ),
        Format(
            "minimax",
            think=THINK,
            calls={
                "<minimax:tool_call>": invoked("", "</minimax:tool_call>"),
                "<tool_calls>": json_list("</tool_calls>"),
            },
            special_tokens=_special(*THINK, "<minimax:tool_call>", "</minimax:tool_call>"),
        ),
        Format(
            "nemotron",
            think=THINK,
            calls={"<TOOLCALL>": json_list("</TOOLCALL>"), "<toolcall>": json_list("</toolcall>")},
            special_tokens=_special(*THINK, "<TOOLCALL>", "</TOOLCALL>", "<toolcall>", "</toolcall>"),
        ),
        Format(
            "command_a",
            think=("<|START_THINKING|>", "<|END_THINKING|>"),
            calls={"<|START_ACTION|>": json_list("<|END_ACTION|>")},
            wraps={
                "<|START_RESPONSE|>": before_answer,
                "<|END_RESPONSE|>": behind_answer("<|START_ACTION|>", "<|END_OF_TURN_TOKEN|>"),
            },
            special_tokens=_special(
                *("<|START_THINKING|>", "<|END_THINKING|>", "<|START_ACTION|>", "<|END_ACTION|>"),
                *("<|START_RESPONSE|>", "<|END_RESPONSE|>"),
            ),
        ),
        Format(
            "hunyuan",
            think=THINK,
            calls={"<tool_calls>": json_list("</tool_calls>")},
            wraps={"<answer>": before_answer, "</answer>": behind_answer("<tool_calls>")},
            special_tokens=_special(*THINK, "<tool_calls>", "</tool_calls>", "<answer>", "</answer>"),
        ),
        Format(
            "deepseek_v32",
            think=THINK,
            calls={"<｜DSML｜function_calls>": invoked("｜DSML｜", "</｜DSML｜function_calls>")},
            special_tokens=_special(*THINK, "｜DSML｜"),
        ),
        Format(
            "seed_oss",
            think=("<seed:think>", "</seed:think>"),
            calls={
                "<seed:tool_call>": _opening,
                "</seed:tool_call>": _closing,
                "<function=": tagged((">",), "<parameter=", ">", "", "</parameter>", "</function>"),
            },
            special_tokens=_special("<seed:think>", "</seed:think>", "<seed:tool_call>", "</seed:tool_call>"),
        ),
    )
}

# Text that is characteristic of a family's template; the first match decides.
_SIGNS = (
    ("｜DSML｜", "deepseek_v32"),
    ("<seed:tool_call>", "seed_oss"),
    ("<minimax:tool_call>", "minimax"),
    ("<beginning_of_sentence>", "minimax"),
    ("<TOOLCALL>", "nemotron"),
    ("<toolcall>", "nemotron"),
    ("<|START_ACTION|>", "command_a"),
    ("<|tool_call_start|>", "lfm2"),
    ("<|tool_list_start|>", "lfm2"),
    ("<|tool_calls_section_begin|>", "kimi_k2"),
    ("<|im_middle|>", "kimi_k2"),
    ("<|tool_call|>", "granite"),
    ("<tool_calls>", "hunyuan"),
    ("<|channel|>", "harmony"),
    ("<|tool_call>", "gemma4"),
    ("<start_function_call>", "functiongemma"),
    (_DEEPSEEK["call"], "deepseek_v3"),
    ("<arg_key>", "glm45"),
    ("<function=", "qwen3_coder"),
    ("<tool_call>", "hermes"),
    ("<|start_of_role|>", "granite"),
    ("[TOOL_CALLS]", "mistral"),
    ("[func_name1(", "llama_pythonic"),
    ("<|python_start|>", "llama3_json"),
    ("<|python_tag|>", "llama3_json"),
    ("<|start_header_id|>", "llama3_json"),
    ("<start_of_turn>", "gemma"),
    ("</think>", "think"),
)


def choose(template: str, name: str = "") -> Format:
    """Return the format with this name, or the one that a chat template uses.

    Raises:
        InvalidConfiguration: The name is unknown; names `tool_format`.
    """
    if name:
        if name not in FORMATS:
            raise InvalidConfiguration("tool_format", f"is {name!r}; it must be one of {', '.join(FORMATS)}")
        return FORMATS[name]
    return FORMATS[next((format_ for sign, format_ in _SIGNS if sign in template), "plain")]
