"""What a client reads whose request a gateway cuts off as it ends."""

from __future__ import annotations

import asyncio

import httpx
import pytest

from tests.gateway.scripted import Script, application, client

ASKED = {
    "/v1/completions": {"prompt": "Once"},
    "/v1/chat/completions": {"messages": [{"role": "user", "content": "Hi"}]},
    "/v1/messages": {"model": "other", "max_tokens": 9, "messages": [{"role": "user", "content": "Hi"}]},
}


@pytest.mark.parametrize("path", ASKED)
def test_who_is_cut_off_before_an_answer_began_is_told_to_ask_again(path: str) -> None:
    """uvicorn cancels its task, and would say 500 with two words of plain text."""
    script = Script([""], hang=True)

    async def test() -> httpx.Response:
        async with client(application(script)) as http:
            asking = asyncio.create_task(http.post(path, json=ASKED[path]))
            while not script.asked:
                await asyncio.sleep(0)
            await asyncio.sleep(0.05)
            assert not asking.done()
            asking.cancel()
            return await asking

    response = asyncio.run(test())
    assert response.status_code == 503 and "the gateway ends" in response.json()["error"]["message"]
    assert int(response.headers["retry-after"]) > 0
    assert script.cancelled, "nobody reads it any more"
