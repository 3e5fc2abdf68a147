"""Headers of requests that may be repeated: the idempotency key, the resume position and the session."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from kvforge.protocol.errors import InvalidRequest

KEY_HEADER = "idempotency-key"
RESUME_HEADER = "last-event-id"
SESSION_HEADER = "x-session-id"
SESSION_LENGTH_MAX = 256


def session_of(headers: Mapping[str, str]) -> str:
    """Return the session id of a request, or "". Requests of one session go to the same replica."""
    return headers.get(SESSION_HEADER, "")[:SESSION_LENGTH_MAX]


@dataclass(frozen=True, slots=True)
class Key:
    """The idempotency key of a request.

    A request with a key survives the loss of its connection or of this process, and a repeated request with the same
    key reads the same answer.

    Attributes:
        name: The client's key, or "".
        resume: How many tokens of the answer the client already has.
    """

    name: str = ""
    resume: int = 0

    @classmethod
    def of(cls, headers: Mapping[str, str], why_not: str = "") -> Key:
        """Read the key from the headers.

        Args:
            headers: The headers of the request.
            why_not: Why this response cannot be resumed, or "".

        Raises:
            InvalidRequest: Names the malformed header.
        """
        name, resume = headers.get(KEY_HEADER, ""), headers.get(RESUME_HEADER, "")
        if resume and not (name and resume.isdecimal() and len(resume) < 10):
            raise InvalidRequest(RESUME_HEADER, f"must be a number of tokens, together with {KEY_HEADER}")
        if resume and why_not:
            raise InvalidRequest(RESUME_HEADER, f"{why_not}: omit it to read the answer from its beginning")
        return cls(name, int(resume or 0))
