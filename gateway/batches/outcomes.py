"""Lines of output files, and the numbers of the requests that have one."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import msgspec

from kvforge.gateway.http.encoding import encode
from kvforge.gateway.http.errors import openai_error, status_of
from kvforge.protocol.errors import KvforgeError

from .records import CANCELLED, EXPIRED

CODES = {
    CANCELLED: ("batch_cancelled", "This request was not executed before the batch was cancelled."),
    EXPIRED: ("batch_expired", "This request could not be executed before the completion window expired."),
}


def name_of(batch: str, number: int) -> str:
    """Return the id of an outcome."""
    return f"batch_req_{batch.removeprefix('batch_')}_{number}"


def answered(name: str, custom_id: str, request_id: str, content: bytes) -> bytes:
    """Return the line of an answer, given its JSON."""
    return _line(name, custom_id, {"status_code": 200, "request_id": request_id, "body": msgspec.Raw(content)})


def refused(name: str, custom_id: str, error: KvforgeError) -> bytes:
    """Return the line of a request that failed."""
    return _line(name, custom_id, {"status_code": status_of(error), "request_id": name, "body": openai_error(error)})


def dropped(name: str, custom_id: str, status: str) -> bytes:
    """Return the line of a request that was not run, since its batch ended with this status."""
    code, message = CODES[status]
    return _line(name, custom_id, None, {"code": code, "message": message})


def ranges(numbers: Iterable[int]) -> list[tuple[int, int]]:
    """Return numbers as ranges [first, last], in order."""
    found: list[tuple[int, int]] = []
    for number in sorted(numbers):
        if found and found[-1][1] == number - 1:
            found[-1] = (found[-1][0], number)
        else:
            found.append((number, number))
    return found


def _line(name: str, custom_id: str, response: dict[str, Any] | None, error: dict[str, str] | None = None) -> bytes:
    return encode({"id": name, "custom_id": custom_id, "response": response, "error": error}) + b"\n"
