"""After an answer of a chat, the gateway lets the coordinator compute it as a prompt."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from kvforge.gateway.config import Settings
from kvforge.protocol.errors import CoordinatorUnavailable, InvalidConfiguration
from tests.gateway.scripted import NAME, Script, application, client

CHAT = {"model": NAME, "messages": [{"role": "user", "content": "Hi"}]}
MESSAGE = {**CHAT, "max_tokens": 20}


def asked(script: Script, path: str, body: dict[str, Any], settings: Settings | None = None) -> str:
    """Send one request; return its answer."""

    async def run() -> str:
        async with client(application(script, settings)) as http:
            answer = await http.post(path, json=body)
            assert answer.status_code == 200, answer.text
            await asyncio.sleep(0)
            return answer.text

    return asyncio.run(run())


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(("path", "body"), [("/v1/chat/completions", CHAT), ("/v1/messages", MESSAGE)])
def test_a_whole_conversation_is_sent_ahead(path: str, body: dict[str, Any], stream: bool) -> None:
    script = Script(kinds=True)
    asked(script, path, {**body, "stream": stream})
    (prompt, _, options), (whole, count, ahead) = script.asked
    assert whole[: len(prompt)] == prompt and len(whole) == len(prompt) + 6  # "hello" and its end
    assert (count, ahead.ahead, ahead.max_tokens, ahead.tenant) == (1, True, 1, options.tenant)
    assert script.cancelled == []


@pytest.mark.parametrize("stream", [False, True])
def test_an_answer_is_whole_though_nothing_can_be_sent_ahead(stream: bool) -> None:
    script = Script(kinds=True, away=CoordinatorUnavailable("every replica is away"))
    answer = asked(script, "/v1/chat/completions", {**CHAT, "stream": stream})
    assert '"finish_reason":"stop"' in answer and "error" not in answer


@pytest.mark.parametrize("most", [0, 5])
def test_an_answer_beyond_the_bound_is_not(most: int) -> None:
    script = Script(kinds=True)
    asked(script, "/v1/chat/completions", CHAT, Settings(ahead_tokens_max=most))
    assert len(script.asked) == 1


def test_where_both_are_computed_alike_nothing_is() -> None:
    script = Script()
    asked(script, "/v1/chat/completions", CHAT)
    assert len(script.asked) == 1


def test_several_answers_are_not() -> None:
    script = Script(kinds=True)
    asked(script, "/v1/chat/completions", {**CHAT, "n": 2})
    assert len(script.asked) == 1


def test_a_wrong_bound_is_named() -> None:
    with pytest.raises(InvalidConfiguration, match="ahead_tokens_max"):
        Settings(ahead_tokens_max=-1)
