"""Shapes are checked beside the event loop, by a bounded number of threads and a bounded queue."""

from __future__ import annotations

import asyncio
import functools
import json
import threading

import pytest

from gateway.chat.shapes import Shape
from gateway.generate import shape_checks
from kvforge.protocol.errors import InvalidRequest, QueueFull
from kvforge.protocol.messages import Grammar
from kvforge.text import grammar
from tests.gateway.scripted import Script, application, ask

pytest.importorskip("llguidance")
DEADLINE_S = 30.0
SCHEMA = {"type": "object", "properties": {"unlike any other": {"const": "test_shape_checks"}}}


def test_the_loop_runs_while_shapes_are_checked_and_more_than_the_queue_holds_are_refused() -> None:
    gate = threading.Event()
    loops: set[int] = set()

    def check() -> bool:
        loops.add(threading.get_ident())
        return gate.wait(DEADLINE_S)

    async def main() -> list[bool]:
        checks = [asyncio.create_task(shape_checks.checking(check)) for _ in range(shape_checks.WAITING_MAX)]
        await asyncio.sleep(0)
        with pytest.raises(QueueFull, match="shapes to check"):
            await shape_checks.checking(check)
        gate.set()
        return await asyncio.gather(*checks)

    assert asyncio.run(main()) == [True] * shape_checks.WAITING_MAX
    assert threading.get_ident() not in loops and len(loops) <= shape_checks.CHECKS_MAX
    assert not shape_checks._waiting


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/completions", "/v1/responses", "/v1/messages"])
def test_no_shape_of_a_request_is_checked_on_the_loop(path: str, monkeypatch: pytest.MonkeyPatch) -> None:
    grammar._validated.cache_clear()
    validated, checkers = grammar._validated.__wrapped__, list[str]()

    def noted(text: str) -> tuple[bool, list[str]]:
        checkers.append(threading.current_thread().name)
        return validated(text)

    monkeypatch.setattr(grammar, "_validated", functools.lru_cache(8)(noted))
    said = [{"role": "user", "content": "hi"}]
    formatted = {"type": "json_schema", "json_schema": {"name": "x", "schema": SCHEMA}}
    body = {
        "/v1/chat/completions": {"messages": said, "response_format": formatted},
        "/v1/completions": {"prompt": "hi", "response_format": formatted},
        "/v1/responses": {"input": "hi", "text": {"format": {"type": "json_schema", "name": "x", "schema": SCHEMA}}},
        "/v1/messages": {
            "messages": said,
            "max_tokens": 5,
            "output_config": {"format": {"type": "json_schema", "schema": SCHEMA}},
        },
    }[path]
    response = ask(application(Script()), path, {"model": "scripted", **body})
    assert response.status_code == 200, response.text
    assert len(checkers) == 1 and checkers[0].startswith("shapes")


def test_a_refused_shape_is_raised_by_who_asks_for_it() -> None:
    bad = Shape("json_schema", {"type": "array", "uniqueItems": True}, "x")
    asyncio.run(shape_checks.check_shape(bad))
    with pytest.raises(InvalidRequest, match="uniqueItems"):
        grammar.check(Grammar(kind="json_schema", text=json.dumps(bad.value)))
