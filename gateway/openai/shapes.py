"""What an answer must look like, as requests say it, to what `Sampling` calls it.

A shape that cannot be enforced is refused by name; none is taken for a wish.
"""

from __future__ import annotations

import re
from typing import Any, Literal

import msgspec

from gateway.chat.shapes import ANY, Shape
from kvforge.protocol.errors import InvalidRequest


class JsonSchema(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A schema that an answer follows. strict: it is enforced either way."""

    name: str = ""
    description: str | None = None
    schema: dict[str, Any] | bool | None = None
    strict: bool | None = None


class ResponseFormat(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """OpenAI's way to say it."""

    type: Literal["text", "json_object", "json_schema"]
    json_schema: JsonSchema | None = None


class StructuredOutputs(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """vLLM's: one of them."""

    json: dict[str, Any] | str | None = None
    json_object: bool | None = None
    regex: str | None = None
    choice: list[str] | None = None
    grammar: str | None = None


def shape_of(response_format: ResponseFormat | None, structured: StructuredOutputs | None) -> Shape:
    """The one that a request names. Raises InvalidRequest."""
    one = _of_format(response_format) if response_format is not None else ANY
    other = _of_structured(structured) if structured is not None else ANY
    if one.name and other.name:
        raise InvalidRequest("structured_outputs", "comes together with response_format; give one of them")
    return other if other.name else one


def _of_format(asked: ResponseFormat) -> Shape:
    if asked.type == "text":
        return ANY
    if asked.type == "json_object":
        return Shape("json_object", True, "response_format")
    schema = asked.json_schema.schema if asked.json_schema is not None else None
    if schema is None:
        raise InvalidRequest("response_format.json_schema.schema", "is missing")
    if isinstance(schema, bool):
        raise InvalidRequest("response_format.json_schema.schema", "is no object")
    return Shape("json_schema", schema, "response_format.json_schema.schema")


def _of_structured(asked: StructuredOutputs) -> Shape:
    given = {name: value for name in asked.__struct_fields__ if (value := getattr(asked, name)) not in (None, False)}
    if len(given) != 1:
        raise InvalidRequest("structured_outputs", f"names {len(given)} shapes; it must name one")
    ((name, value),) = given.items()
    field = f"structured_outputs.{name}"
    if name == "choice":
        if not value:
            raise InvalidRequest(field, "is empty")
        return Shape("regex", "|".join(re.escape(choice) for choice in value), field)
    return Shape({"json": "json_schema"}.get(name, name), value, field)
