"""Output constraints: from the fields of requests to those of `SamplingParams`.

A constraint that cannot be enforced is refused by name, never ignored.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any, Literal

import msgspec

from kvforge.gateway.chat.shapes import ANY, Shape
from kvforge.protocol.errors import InvalidRequest


class JsonSchema(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A JSON schema for the answer. It is enforced with or without `strict`."""

    name: str = ""
    description: str | None = None
    schema: dict[str, Any] | bool | None = None
    strict: bool | None = None


class ResponseFormat(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """OpenAI's field `response_format`."""

    type: Literal["text", "json_object", "json_schema"]
    json_schema: JsonSchema | None = None


class StructuredOutputs(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """vLLM's field `structured_outputs`, with exactly one member."""

    json: dict[str, Any] | str | None = None
    json_object: bool | None = None
    regex: str | None = None
    choice: list[str] | None = None
    grammar: str | None = None


# Aliases of the fields of `structured_outputs` in older vLLM versions and in SGLang.
OTHER_NAMES = {
    "guided_json": "json",
    "guided_regex": "regex",
    "guided_choice": "choice",
    "guided_grammar": "grammar",
    "json_schema": "json",
    "regex": "regex",
}


def shape_of(
    response_format: ResponseFormat | None,
    structured: StructuredOutputs | None,
    others: Mapping[str, Any] | None = None,
) -> Shape:
    """Return the output constraint of a request.

    Args:
        response_format: OpenAI's field.
        structured: vLLM's field.
        others: Values of the fields of `OTHER_NAMES`.

    Raises:
        InvalidRequest: There are two constraints, or one is malformed.
    """
    shapes = [_of_format(response_format)] if response_format is not None else []
    shapes += [_of_structured(structured)] if structured is not None else []
    shapes += [_named(OTHER_NAMES[name], value, name) for name, value in (others or {}).items()]
    named = [shape for shape in shapes if shape.name]
    if len(named) > 1:
        raise InvalidRequest(named[1].field, f"cannot be combined with {named[0].field}")
    return named[0] if named else ANY


def _of_format(asked: ResponseFormat) -> Shape:
    if asked.type == "text":
        return ANY
    if asked.type == "json_object":
        return Shape("json_object", True, "response_format")
    schema = asked.json_schema.schema if asked.json_schema is not None else None
    if schema is None:
        raise InvalidRequest("response_format.json_schema.schema", "is missing")
    if isinstance(schema, bool):
        raise InvalidRequest("response_format.json_schema.schema", "is not a JSON object")
    return Shape("json_schema", schema, "response_format.json_schema.schema")


def _of_structured(asked: StructuredOutputs) -> Shape:
    given = {name: value for name in asked.__struct_fields__ if (value := getattr(asked, name)) not in (None, False)}
    if len(given) != 1:
        raise InvalidRequest("structured_outputs", f"has {len(given)} members (expected exactly one)")
    ((name, value),) = given.items()
    return _named(name, value, f"structured_outputs.{name}")


def _named(name: str, value: Any, field: str) -> Shape:
    """Return a constraint. `name` is a field of `StructuredOutputs`; `field` is its path in the request."""
    if name == "choice":
        if not value:
            raise InvalidRequest(field, "is empty")
        return Shape("regex", "|".join(re.escape(choice) for choice in value), field)
    return Shape({"json": "json_schema"}.get(name, name), value, field)
