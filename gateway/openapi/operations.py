"""Every route with its body and its answers.

Bodies are the structures that the routes decode. A test compares this table with the routes of the application and with
the answers of each.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from kvforge.gateway.anthropic import messages
from kvforge.gateway.http.errors import ANTHROPIC, OPENAI, api_of
from kvforge.gateway.http.fields import Reader
from kvforge.gateway.http.keys import KEY_HEADER, RESUME_HEADER, SESSION_HEADER
from kvforge.gateway.openai import chat, completions, responses, tokens
from kvforge.gateway.page import actions

JSON, EVENTS, TEXT = "application/json", "text/event-stream", "text/plain"
OPENMETRICS = "application/openmetrics-text"
Schema = Mapping[str, Any]
STRING: Schema = {"type": "string"}
INTEGER: Schema = {"type": "integer"}
ANY: Schema = {}


def _object(**properties: Schema) -> Schema:
    """Return the schema of an object with at least these members."""
    return {"type": "object", "required": sorted(properties), "properties": properties}


def _list(items: Schema) -> Schema:
    return {"type": "array", "items": items}


@dataclass(frozen=True, slots=True)
class Parameter:
    """A parameter outside the body. `place` is "path", "query" or "header"."""

    name: str
    place: str
    why: str
    schema: Schema = field(default_factory=lambda: STRING)


@dataclass(frozen=True, slots=True)
class Operation:
    """One method of one path.

    Attributes:
        method: In lower case.
        path: With the names of its parameters in braces.
        summary: One sentence.
        body: The decoder of the body, or its structure; None if there is no body, or it is not read.
        answers: The schema of an answer by status and media type.
        parameters: The parameters outside the body.
    """

    method: str
    path: str
    summary: str
    body: Reader[Any] | type | None = None
    answers: Mapping[str, Mapping[str, Schema]] = field(default_factory=dict)
    parameters: tuple[Parameter, ...] = ()

    @property
    def errors(self) -> str:
        """The schema name of its errors."""
        return {id(OPENAI): "OpenAIError", id(ANTHROPIC): "AnthropicError"}[id(api_of(self.path, ()))]


_SESSION = Parameter(SESSION_HEADER, "header", "Requests with the same value go to the same replica.")
_KEY = Parameter(
    KEY_HEADER,
    "header",
    "The request survives a lost connection; sending it again with the same key reads the same answer.",
)
_RESUME = Parameter(RESUME_HEADER, "header", "With the same key: the number of tokens that the client already has.")
_GENERATING = (_KEY, _RESUME, _SESSION)
_PAGE = Parameter(actions.HEADER, "header", "1, as the live page sends it.")
_USAGE = _object(prompt_tokens=INTEGER, completion_tokens=INTEGER, total_tokens=INTEGER)
_CHOICES = _object(
    id=STRING, object=STRING, created=INTEGER, model=STRING, choices=_list(_object(index=INTEGER)), usage=_USAGE
)
_MODEL = _object(id=STRING, object={"const": "model"}, created=INTEGER, owned_by=STRING, max_model_len=INTEGER)
_READY = _object(ready={"type": "boolean"}, reason=STRING)


def _whole(schema: Schema, *, streams: bool = False) -> Mapping[str, Mapping[str, Schema]]:
    return {"200": {JSON: schema, **({EVENTS: STRING} if streams else {})}}


OPERATIONS = (
    Operation(
        "post",
        "/v1/chat/completions",
        "Continue a conversation.",
        chat.READER,
        _whole(_CHOICES, streams=True),
        _GENERATING,
    ),
    Operation(
        "post",
        "/v1/completions",
        "Continue texts, or lists of token ids.",
        completions.READER,
        _whole(_CHOICES, streams=True),
        _GENERATING,
    ),
    Operation(
        "post",
        "/v1/responses",
        "Continue a conversation of items; responses are not stored.",
        responses.READER,
        _whole(
            _object(id=STRING, object={"const": "response"}, status=STRING, output=_list(_object(type=STRING))),
            streams=True,
        ),
        _GENERATING,
    ),
    Operation("post", "/v1/embeddings", "Refused: this service generates text."),
    Operation(
        "get",
        "/v1/models",
        "List the names of the model.",
        answers=_whole(_object(object={"const": "list"}, data=_list(_MODEL))),
    ),
    Operation(
        "get",
        "/v1/models/{name}",
        "Describe the model.",
        answers=_whole(_MODEL),
        parameters=(Parameter("name", "path", "A name of the model."),),
    ),
    Operation(
        "post",
        "/v1/messages",
        "Continue a conversation (Anthropic's API).",
        messages.CREATE,
        _whole(
            _object(
                id=STRING,
                type={"const": "message"},
                role={"const": "assistant"},
                model=STRING,
                content=_list(_object(type=STRING)),
                stop_reason=STRING,
                stop_sequence={"type": ["string", "null"]},
                usage=_object(input_tokens=INTEGER, output_tokens=INTEGER),
            ),
            streams=True,
        ),
        (_KEY, _SESSION),
    ),
    Operation(
        "post",
        "/v1/messages/count_tokens",
        "Count the tokens of a conversation.",
        messages.COUNT,
        _whole(_object(input_tokens=INTEGER)),
    ),
    Operation(
        "post",
        "/tokenize",
        "Tokenize a text or a conversation.",
        tokens.TOKENIZE,
        _whole(_object(count=INTEGER, max_model_len=INTEGER, tokens=_list(INTEGER))),
    ),
    Operation("post", "/detokenize", "Decode token ids.", tokens.DETOKENIZE, _whole(_object(prompt=STRING))),
    Operation(
        "get",
        "/health",
        "Check whether a request would be served.",
        answers={"200": {JSON: _READY}, "503": {JSON: _READY}},
    ),
    Operation(
        "get",
        "/readyz",
        "The same as /health, under Kubernetes' name.",
        answers={"200": {JSON: _READY}, "503": {JSON: _READY}},
    ),
    Operation("get", "/livez", "Check whether this process is alive.", answers=_whole(_object())),
    Operation("get", "/version", "The version of kvforge.", answers=_whole(_object(version=STRING))),
    Operation("get", "/metrics", "Metrics for Prometheus.", answers={"200": {TEXT: STRING, OPENMETRICS: STRING}}),
    Operation("get", "/page/events", "Stream the state that the live page shows.", answers={"200": {EVENTS: STRING}}),
    Operation(
        "get",
        "/page/explain",
        "Explain the state of a block, a request or a tenant.",
        answers=_whole(_object(subject=STRING, sentences=_list(STRING), facts=ANY)),
        parameters=tuple(
            Parameter(name, "query", f"The {name}; give exactly one of {', '.join(actions.SUBJECTS)}.")
            for name in actions.SUBJECTS
        ),
    ),
    Operation("post", "/page/cancel", "Cancel a request.", actions.CancelBody, _whole(_object()), (_PAGE,)),
    Operation("post", "/page/drain", "Stop admitting requests.", actions.DrainBody, _whole(_object()), (_PAGE,)),
)
