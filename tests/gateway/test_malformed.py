"""Invariant: invalid client input raises only typed errors in the format of the called API.

Each field of a complete body is replaced by values of every kind, dropped and duplicated, at every depth; there are
also bodies that are not JSON. The bodies are fixed, so that runs are reproducible. In `make test` each place gets some
of the values, and each value comes to some of the places.
"""

from __future__ import annotations

import asyncio
import copy
import json
from collections.abc import Iterator
from itertools import product
from typing import Any

import httpx
import pytest
from starlette.applications import Starlette

from tests.amount import examples

from .scripted import NAME, Script, application, client, page

SCHEMA = {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}
FUNCTION = {"name": "f", "description": "d", "parameters": SCHEMA, "strict": False}
CALL = {"id": "c", "type": "function", "function": {"name": "f", "arguments": '{"city": "x"}'}}
SAMPLING = {"temperature": 0.5, "top_p": 0.9, "max_tokens": 5, "stream": False}
PENALTIES = {"top_k": 3, "min_p": 0.1, "repetition_penalty": 1.1, "seed": 1, "priority": 0, "cache_salt": "s"}
OPENAI = {
    **SAMPLING,
    **PENALTIES,
    "model": NAME,
    "n": 1,
    "stop": ["x"],
    "presence_penalty": 0.1,
    "frequency_penalty": 0.1,
    "logit_bias": {"5": 1.5},
    "ignore_eos": False,
    "stop_token_ids": [7],
    "stream_options": {"include_usage": True, "continuous_usage_stats": False},
    "return_token_ids": True,
    "user": "u",
    "metadata": {"a": "b"},
    "unknown": {"a": [1, None]},
}
CHAT_MESSAGES = [
    {"role": "system", "content": "s", "name": "n"},
    {"role": "user", "content": [{"type": "text", "text": "t", "cache_control": {"type": "ephemeral"}}]},
    {"role": "assistant", "content": None, "tool_calls": [CALL], "reasoning_content": "r", "refusal": None},
    {"role": "tool", "tool_call_id": "c", "content": "warm"},
]
TEXT = {"type": "output_text", "text": "t", "annotations": [], "logprobs": []}
ITEMS = [
    {"role": "user", "content": [{"type": "input_text", "text": "t"}]},
    {"type": "reasoning", "id": "r", "summary": [], "content": [{"type": "reasoning_text", "text": "hm"}]},
    {"type": "message", "role": "assistant", "id": "m", "status": "completed", "content": [TEXT]},
    {"type": "function_call", "call_id": "c", "name": "f", "arguments": '{"city": "x"}', "status": "completed"},
    {"type": "function_call_output", "call_id": "c", "output": "warm"},
]
BLOCKS = [
    {"type": "thinking", "thinking": "hm", "signature": "s"},
    {"type": "redacted_thinking", "data": "d"},
    {"type": "text", "text": "t", "citations": None},
    {"type": "tool_use", "id": "c", "name": "f", "input": {"city": "x"}},
]
RESULT = {"type": "tool_result", "tool_use_id": "c", "content": [{"type": "text", "text": "warm"}], "is_error": False}
SMALL = {"role": "user", "content": [{"type": "text", "text": "Hi"}]}
SMALL_ITEM = {"role": "user", "content": [{"type": "input_text", "text": "Hi"}]}
CONVERSATION: dict[str, Any] = {
    "model": NAME,
    "system": [{"type": "text", "text": "s"}],
    "messages": [
        {"role": "user", "content": "Hi"},
        {"role": "assistant", "content": BLOCKS},
        {"role": "user", "content": [RESULT, {"type": "text", "text": "t"}]},
    ],
    "tools": [{"name": "f", "description": "d", "input_schema": SCHEMA}],
    "tool_choice": {"type": "auto", "disable_parallel_tool_use": False},
    "thinking": {"type": "enabled", "budget_tokens": 1024},
    "output_config": {"effort": "low"},
    "context_management": {"edits": [{"type": "clear_thinking_20251015", "keep": "all"}]},
}
BODIES: dict[str, dict[str, Any]] = {
    "/v1/chat/completions": {
        **OPENAI,
        "messages": CHAT_MESSAGES,
        "tools": [{"type": "function", "function": FUNCTION}],
        "tool_choice": "auto",
        "logprobs": True,
        "top_logprobs": 2,
        "reasoning_effort": "low",
        "chat_template_kwargs": {"enable_thinking": False},
    },
    "/v1/completions": {**OPENAI, "prompt": ["a", "b"], "logprobs": 1, "best_of": 1, "echo": False, "suffix": None},
    "/v1/completions shaped": {
        "prompt": [1, 2],
        "max_tokens": 5,
        "response_format": {"type": "json_schema", "json_schema": {"name": "n", "schema": SCHEMA, "strict": True}},
    },
    "/v1/completions structured": {"prompt": "a", "max_tokens": 5, "structured_outputs": {"json": SCHEMA}},
    "/v1/responses": {
        **PENALTIES,
        "model": NAME,
        "input": ITEMS,
        "instructions": "i",
        "max_output_tokens": 5,
        "temperature": 0.5,
        "top_p": 0.9,
        "tools": [{"type": "function", **FUNCTION}],
        "tool_choice": {"type": "function", "name": "f"},
        "parallel_tool_calls": True,
        "reasoning": {"effort": "low", "summary": "auto"},
        "metadata": {"a": "b"},
        "include": ["reasoning.encrypted_content"],
        "store": False,
    },
    "/v1/responses shaped": {
        "input": "Hi",
        "text": {"format": {"type": "json_schema", "name": "n", "schema": SCHEMA}, "verbosity": "low"},
    },
    "/v1/messages": {
        **CONVERSATION,
        **SAMPLING,
        "top_k": 3,
        "stop_sequences": ["x"],
        "metadata": {"user_id": "u"},
    },
    "/v1/messages small": {"model": NAME, "max_tokens": 5, "messages": [SMALL]},
    "/v1/messages/count_tokens": CONVERSATION,
    "/v1/messages/count_tokens small": {"model": NAME, "messages": [SMALL]},
    "/v1/chat/completions small": {"messages": [SMALL]},
    "/v1/responses small": {"input": [SMALL_ITEM]},
    "/tokenize": {"model": NAME, "messages": CHAT_MESSAGES, "tools": [{"type": "function", "function": FUNCTION}]},
    "/tokenize text": {"prompt": "a", "add_special_tokens": True, "return_token_strs": True},
    "/detokenize": {"tokens": [1, 2, 3], "model": NAME},
    "/v1/embeddings": {"model": NAME, "input": "a"},
}
DEEP = "[" * 400 + "]" * 400
# JSON texts, since not all have a Python value.
VALUES = [
    *("null", "true", "false", "0", "-1", "1", "0.5", "-0.0", "1e308", "1e999", "9223372036854775808", "-1e19"),
    *("1" + "0" * 400, "NaN", "Infinity", '""', '" "', '"a"', '"\\u0000"', '"\\ud800"', '"\\ud83d\\ude00"', '"\ufffe"'),
    *(
        '"{\\"a\\": 1e999, \\"b\\": \\"\\\\ud800"',
        '"' + "x" * 5000 + '"',
        "[]",
        "{}",
        "[null]",
        "[[]]",
        "[{}]",
        '["a"]',
    ),
    *('{"": null}', '{"type": "x"}', '{"type": null}', '{"type": "text"}', '{"a": {"a": {"a": []}}}', '{"$ref": "#"}'),
    *('{"type": "object", "properties": 5}', DEEP, '{"type": "array", "items": ' * 90 + "{}" + "}" * 90),
]
MARK = "\x01here\x01"
WHOLE = [
    *(
        b"",
        b" ",
        b"\xff",
        b"\xef\xbb\xbf{}",
        b"{",
        b"}",
        b"null",
        b"[]",
        b'"a"',
        b"1",
        b"{}",
        b"{}{}",
        b"\x00",
        b"{'a': 1}",
    ),
    *(
        b'{"a": 1,}',
        b'{"model": "\xff"}',
        b'{"\xed\xa0\x80": 1}',
        b"[" * 100_000,
        b'{"a":' * 100_000,
        b"-",
        b"nul",
        b'{"a"',
    ),
    json.dumps({"messages": "a"}).encode("utf-16"),
]


