"""Refusals: fields by their names in the request, overflow in each API's wording, ids, formats."""

from __future__ import annotations

import asyncio
import gzip
import hashlib
import json
from pathlib import Path
from typing import Any

import httpx
import pytest

from kvforge.gateway.access import Access
from kvforge.gateway.app import make_app
from kvforge.gateway.chat.naming import Names
from kvforge.gateway.config import Key, Settings
from kvforge.gateway.http.entry import plain
from kvforge.gateway.http.errors import ContextOverflow, TooLarge
from kvforge.protocol.errors import InvalidRequest, QueueFull, WorkerError
from tests.gateway.scripted import NAME, Script, application, ask, client

HELLO = [{"role": "user", "content": "Hi"}]
CHAT, COMPLETIONS, RESPONSES, MESSAGES = "/v1/chat/completions", "/v1/completions", "/v1/responses", "/v1/messages"
BODIES: dict[str, dict[str, Any]] = {
    CHAT: {"messages": HELLO},
    COMPLETIONS: {"prompt": "Once"},
    RESPONSES: {"input": "Hi"},
    MESSAGES: {"model": NAME, "max_tokens": 9, "messages": HELLO},
}
LONG = InvalidRequest("prompt", "long", prompt_tokens=9010, max_tokens=5, context_tokens=8192)
MUCH = InvalidRequest("max_tokens", "much", prompt_tokens=10, max_tokens=9000, context_tokens=8192)


@pytest.mark.parametrize(
    ("path", "fields", "refused", "param"),
    [
        (CHAT, {}, "prompt", "messages"),
        (CHAT, {"max_tokens": 5}, "max_tokens", "max_tokens"),
        (CHAT, {"max_completion_tokens": 5}, "max_tokens", "max_completion_tokens"),
        (CHAT, {"logit_bias": {"1": 1}}, "sampling.logit_bias", "logit_bias"),
        (CHAT, {"stop_token_ids": [1]}, "sampling.stop_tokens", "stop_token_ids"),
        (CHAT, {"logprobs": True}, "sampling.logprobs", "top_logprobs"),
        (CHAT, {"cache_salt": "a"}, "salt", "cache_salt"),
        (CHAT, {"structured_outputs": {"regex": "a"}}, "sampling.regex", "structured_outputs.regex"),
        (CHAT, {"regex": "a"}, "sampling.regex", "regex"),
        (CHAT, {"guided_json": {}}, "sampling.json_schema", "guided_json"),
        (COMPLETIONS, {"logprobs": 1}, "sampling.logprobs", "logprobs"),
        (
            COMPLETIONS,
            {"structured_outputs": {"grammar": 'start: "a"'}},
            "sampling.grammar",
            "structured_outputs.grammar",
        ),
        (COMPLETIONS, {}, "prompt", "prompt"),
        (RESPONSES, {}, "prompt", "input"),
        (RESPONSES, {"max_output_tokens": 5}, "max_tokens", "max_output_tokens"),
        (
            RESPONSES,
            {"text": {"format": {"type": "json_schema", "schema": {}}}},
            "sampling.json_schema",
            "text.format.schema",
        ),
        (MESSAGES, {}, "prompt", "messages"),
        (MESSAGES, {}, "max_tokens", "max_tokens"),
        (MESSAGES, {"top_k": 3}, "sampling.top_k", "top_k"),
    ],
)
@pytest.mark.parametrize("stream", [False, True])
def test_what_the_coordinator_refuses_has_the_requests_own_name(
    path: str, fields: dict[str, Any], refused: str, param: str, stream: bool
) -> None:
    script = Script(refusal=InvalidRequest(refused, "is wrong"))
    answer = ask(application(script), path, {**BODIES[path], **fields, "stream": stream})
    error = answer.json()["error"]
    assert (answer.status_code, error["message"]) == (400, f"{param}: is wrong")
    assert path == MESSAGES or error["param"] == param


