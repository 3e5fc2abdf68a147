"""Liveness apart from readiness: a gateway without a coordinator is live and not ready."""

from __future__ import annotations

import asyncio
from pathlib import Path

import httpx
import pytest

from kvforge.gateway.access import Access
from kvforge.gateway.app import make_app
from kvforge.gateway.config import Settings
from tests.gateway.scripted import client


def asked(tmp_path: Path, path: str, *, ending: bool = False) -> httpx.Response:
    settings = Settings(runtime_dir=str(tmp_path))
    app = make_app(settings, Access(settings))
    app.state.ending = ending

    async def get() -> httpx.Response:
        async with client(app) as http:
            return await http.get(path)

    return asyncio.run(get())


@pytest.mark.parametrize("path", ["/readyz", "/health"])
def test_readiness_says_why_not(tmp_path: Path, path: str) -> None:
    answer = asked(tmp_path, path)
    assert (answer.status_code, answer.json()) == (
        503,
        {
            "ready": False,
            "reason": "the coordinator has not answered yet",
            "storage": {"ready": True, "reason": ""},
        },
    )
    assert asked(tmp_path, path, ending=True).json()["reason"] == "this gateway is stopping"


@pytest.mark.parametrize("ending", [False, True])
def test_a_gateway_that_answers_is_live(tmp_path: Path, ending: bool) -> None:
    answer = asked(tmp_path, "/livez", ending=ending)
    assert (answer.status_code, answer.json()) == (200, {"live": True})