def places(value: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """Yield each place of a body at every depth; in a schema only the first ones."""
    yield path
    if isinstance(value, dict):
        for name, one in value.items():
            yield from places(one, (*path, name))
    elif isinstance(value, list):
        for at, one in enumerate(value):
            yield from places(one, (*path, at))


def at(body: Any, path: tuple[Any, ...]) -> Any:
    for step in path:
        body = body[step]
    return body


def damaged(body: dict[str, Any], count: int = len(VALUES)) -> Iterator[bytes]:
    """Return the body with one place changed. Each place gets `count` of the values, of each kind some, in turn."""
    for number, path in enumerate(places(body)):
        if not path:
            continue
        changed = copy.deepcopy(body)
        holder = at(changed, path[:-1])
        holder[path[-1]] = MARK
        text = json.dumps(changed)
        for value in (one for turn, one in enumerate(VALUES) if (turn + number) * count % len(VALUES) < count):
            yield text.replace(json.dumps(MARK), value).encode("utf-8", "surrogatepass")
        del holder[path[-1]]
        yield json.dumps(changed).encode()
        if isinstance(path[-1], str):
            name = json.dumps(path[-1])
            doubled = text.replace(f"{name}: {json.dumps(MARK)}", f"{name}: {json.dumps(at(body, path))}, {name}: []")
            yield doubled.encode()


def check(path: str, sent: bytes, answer: httpx.Response) -> None:
    """Check that the client gets an answer or an error, in JSON or events."""
    shown = (answer.status_code, answer.text[:300], sent[:2000])
    assert answer.status_code == 200 or 400 <= answer.status_code < 500, shown
    kind = answer.headers["content-type"]
    if answer.status_code == 200 and kind.startswith("text/event-stream"):
        return
    assert kind == "application/json", shown
    found = json.loads(answer.content, parse_constant=lambda name: pytest.fail(f"{name} is no JSON"))
    if answer.status_code == 200:
        assert (isinstance(found, dict) and "error" not in found) or found["error"] is None, shown
        return
    error = found["error"]
    assert isinstance(error["message"], str) and error["message"] and isinstance(error["type"], str), shown
    if path.startswith("/v1/messages"):
        assert found["type"] == "error" and found["request_id"] == answer.headers["request-id"], shown
    else:
        assert set(error) == {"message", "type", "param", "code"}, shown
        assert path.startswith("/page/") or answer.headers["x-request-id"], shown


def post_all(
    path: str, bodies: list[bytes], headers: tuple[tuple[str, bytes], ...] = (), app: Starlette | None = None
) -> set[int]:
    """Send each body with each of the headers and check each answer; return the statuses."""
    app = app or application(Script(['<tool_call>{"name": "f", "arguments": {"city": "x'], reason="length", step=1000))

    async def post() -> set[int]:
        statuses = set()
        async with client(app) as http:
            for body, header in product(bodies, headers or (None,)):
                answer = await http.post(path, content=body, headers=[header] if header is not None else None)
                check(path, body, answer)
                statuses.add(answer.status_code)
        return statuses

    return asyncio.run(post())


@pytest.mark.parametrize("name", BODIES)
def test_a_body_with_one_place_changed(name: str) -> None:
    path, body = name.partition(" ")[0], BODIES[name]
    expected = {400} if "embeddings" in path else {200}
    assert post_all(path, [json.dumps(body).encode()]) == expected, "the body itself is taken"
    statuses = post_all(path, list(damaged(body, examples(len(VALUES)))))
    assert statuses <= {200, 400, 404} and 400 in statuses


@pytest.mark.parametrize("path", sorted({name.partition(" ")[0] for name in BODIES}))
def test_a_body_that_is_none(path: str) -> None:
    assert post_all(path, WHOLE) == {400}


HEADERS = (
    "idempotency-key",
    "last-event-id",
    "x-session-id",
    "authorization",
    "content-type",
    "content-encoding",
    "accept",
)
HEADER_VALUES = (
    b"",
    b" ",
    b"\xff",
    "\u2615".encode(),
    b"0",
    b"-1",
    b"99999999999999999999",
    b"x" * 5000,
    b"gzip",
    b"Bearer",
    b"a/b;q=x",
)


@pytest.mark.parametrize("name", BODIES)
def test_headers_of_any_value(name: str) -> None:
    headers = tuple(product(HEADERS, HEADER_VALUES))
    assert post_all(name.partition(" ")[0], [json.dumps(BODIES[name]).encode()], headers) <= {200, 400, 409, 415}


@pytest.mark.parametrize(("path", "body"), [("/page/cancel", {"request": 1}), ("/page/drain", {"deadline_s": 1.5})])
def test_an_action_of_the_page(path: str, body: dict[str, Any]) -> None:
    sender = {"x-kvforge-page": "1", "origin": "http://localhost", "content-type": "application/json"}

    async def post() -> set[int]:
        statuses = set()
        async with client(page()) as http:
            for sent in [*WHOLE, *damaged(body)]:
                answer = await http.post(path, content=sent, headers=sender)
                check(path, sent, answer)
                statuses.add(answer.status_code)
        return statuses

    assert asyncio.run(post()) == {200, 400, 413}