@pytest.mark.parametrize(("path", "param"), [(CHAT, "messages"), (RESPONSES, "input")])
def test_a_conversation_of_nothing_is_named(path: str, param: str) -> None:
    answer = ask(application(Script()), path, {param: []})
    assert (answer.status_code, answer.json()["error"]["param"]) == (400, param)


WRONG = {"type": "object", "properties": {"a": {"type": "array", "uniqueItems": True}}}
STRICT = {"name": "f", "strict": True, "parameters": WRONG}


@pytest.mark.parametrize(
    ("path", "fields", "field"),
    [
        (CHAT, {"tools": [{"type": "function", "function": STRICT}]}, "tools[0].function.parameters"),
        (RESPONSES, {"tools": [{"type": "web_search"}, {"type": "function", **STRICT}]}, "tools[1].parameters"),
        (
            RESPONSES,
            {"tools": [{"type": "namespace", "name": "n", "tools": [{"type": "function", **STRICT}]}]},
            "tools[0].tools[0].parameters",
        ),
        (MESSAGES, {"tools": [{"name": "f", "strict": True, "input_schema": WRONG}]}, "tools[0].input_schema"),
        (CHAT, {"tools": [{"type": "mcp"}, {"type": "function", "function": {"name": "a b"}}]}, "tools[1]"),
        (RESPONSES, {"text": {"format": {"type": "json_schema"}}}, "text.format.schema"),
    ],
)
def test_what_is_wrong_with_a_schema_is_named_where_the_request_has_it(
    path: str, fields: dict[str, Any], field: str
) -> None:
    answer = ask(application(Script()), path, {**BODIES[path], **fields})
    assert answer.status_code == 400 and answer.json()["error"]["message"].startswith(f"{field}: "), answer.text


def test_an_error_in_the_middle_of_a_stream_has_the_requests_own_name() -> None:
    script = Script(["abc"], error=InvalidRequest("sampling.regex", "cannot go on"))
    body = {"messages": HELLO, "stream": True, "structured_outputs": {"regex": "a+"}}
    last = ask(application(script), CHAT, body).text.strip().split("\n")[-1]
    assert json.loads(last[6:])["error"]["param"] == "structured_outputs.regex"


@pytest.mark.parametrize("path", [CHAT, COMPLETIONS, RESPONSES])
@pytest.mark.parametrize("refusal", [LONG, MUCH])
def test_overflow_has_the_code_and_the_words_of_openai(path: str, refusal: InvalidRequest) -> None:
    answer = ask(application(Script(refusal=refusal)), path, BODIES[path])
    error = answer.json()["error"]
    assert (answer.status_code, error["type"], error["code"]) == (
        400,
        "invalid_request_error",
        "context_length_exceeded",
    )
    assert error["message"].startswith("This model's maximum context length is 8192 tokens.")
    assert "reduce the length of" in error["message"] and error["param"] in error["message"]


def test_overflow_has_the_words_of_anthropic() -> None:
    def message(refusal: InvalidRequest) -> str:
        answer = ask(application(Script(refusal=refusal)), MESSAGES, BODIES[MESSAGES])
        assert answer.json()["error"]["type"] == "invalid_request_error"
        return str(answer.json()["error"]["message"])

    assert message(LONG) == "prompt is too long: 9010 tokens > 8191 maximum"
    assert message(MUCH).startswith("input length and `max_tokens` exceed context limit: 10 + 9000 > 8192")


def test_a_renamed_error_is_of_its_kind() -> None:
    renamed = Names({"body": "input"}).renamed(TooLarge("body", "is large", limit=3))
    assert type(renamed) is TooLarge and renamed.fields == {"field": "input", "limit": 3}
    assert renamed.message == "input: is large" == str(renamed)
    overflow = ContextOverflow("messages", 9, 1, 8)
    assert type(Names({}).renamed(overflow)) is ContextOverflow and str(overflow) == overflow.message


