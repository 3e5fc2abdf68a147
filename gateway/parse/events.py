"""What a model's answer consists of, piece by piece; every parser gives these and nothing else.

Joined: all `Content.text` in order are the message's content, all `Reasoning.text` its reasoning; a `ToolCall` opens a
call and the `Arguments` with its `index` that follow, joined, are its arguments.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Content:
    """Text for the user. Never empty."""

    text: str


@dataclass(frozen=True, slots=True)
class Reasoning:
    """What the model thinks before it answers. Never empty."""

    text: str


@dataclass(frozen=True, slots=True)
class ToolCall:
    """A call begins; its name is whole. index: 0, 1, ... in the answer. call_id: the format's own, or "": one is made
    of the request's id and the index by whoever sends it."""

    index: int
    name: str
    call_id: str = ""


@dataclass(frozen=True, slots=True)
class Arguments:
    """A piece of the JSON text of a call's arguments. Never empty; joined they are one JSON object."""

    index: int
    text: str


Event = Content | Reasoning | ToolCall | Arguments
