"""Every route with its body and its answers.

Bodies are the structures that the routes decode. A test compares this table with the routes of the application and with
the answers of each.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from kvforge.gateway.anthropic import messages
from kvforge.gateway.batches import batch_routes
from kvforge.gateway.batches.file_routes import OCTETS
from kvforge.gateway.batches.files import FILES_MAX
from kvforge.gateway.http.errors import ANTHROPIC, OPENAI, api_of
from kvforge.gateway.http.fields import Reader
from kvforge.gateway.http.keys import KEY_HEADER, RESUME_HEADER, SESSION_HEADER
from kvforge.gateway.openai import chat, completions, conversations, responses, sessions, tokens
from kvforge.gateway.openai.paging import LIMIT_MAX
from kvforge.gateway.page import actions

JSON, EVENTS, TEXT = "application/json", "text/event-stream", "text/plain"
OPENMETRICS = "application/openmetrics-text"
Schema = Mapping[str, Any]
STRING: Schema = {"type": "string"}
# Readers of the document take it as the schema of the whole stream, or of each event.
STREAM: Schema = {"description": "Server-sent events."}
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
_ITEM = _object(id=STRING, type=STRING)
_RESPONSE = _object(id=STRING, object={"const": "response"}, status=STRING, output=_list(_object(type=STRING)))
_CONVERSATION = _object(id=STRING, object={"const": "conversation"}, created_at=INTEGER, metadata=ANY)
_SESSION_OBJECT = _object(
    id=STRING, object={"const": "session"}, created_at=INTEGER, metadata=ANY, parent=ANY, tokens=INTEGER
)
_SESSION_ID = Parameter("session_id", "path", "The id of a session.")
_DELETED = _object(id=STRING, object=STRING, deleted={"const": True})
_PAGE_OF_ITEMS = _object(object={"const": "list"}, data=_list(_ITEM), has_more={"type": "boolean"})
_RESPONSE_ID = Parameter("response_id", "path", "The id of a stored response.")
_CONVERSATION_ID = Parameter("conversation_id", "path", "The id of a conversation.")
_ITEM_ID = Parameter("item_id", "path", "The id of an item.")
_PAGING = (
    Parameter("limit", "query", f"How many items, 1 to {LIMIT_MAX}.", INTEGER),
    Parameter("order", "query", "asc or desc (the default: the newest first)."),
    Parameter("after", "query", "Begin behind the item with this id."),
)
_FILE = _object(
    id=STRING,
    object={"const": "file"},
    bytes=INTEGER,
    created_at=INTEGER,
    filename=STRING,
    purpose=STRING,
    status=STRING,
)
_BATCH = _object(id=STRING, object={"const": "batch"}, status=STRING, request_counts=ANY)
_BATCH_ID = Parameter("batch_id", "path", "The id of a batch.")
_FILE_ID = Parameter("file_id", "path", "The id of a file.")
_FILES_LIMIT = Parameter("limit", "query", f"How many files, 1 to {FILES_MAX}.", INTEGER)
_READY = _object(ready={"type": "boolean"}, reason=STRING)


def _whole(schema: Schema, *, streams: bool = False) -> Mapping[str, Mapping[str, Schema]]:
    return {"200": {JSON: schema, **({EVENTS: STREAM} if streams else {})}}


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
        "Continue a conversation of items.",
        responses.READER,
        _whole(_RESPONSE, streams=True),
        _GENERATING,
    ),
    Operation(
        "get",
        "/v1/responses/{response_id}",
        "Read a stored response, or stream its events again.",
        answers=_whole(_RESPONSE, streams=True),
        parameters=(
            _RESPONSE_ID,
            Parameter("stream", "query", "true: the events."),
            Parameter("starting_after", "query", "With stream: the events behind this sequence number.", INTEGER),
        ),
    ),
    Operation(
        "delete",
        "/v1/responses/{response_id}",
        "Delete a stored response; one in progress is cancelled.",
        answers=_whole(_DELETED),
        parameters=(_RESPONSE_ID,),
    ),
    Operation(
        "post",
        "/v1/responses/{response_id}/cancel",
        "Cancel a background response.",
        answers=_whole(_RESPONSE),
        parameters=(_RESPONSE_ID,),
    ),
    Operation(
        "get",
        "/v1/responses/{response_id}/input_items",
        "List the input items of a stored response.",
        answers=_whole(_PAGE_OF_ITEMS),
        parameters=(_RESPONSE_ID, *_PAGING),
    ),
    Operation(
        "post",
        "/v1/conversations",
        "Create a conversation.",
        conversations.CREATE,
        _whole(_CONVERSATION),
    ),
    Operation(
        "get",
        "/v1/conversations/{conversation_id}",
        "Read a conversation.",
        answers=_whole(_CONVERSATION),
        parameters=(_CONVERSATION_ID,),
    ),
    Operation(
        "post",
        "/v1/conversations/{conversation_id}",
        "Change the metadata of a conversation.",
        conversations.UPDATE,
        _whole(_CONVERSATION),
        (_CONVERSATION_ID,),
    ),
    Operation(
        "delete",
        "/v1/conversations/{conversation_id}",
        "Delete a conversation; its responses stay.",
        answers=_whole(_DELETED),
        parameters=(_CONVERSATION_ID,),
    ),
    Operation(
        "get",
        "/v1/conversations/{conversation_id}/items",
        "List the items of a conversation.",
        answers=_whole(_PAGE_OF_ITEMS),
        parameters=(_CONVERSATION_ID, *_PAGING),
    ),
    Operation(
        "post",
        "/v1/conversations/{conversation_id}/items",
        "Append items to a conversation.",
        conversations.ADD,
        _whole(_PAGE_OF_ITEMS),
        (_CONVERSATION_ID,),
    ),
    Operation(
        "get",
        "/v1/conversations/{conversation_id}/items/{item_id}",
        "Read an item of a conversation.",
        answers=_whole(_ITEM),
        parameters=(_CONVERSATION_ID, _ITEM_ID),
    ),
    Operation(
        "delete",
        "/v1/conversations/{conversation_id}/items/{item_id}",
        "Delete an item of a conversation.",
        answers=_whole(_CONVERSATION),
        parameters=(_CONVERSATION_ID, _ITEM_ID),
    ),
    Operation("post", "/v1/sessions", "Create a session.", sessions.CREATE, _whole(_SESSION_OBJECT)),
    Operation(
        "get",
        "/v1/sessions",
        "List the sessions.",
        answers=_whole(_object(object={"const": "list"}, data=_list(_SESSION_OBJECT), has_more={"type": "boolean"})),
        parameters=_PAGING,
    ),
    Operation(
        "get",
        "/v1/sessions/{session_id}",
        "Read a session.",
        answers=_whole(_SESSION_OBJECT),
        parameters=(_SESSION_ID,),
    ),
    Operation(
        "delete",
        "/v1/sessions/{session_id}",
        "Delete a session; its forks and responses stay.",
        answers=_whole(_DELETED),
        parameters=(_SESSION_ID,),
    ),
    Operation(
        "get",
        "/v1/sessions/{session_id}/items",
        "List the items of a session.",
        answers=_whole(_PAGE_OF_ITEMS),
        parameters=(_SESSION_ID, *_PAGING),
    ),
    Operation(
        "post",
        "/v1/sessions/{session_id}/items",
        "Append items to a session.",
        conversations.ADD,
        _whole(_PAGE_OF_ITEMS),
        (_SESSION_ID,),
    ),
    Operation(
        "post",
        "/v1/sessions/{session_id}/fork",
        "Create sessions with the same items.",
        sessions.FORK,
        _whole(_object(object={"const": "list"}, data=_list(_SESSION_OBJECT))),
        (_SESSION_ID,),
    ),
    Operation(
        "post",
        "/v1/sessions/{session_id}/rewind",
        "Remove the items behind one, or behind a number of tokens.",
        sessions.REWIND,
        _whole(_SESSION_OBJECT),
        (_SESSION_ID,),
    ),
    Operation(
        "post",
        "/v1/sessions/{session_id}/pin",
        "Keep the tokens and KV of a session for a time.",
        sessions.PIN,
        _whole(_SESSION_OBJECT),
        (_SESSION_ID,),
    ),
    Operation(
        "get",
        "/v1/sessions/{session_id}/explain",
        "Explain who holds the blocks of a session, and why its responses wait.",
        answers=_whole(_object(id=STRING, object={"const": "session.explanation"}, sequence=ANY, requests=_list(ANY))),
        parameters=(_SESSION_ID,),
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
    Operation("post", "/v1/files", "Upload a file (multipart/form-data: `file` and `purpose`).", answers=_whole(_FILE)),
    Operation(
        "get",
        "/v1/files",
        "List the files.",
        answers=_whole(_object(object={"const": "list"}, data=_list(_FILE), has_more={"type": "boolean"})),
        parameters=(_FILES_LIMIT, *_PAGING[1:], Parameter("purpose", "query", "Only files with this purpose.")),
    ),
    Operation("get", "/v1/files/{file_id}", "Describe a file.", answers=_whole(_FILE), parameters=(_FILE_ID,)),
    Operation(
        "delete",
        "/v1/files/{file_id}",
        "Delete a file.",
        answers=_whole(_DELETED),
        parameters=(_FILE_ID,),
    ),
    Operation(
        "get",
        "/v1/files/{file_id}/content",
        "Read the content of a file.",
        answers={"200": {OCTETS: STRING}},
        parameters=(_FILE_ID,),
    ),
    Operation("post", "/v1/batches", "Begin a batch of requests.", batch_routes.CREATE, _whole(_BATCH)),
    Operation(
        "get",
        "/v1/batches",
        "List the batches.",
        answers=_whole(_object(object={"const": "list"}, data=_list(_BATCH), has_more={"type": "boolean"})),
        parameters=_PAGING,
    ),
    Operation("get", "/v1/batches/{batch_id}", "Describe a batch.", answers=_whole(_BATCH), parameters=(_BATCH_ID,)),
    Operation(
        "post",
        "/v1/batches/{batch_id}/cancel",
        "Cancel a batch; what was answered stays in its output file.",
        answers=_whole(_BATCH),
        parameters=(_BATCH_ID,),
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
    Operation("get", "/page/events", "Stream the state that the live page shows.", answers={"200": {EVENTS: STREAM}}),
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
