"""A request that may come again: its key, and how much of its answer the client has."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from kvforge.protocol.errors import InvalidRequest

KEY_HEADER = "idempotency-key"
RESUME_HEADER = "last-event-id"
SESSION_HEADER = "x-session-id"
SESSION_LENGTH_MAX = 256


def session_of(headers: Mapping[str, str]) -> str:
    """What the caller says that the request belongs to, or "": among several replicas such requests go together."""
    return headers.get(SESSION_HEADER, "")[:SESSION_LENGTH_MAX]


@dataclass(frozen=True, slots=True)
class Key:
    """name: the caller's own of this request, or "": with one it goes on when the connection, or this process, is lost,
    and is the same request when it comes again. resume: tokens of its answer that the caller has."""

    name: str = ""
    resume: int = 0

    @classmethod
    def of(cls, headers: Mapping[str, str], why_not: str = "") -> Key:
        """why_not: why this response cannot go on in its middle, or "". Raises InvalidRequest naming a header."""
        name, resume = headers.get(KEY_HEADER, ""), headers.get(RESUME_HEADER, "")
        if resume and not (name and resume.isdecimal() and len(resume) < 10):
            raise InvalidRequest(RESUME_HEADER, f"is a number of tokens, and comes with {KEY_HEADER}")
        if resume and why_not:
            raise InvalidRequest(RESUME_HEADER, f"{why_not}: leave it out, and read the answer from its beginning")
        return cls(name, int(resume or 0))
