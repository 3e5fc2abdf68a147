"""The choice of the model without a given name."""

from __future__ import annotations

import asyncio

import pytest

from kvforge.loadtest.drive import http_models
from kvforge.loadtest.drive.driver_check import null_server
from kvforge.loadtest.drive.http_models import only_model
from kvforge.loadtest.drive.spec import HTTP
from kvforge.protocol.errors import InvalidRequest, KvforgeError, NotAllowed, ProtocolError, Unavailable

from .raw_http import answering, chunked, serving, whole


def found(response: bytes) -> str:
    """Return the model found at a server with this answer."""

    async def main() -> str:
        async with serving(answering([response], close=True)) as url:
            return await only_model(url)

    return asyncio.run(main())


@pytest.mark.parametrize(
    "response", [whole("200 OK", b'{"data": [{"id": "a"}]}'), chunked(b'{"data": [', b'{"id": "a"}]}')]
)
def test_the_only_model_is_found(response: bytes) -> None:
    assert found(response) == "a"
    # Such a body ends with the connection.
    assert found(b'HTTP/1.0 200 OK\r\n\r\n{"data": [{"id": "a"}]}') == "a"


def test_of_the_null_server() -> None:
    async def main() -> str:
        async with null_server(HTTP, 0.0, "--model", "its name") as url:
            return await only_model(url)

    assert asyncio.run(main()) == "its name"


@pytest.mark.parametrize(
    ("response", "error", "says"),
    [
        (whole("200 OK", b'{"data": [{"id": "a"}, {"id": "b"}]}'), InvalidRequest, "choose one of a, b"),
        (whole("200 OK", b'{"data": []}'), InvalidRequest, "lists no model"),
        (whole("200 OK", b"<html>"), ProtocolError, "not return a list of models"),
        (whole("401 Unauthorized", b'{"error": {"message": "no key"}}'), NotAllowed, "no key.*OPENAI_API_KEY"),
        (whole("404 Not Found", b""), Unavailable, "status 404"),
        (b"SMTP ready\r\n", ProtocolError, "does not speak HTTP"),
        (whole("200 OK", b" " * 20_000), ProtocolError, "exceeds 10000 bytes"),
        (b"", Unavailable, "without an answer"),
    ],
)
def test_what_cannot_be_chosen_or_read_is_said(
    response: bytes, error: type[KvforgeError], says: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(http_models, "ANSWER_BYTES_MAX", 10_000)
    with pytest.raises(error, match=says):
        found(response)


def test_a_server_that_says_nothing_is_not_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(http_models, "TIMEOUT_S", 0.05)

    async def main() -> None:
        async with serving(answering([])) as url:
            await only_model(url)

    with pytest.raises(Unavailable, match="within"):
        asyncio.run(main())
