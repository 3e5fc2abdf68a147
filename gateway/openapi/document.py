"""The OpenAPI document, generated from the table of operations and the structures of the bodies."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import msgspec

from kvforge import __version__
from kvforge.gateway.http.fields import Reader, UnimplementedField

from .operations import JSON, OPERATIONS, Operation, Schema

_REFERENCE = "#/components/schemas/"
# msgspec qualifies the names of structures that several modules have with the module.
_PREFIXES = {
    "kvforge.gateway.anthropic.request_body.": "Messages",
    "kvforge.gateway.openai.request_body.": "Chat",
    "kvforge.gateway.openai.fields.": "Chat",
    "kvforge.gateway.openai.responses_body.": "Responses",
}
_NULLABLE: Schema = {"type": ["string", "null"]}
_ERRORS: Mapping[str, Schema] = {
    "OpenAIError": {
        "type": "object",
        "required": ["error"],
        "properties": {
            "error": {
                "type": "object",
                "required": ["message", "type", "param", "code"],
                "properties": {
                    "message": {"type": "string"},
                    "type": {"type": "string"},
                    "param": {**_NULLABLE, "description": "The field of the request."},
                    "code": {**_NULLABLE, "description": "The error's own name (docs/errors.md)."},
                },
            }
        },
    },
    "AnthropicError": {
        "type": "object",
        "required": ["type", "error"],
        "properties": {
            "type": {"const": "error"},
            "error": {
                "type": "object",
                "required": ["type", "message"],
                "properties": {"type": {"type": "string"}, "message": {"type": "string"}, "code": {"type": "string"}},
            },
            "request_id": {"type": "string"},
        },
    },
}
_SECURITY = {
    "bearer": {"type": "http", "scheme": "bearer"},
    "key": {"type": "apiKey", "in": "header", "name": "x-api-key"},
}


def document() -> dict[str, Any]:
    """Return the OpenAPI document of this version."""
    readers = [operation.body for operation in OPERATIONS if operation.body is not None]
    kinds = [body.kind if isinstance(body, Reader) else body for body in readers]
    references, schemas = msgspec.json.schema_components(kinds, ref_template=_REFERENCE + "{name}")
    for body in readers:
        if isinstance(body, Reader):
            for kind, known in body.unimplemented_fields.items():
                _describe(schemas, kind, known)
    for schema in schemas.values():
        if schema.get("additionalProperties") is False:
            del schema["additionalProperties"]  # unknown fields are ignored, unless `strict_fields` is set
    bodies = dict(zip(map(id, readers), references, strict=True))
    paths: dict[str, dict[str, Any]] = {}
    for operation in OPERATIONS:
        paths.setdefault(operation.path, {})[operation.method] = _operation(operation, bodies.get(id(operation.body)))
    made = {
        "openapi": "3.1.0",
        "info": {
            "title": "kvforge",
            "version": __version__,
            "description": "OpenAI's and Anthropic's APIs over a paged KV cache. See docs/http.md.",
        },
        "paths": paths,
        "components": {"schemas": {**schemas, **_ERRORS}, "securitySchemes": _SECURITY},
        "security": [{}, {"bearer": []}, {"key": []}],  # without [keys], a gateway serves only its own host
    }
    return _named(made)


def _operation(operation: Operation, body: Schema | None) -> dict[str, Any]:
    error = {"description": "Refused.", "content": {JSON: {"schema": {"$ref": _REFERENCE + operation.errors}}}}
    answers = {
        status: {
            "description": "Answered." if status == "200" else "Not ready.",
            "content": {kind: {"schema": dict(schema)} for kind, schema in kinds.items()},
        }
        for status, kinds in operation.answers.items()
    }
    described: dict[str, Any] = {
        "summary": operation.summary,
        "operationId": f"{operation.method}{operation.path}".translate(str.maketrans("/{}", "___")),
        "responses": {**answers, "4XX": error, "5XX": error},
    }
    if operation.parameters:
        described["parameters"] = [
            {
                "name": one.name,
                "in": one.place,
                "required": one.place == "path",
                "description": one.why,
                "schema": dict(one.schema),
            }
            for one in operation.parameters
        ]
    if body is not None:
        described["requestBody"] = {"required": True, "content": {JSON: {"schema": body}}}
    return described


def _describe(schemas: dict[str, Any], kind: type, known: Mapping[str, UnimplementedField]) -> None:
    """Add the known fields that are not read to a structure's schema, with their accepted values."""
    schema = schemas.get(f"{kind.__module__}.{kind.__qualname__}", schemas.get(kind.__name__))
    if schema is None:
        return
    for name, one in known.items():
        # The schema allows any value: the refusal itself names the accepted ones.
        schema["properties"].setdefault(name, {"description": f"{one.why} (accepted: {one.accepted})"})


def _named(made: dict[str, Any]) -> dict[str, Any]:
    """Return the document with readable schema names instead of Python modules."""
    text = msgspec.json.encode(made).decode()
    for module, prefix in _PREFIXES.items():
        text = text.replace(f'"{_REFERENCE}{module}', f'"{_REFERENCE}{prefix}').replace(f'"{module}', f'"{prefix}')
    found: dict[str, Any] = msgspec.json.decode(text)
    return found
