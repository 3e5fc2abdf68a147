"""instructor: typed output in each of its modes, whole and streamed in parts, several calls, a repaired answer."""

import json
import os
from typing import Any

import instructor
import openai
from instructor import Mode
from pydantic import BaseModel, field_validator

CITY, CITY_BY_TOOL, WRONG = "Name a city.", "Name a city by a call.", "Name a large city by a call."


class City(BaseModel):
    """A city."""

    city: str
    people: int


class LargeCity(BaseModel):
    """A large city."""

    city: str
    people: int

    @field_validator("people")
    @classmethod
    def large(cls, people: int) -> int:
        """Refuse a small city, which sends the call back with the reason."""
        if people < 1_000_000:
            raise ValueError("a large city has a million people")
        return people


def say(text: str) -> list[Any]:
    """A conversation."""
    return [{"role": "user", "content": text}]


client = openai.OpenAI(base_url=f"{os.environ['URL']}/v1", api_key="none", max_retries=0)
found: dict[str, Any] = {}
modes = {Mode.TOOLS: CITY_BY_TOOL, Mode.JSON: CITY, Mode.JSON_SCHEMA: CITY, Mode.MD_JSON: CITY}
for mode, task in {**modes, Mode.RESPONSES_TOOLS: CITY_BY_TOOL}.items():
    patched = instructor.from_openai(client, mode=mode, model="scripted")
    asking: dict[str, Any] = {"response_model": City, "max_retries": 0}
    whole = patched.create(messages=say(task), **asking)
    parts = list(patched.create_partial(messages=say(task), **asking)) if mode is not Mode.RESPONSES_TOOLS else [whole]
    found[mode.name] = [whole.model_dump(), parts[-1].model_dump()]
for mode in (Mode.TOOLS, Mode.RESPONSES_TOOLS):
    patched = instructor.from_openai(client, mode=mode, model="scripted")
    repaired = patched.create(response_model=LargeCity, messages=say(WRONG), max_retries=2)
    found[f"repaired_{mode.name}"] = repaired.model_dump()
print(json.dumps(found))
