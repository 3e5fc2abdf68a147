"""Lists the models of an OpenAI-compatible server."""

from __future__ import annotations

import asyncio
import os
import ssl
from typing import Any

import msgspec

from kvforge.protocol.errors import InvalidRequest, NotAllowed, ProtocolError, Unavailable

from .http_wire import Address, error_of, httptools

ANSWER_BYTES_MAX = 4 << 20
READ_BYTES = 1 << 16
TIMEOUT_S = 10.0
NAMED_MAX = 20
OK = 200
DENIED = (401, 403)


class Model(msgspec.Struct):
    """An entry of the list."""

    id: str


class Models(msgspec.Struct):
    """The answer to GET /v1/models."""

    data: list[Model]


async def only_model(url: str) -> str:
    """Return the only model of the server at `url`.

    Raises:
        InvalidRequest: The URL is invalid, or there are several models; the error names them.
        Unavailable: The server does not answer.
        NotAllowed: The API key is missing or wrong.
        ProtocolError: It is not an OpenAI-compatible server.
    """
    found = await models(url)
    if len(found) == 1:
        return found[0]
    if not found:
        raise InvalidRequest("model", f"{url} lists no model: pass --model")
    more = f" and {len(found) - NAMED_MAX} more" if len(found) > NAMED_MAX else ""
    raise InvalidRequest("model", f"{url} serves several models: choose one of {', '.join(found[:NAMED_MAX])}{more}")


async def models(url: str) -> list[str]:
    """Return the names of all models that the server at `url` lists. Raises what `only_model` raises."""
    address = Address.parse(url)
    request = address.head("GET", "/models", os.environ.get("OPENAI_API_KEY", "")) + b"Connection: close\r\n\r\n"
    where = f"{address}/models"
    try:
        async with asyncio.timeout(TIMEOUT_S):
            status, body = await _fetch(address, request)
    except TimeoutError:
        raise Unavailable(f"{where} did not answer within {TIMEOUT_S:.0f} s") from None
    except OSError as error:
        raise Unavailable(f"{where} does not answer: {error}") from error
    if status == 0:
        raise Unavailable(f"{where} closed the connection without an answer")
    if status != OK:
        code, message = error_of(body, status)
        problem = f"{where} answered with status {status} ({message or code})"
        if status in DENIED:
            raise NotAllowed("connect", f"{problem}: set OPENAI_API_KEY")
        raise Unavailable(problem)
    try:
        return [model.id for model in msgspec.json.decode(body, type=Models).data]
    except (msgspec.MsgspecError, UnicodeError) as error:
        raise ProtocolError(f"{where} did not return a list of models: {error}") from error


class _Response:
    """Collects the parsed response."""

    def __init__(self) -> None:
        self.body = bytearray()
        self.complete = False

    def on_body(self, data: bytes) -> None:
        """Collect a piece of the body."""
        self.body += data

    def on_message_complete(self) -> None:
        """Note the end of the response."""
        self.complete = True


async def _fetch(address: Address, request: bytes) -> tuple[int, bytes]:
    http = httptools()
    response = _Response()
    parser: Any = http.HttpResponseParser(response)
    tls = ssl.create_default_context() if address.tls else None
    reader, writer = await asyncio.open_connection(address.host, address.port, ssl=tls)
    try:
        writer.write(request)
        read = 0
        while not response.complete and read <= ANSWER_BYTES_MAX and (data := await reader.read(READ_BYTES)):
            read += len(data)
            parser.feed_data(data)
    except (http.HttpParserError, http.HttpParserUpgrade) as error:
        raise ProtocolError(f"{address} does not speak HTTP/1.1 ({error})") from error
    finally:
        writer.transport.abort()
    if read > ANSWER_BYTES_MAX:
        raise ProtocolError(f"the answer of {address}/models exceeds {ANSWER_BYTES_MAX} bytes")
    return int(parser.get_status_code()), bytes(response.body)
