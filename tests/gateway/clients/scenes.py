"""The scripted model's answers to the tasks of the library clients, and the values that the clients must find."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from tests.gateway.clients.stage import Answer, call

OFFERED = re.compile(r"\[(\w+)\]")  # how the scripted template names a tool
OSLO = '{"city": "Oslo", "people": 700000}'
HELLO, RAIN, SNOW = "Hello from the model.", "It rains in Oslo.", "Snow tomorrow."


def last_tool(**arguments: Any) -> Callable[[str], str]:
    """Call the last tool in the prompt, because clients choose the name of a typed answer's tool."""
    return lambda prompt: call(OFFERED.findall(prompt)[-1], **arguments)


def larger(prompt: str) -> str:
    """Answer a city that is too small, and another one when the prompt has the reason of the refusal."""
    wrong, right = last_tool(city="Oslo", people=700_000), last_tool(city="Lagos", people=17_000_000)
    return (right if "a large city has a million people" in prompt else wrong)(prompt)


SCENES: Mapping[str, Sequence[Answer]] = {
    "Say hello.": [HELLO],
    "Is it wet in Oslo?": [call("weather", city="Oslo"), RAIN],
    "And tomorrow?": [SNOW],
    "Name a city.": [OSLO],
    "Name a city by a call.": [last_tool(city="Oslo", people=700_000)],
    "Name a large city by a call.": [larger],
    "Ask the colleague.": [call("transfer_to_colleague"), "The colleague answers."],
}
CITY = {"city": "Oslo", "people": 700_000}
# The values that every library must find over each of its APIs.
FOUND = {
    "whole": HELLO,
    "tokens": True,
    "streamed": HELLO,
    "tool": RAIN,
    "toolStreamed": RAIN,
    "next": SNOW,
    "parsed": CITY,
    "asked": ["Oslo", "Oslo"],
}