@pytest.mark.parametrize("refusal", [InvalidRequest("temperature", "x"), QueueFull(8, 10), WorkerError("gone")])
@pytest.mark.parametrize("path", BODIES)
def test_refusals_have_an_id(path: str, refusal: Exception) -> None:
    app = application(Script(refusal=refusal))  # type: ignore[arg-type]
    first, second = (ask(app, path, BODIES[path]) for _ in range(2))
    assert first.status_code >= 400
    name = "request-id" if path == MESSAGES else "x-request-id"
    assert first.headers[name].startswith("req_") and first.headers[name] != second.headers[name]
    if path == MESSAGES:
        assert first.json()["request_id"] == first.headers[name]


def sent(method: str, path: str, app: Any, **more: Any) -> httpx.Response:
    async def send() -> httpx.Response:
        async with client(app) as http:
            return await http.request(method, path, **more)

    return asyncio.run(send())


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """Return the whole application, with a key and without a coordinator."""
    hashed = f"sha256:{hashlib.sha256(b'k').hexdigest()}"
    folder = str(tmp_path_factory.mktemp("none"))
    settings = Settings(runtime_dir=folder, keys={"ada": Key(hash=hashed)}, body_bytes_max=2000)
    return make_app(settings, Access(settings))


@pytest.mark.parametrize(
    ("method", "path", "status", "more"),
    [
        ("POST", "/v1/messages/foo", 404, {}),
        ("GET", "/v1/messages", 405, {}),
        ("DELETE", "/v1/messages/count_tokens", 405, {}),
        ("POST", "/v1/messages", 401, {"json": {}}),
        ("POST", "/v1/messages", 400, {"content": b"[", "headers": {"x-api-key": "k"}}),
        ("POST", "/v1/messages", 413, {"content": b"x" * 3000, "headers": {"x-api-key": "k"}}),
        ("POST", "/v1/messages", 415, {"content": b"x", "headers": {"x-api-key": "k", "content-encoding": "gzip"}}),
        ("GET", "/v1/models", 503, {"headers": {"x-api-key": "k", "anthropic-version": "2023-06-01"}}),
        ("GET", "/v1/skills", 404, {"headers": {"anthropic-version": "2023-06-01"}}),
        ("GET", "/v1/files", 401, {"headers": {"anthropic-version": "2023-06-01"}}),
        ("POST", "/v1/foo", 404, {}),
        ("GET", "/v1/chat/completions", 405, {}),
        ("POST", "/v1/chat/completions", 401, {"json": {}}),
        ("POST", "/v1/chat/completions", 400, {"content": b"[", "headers": {"x-api-key": "k"}}),
        ("POST", "/v1/chat/completions", 413, {"content": b"x" * 3000, "headers": {"x-api-key": "k"}}),
        ("POST", "/v1/responses", 415, {"content": b"x", "headers": {"x-api-key": "k", "content-encoding": "br"}}),
        ("GET", "/v1/models", 503, {"headers": {"x-api-key": "k"}}),
        ("GET", "/metrics", 401, {}),
        ("GET", "/page/events", 401, {}),
    ],
)
def test_every_refusal_has_the_shape_and_the_id_of_its_api(
    whole: Any, method: str, path: str, status: int, more: dict[str, Any]
) -> None:
    answer = sent(method, path, whole, **more)
    assert answer.status_code == status, answer.text
    body = answer.json()
    if path.startswith("/v1/messages") or "anthropic-version" in more.get("headers", {}):
        assert body["type"] == "error" and body["error"].keys() >= {"type", "message"}
        assert body["request_id"] == answer.headers["request-id"]
        assert status != 404 or body["error"]["type"] == "not_found_error"
    else:
        assert body["error"].keys() == {"message", "type", "param", "code"}
        assert answer.headers["x-request-id"].startswith("req_")
    assert status != 405 or answer.headers["allow"]


