"""What the gateway logs of the served model."""

from __future__ import annotations

import asyncio
import logging
from typing import Any

import pytest
from msgspec.structs import replace

from kvforge.client.aio import AsyncClient
from kvforge.gateway.generate.service import Service
from kvforge.protocol.messages import Health, ModelInfo

MODEL = ModelInfo(name="m", source="/m", architecture="none", fingerprint="0", vocab_size=256, context_tokens_max=64)
AWAY = Health(rid=0, live=True, ready=False, reason="no worker is connected", workers=())
LOADING = replace(AWAY, model=MODEL, reason="w0 loads")
READY = replace(LOADING, ready=True, reason="")
OTHER = replace(READY, model=replace(MODEL, name="other"))


class Answers(AsyncClient):
    """A client whose coordinator gives these answers of health."""

    def __init__(self, *answers: Health) -> None:
        self._answers, self.done = list(answers), asyncio.Event()

    async def health(self) -> Health:
        if not self._answers:
            self.done.set()
            await asyncio.Event().wait()
        return self._answers.pop(0)


class Streams:
    def close(self) -> None:
        pass


class Prompts:
    async def close(self) -> None:
        pass


@pytest.mark.parametrize(
    ("answers", "logged"),
    [
        ((READY, READY), ["ready: serving m"]),
        ((AWAY, LOADING, READY), ["not ready: no worker is connected", "ready: serving m"]),
        ((READY, LOADING, READY), ["ready: serving m", "not ready: w0 loads", "ready: serving m"]),
        ((READY, OTHER), ["ready: serving m", "ready: serving other"]),
    ],
)
def test_each_model_and_each_outage_is_one_line(
    answers: tuple[Health, ...],
    logged: list[str],
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("kvforge.gateway.generate.service.LOOK_S", 0.0)
    monkeypatch.setattr("kvforge.gateway.generate.service.AsyncStreams", lambda _: Streams())
    caplog.set_level(logging.INFO)

    async def prompts(_: ModelInfo) -> tuple[Any, Any]:
        return Prompts(), None

    async def check() -> None:
        client = Answers(*answers)
        serving = asyncio.create_task(Service(client, prompts).serving())
        await client.done.wait()
        serving.cancel()
        await asyncio.gather(serving, return_exceptions=True)

    asyncio.run(check())
    assert caplog.messages == logged
