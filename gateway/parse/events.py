"""The events of a model's answer, as every parser yields them.

All `Content.text` in order is the content of the message, all `Reasoning.text` its reasoning. A `ToolCall` opens a
call; the following `Arguments` with its `index`, joined, are the arguments.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Content:
    """Text for the user, never empty."""

    text: str


@dataclass(frozen=True, slots=True)
class Reasoning:
    """A piece of the model's reasoning, never empty."""

    text: str


@dataclass(frozen=True, slots=True)
class ToolCall:
    """A call begins, with its complete name.

    Attributes:
        index: 0, 1, ... within the answer.
        name: The tool.
        call_id: The format's own id; "": the API derives one from the request's id and the index.
    """

    index: int
    name: str
    call_id: str = ""


@dataclass(frozen=True, slots=True)
class Arguments:
    """A piece of the JSON text of a call's arguments, never empty. Joined, they are one JSON object."""

    index: int
    text: str


Event = Content | Reasoning | ToolCall | Arguments
