"""uvicorn's HTTP protocol with limits: the size of the head, the time it takes, and slow consumers."""

from __future__ import annotations

import asyncio
from typing import Any

import msgspec
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from kvforge.gateway.config import Settings
from kvforge.gateway.http.errors import api_of
from kvforge.gateway.http.notes import RequestNotes
from kvforge.protocol.errors import InvalidRequest

REASONS = {400: "Bad Request", 431: "Request Header Fields Too Large"}


def refusal(status: int, url: bytes, headers: list[tuple[bytes, bytes]], problem: str) -> bytes:
    """Return a complete response to a request that never reaches the application, in the API's error format.

    Args:
        status: One of `REASONS`.
        url: The known part of the request's target.
        headers: The known headers, names in lower case.
        problem: What is wrong.
    """
    api, request_id = api_of(url.partition(b"?")[0].decode("latin-1"), headers), RequestNotes().request_id
    body = msgspec.json.encode(api.error(InvalidRequest("request", problem), request_id))
    lines = (
        f"HTTP/1.1 {status} {REASONS[status]}",
        "content-type: application/json",
        f"content-length: {len(body)}",
        f"{api.request_id}: {request_id}",
        "connection: close",
    )
    return "\r\n".join([*lines, "", ""]).encode() + body


def protocol_of(settings: Settings) -> type[HttpToolsProtocol]:
    """Return the protocol class for these settings."""

    class Connection(HttpToolsProtocol):
        """One client connection."""

        def __init__(self, *args: Any, **kwargs: Any) -> None:
            super().__init__(*args, **kwargs)
            self.url = b""  # the parser may fail before the target
            # Bytes received of an incomplete head, and the parsed size of a complete one.
            self._in_head, self._waiting_bytes, self._head_bytes = True, 0, 0
            self._refused = False
            self._head_timer: asyncio.TimerHandle | None = None
            self._write_timer: asyncio.TimerHandle | None = None

        def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
            """Start the time limit of the first head."""
            super().connection_made(transport)
            self._head_timer = self.loop.call_later(settings.head_s, self._give_up)

        def connection_lost(self, exc: Exception | None) -> None:
            """Cancel the timers."""
            super().connection_lost(exc)
            for timer in (self._head_timer, self._write_timer):
                if timer is not None:
                    timer.cancel()

        def data_received(self, data: bytes) -> None:
            """Parse data, and refuse a head above `head_bytes_max`."""
            if self._refused:
                return
            if self._in_head:
                self._waiting_bytes += len(data)
            super().data_received(data)
            if self._in_head and self._waiting_bytes > settings.head_bytes_max:
                self._refuse()

        def on_message_begin(self) -> None:
            """Start the time limit of a head."""
            self._in_head, self._head_bytes = True, 0
            if self._head_timer is None:
                self._head_timer = self.loop.call_later(settings.head_s, self._give_up)
            super().on_message_begin()

        def on_url(self, url: bytes) -> None:
            """Count the bytes of the target."""
            self._head_bytes += len(url)
            super().on_url(url)

        def on_header(self, name: bytes, value: bytes) -> None:
            """Count the bytes of a header."""
            self._head_bytes += len(name) + len(value)
            super().on_header(name, value)

        def on_headers_complete(self) -> None:
            """Check the size of the head and stop its timer."""
            self._in_head, self._waiting_bytes = False, 0
            if self._head_bytes > settings.head_bytes_max:
                self._refuse()
                return
            if self._head_timer is not None:
                self._head_timer.cancel()
                self._head_timer = None
            super().on_headers_complete()

        def on_body(self, body: bytes) -> None:
            """Pass the body on, unless the request was refused."""
            if not self._refused:
                super().on_body(body)

        def on_message_complete(self) -> None:
            """Pass the end of the request on, unless it was refused."""
            if not self._refused:
                super().on_message_complete()

        def pause_writing(self) -> None:
            """Start the time limit of a slow consumer."""
            super().pause_writing()
            if self._write_timer is None:
                self._write_timer = self.loop.call_later(settings.write_s, self._give_up)

        def resume_writing(self) -> None:
            """Stop the time limit of a slow consumer."""
            if self._write_timer is not None:
                self._write_timer.cancel()
                self._write_timer = None
            super().resume_writing()

        def send_400_response(self, msg: str) -> None:
            """Answer a malformed request in the API's error format."""
            self._answer(400, f"malformed HTTP: {msg}")

        def _refuse(self) -> None:
            self._answer(431, f"the head exceeds {settings.head_bytes_max} bytes (head_bytes_max in gateway.toml)")

        def _answer(self, status: int, problem: str) -> None:
            self._refused = True
            if self.transport.is_closing():
                return
            cycle = self.cycle
            free = cycle is None or cycle.response_complete
            # While an earlier request is unanswered, the client would take this for its response.
            if free or (not self._in_head and cycle.more_body and not cycle.response_started):
                self.transport.write(refusal(status, self.url, self.headers or [], problem))
            self.transport.close()

        def _give_up(self) -> None:
            self.transport.abort()

    return Connection