def test_a_fault_of_our_own_is_json_with_an_id_under_every_path(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    settings = Settings(runtime_dir=str(tmp_path))
    monkeypatch.setattr("kvforge.gateway.app.__version__", object())  # no JSON

    async def send() -> httpx.Response:
        transport = httpx.ASGITransport(make_app(settings, Access(settings)), raise_app_exceptions=False)
        async with httpx.AsyncClient(transport=transport, base_url="http://localhost") as http:
            return await http.get("/version")

    answer = asyncio.run(send())
    assert (answer.status_code, answer.json()["error"]["code"]) == (500, "internal_error")
    assert answer.headers["x-request-id"].startswith("req_")


def test_answers_have_an_id_too(whole: Any) -> None:
    assert sent("GET", "/version", whole).headers["x-request-id"].startswith("req_")
    answered = ask(application(Script()), CHAT, BODIES[CHAT])
    assert answered.headers["x-request-id"].isdecimal()  # the coordinator's request id


@pytest.mark.parametrize(
    ("path", "same"),
    [("/v1/models/", "/v1/models"), ("//v1//models", "/v1/models"), ("/", "/"), ("///", "/"), ("/a/b", "/a/b")],
)
def test_slashes_lead_where_one_fewer_does(path: str, same: str) -> None:
    assert plain(path) == same


def test_a_slash_at_the_end_of_a_path_leads_there(whole: Any) -> None:
    assert sent("GET", "/version/", whole).status_code == 200
    assert sent("POST", "/v1//messages/", whole, json={}).status_code == 401


def test_a_compressed_body_is_refused_for_that() -> None:
    body, headers = gzip.compress(json.dumps(BODIES[CHAT]).encode()), {"content-encoding": "gzip"}
    answer = ask(application(Script()), CHAT, body, headers)
    assert answer.status_code == 415 and "content-encoding" in answer.json()["error"]["message"]
    plainly = ask(application(Script()), CHAT, json.dumps(BODIES[CHAT]).encode(), {"content-encoding": "identity"})
    assert plainly.status_code == 200


@pytest.mark.parametrize(("ids", "param"), [([1, 99999999], "tokens[1]"), ([512], "tokens[0]"), ([-1], "tokens")])
def test_tokens_outside_of_the_vocabulary_have_no_text(ids: list[int], param: str) -> None:
    answer = ask(application(Script()), "/detokenize", {"tokens": ids})
    assert (answer.status_code, answer.json()["error"]["param"]) == (400, param)


def test_a_list_of_models_is_read_by_clients_of_both_apis() -> None:
    from anthropic.types import ModelInfo
    from openai.types import Model

    for headers in ({}, {"anthropic-version": "2023-06-01"}):
        listed = sent("GET", "/v1/models", application(Script()), headers=headers).json()
        assert [Model.model_validate(one).id for one in listed["data"]] == [NAME, "other"]
        assert [ModelInfo.model_validate(one).display_name for one in listed["data"]] == [NAME, "other"]
        if headers:
            assert (listed["first_id"], listed["last_id"], listed["has_more"]) == (NAME, "other", False)


def test_a_thread_is_refused_so_that_clients_send_all_messages() -> None:
    """Anthropic's SDKs continue without a thread if the refusal has these details."""
    body = {**BODIES[MESSAGES], "thread": {"type": "create"}}
    for path in (MESSAGES, f"{MESSAGES}/count_tokens"):
        response = ask(application(Script()), path, body)
        assert response.status_code == 400
        error = response.json()["error"]
        assert error["details"] == {"error_code": "thread_unsupported_request", "unsupported": ["thread"]}
        assert error["message"].startswith("thread: conversations are not stored: send all messages")
    assert (
        "details" not in ask(application(Script()), MESSAGES, {**body, "thread": None, "messages": 1}).json()["error"]
    )
