"""OpenAI's API over HTTP as bytes: URLs, requests, streamed events and errors."""

from __future__ import annotations

import resource
from contextlib import suppress
from dataclasses import dataclass
from functools import cache
from typing import Annotated, Any
from urllib.parse import urlsplit

import msgspec
import numpy as np
import numpy.typing as npt

from kvforge.process.installation import install_command
from kvforge.protocol.errors import InvalidRequest, Unavailable
from kvforge.protocol.messages import Int32Array

DONE = b"[DONE]"
MESSAGE_CHARS_MAX = 500
TABLE_IDS = 1 << 18  # larger than any vocabulary
PORTS = {"http": 80, "https": 443}


def httptools() -> Any:
    """Return the HTTP parser module. Raises Unavailable if it is not installed."""
    try:
        import httptools as found
    except ImportError as error:
        raise Unavailable(f"HTTP needs the extra `loadtest` ({error}): {install_command('loadtest')}") from error
    return found


def many_files() -> None:
    """Raise the limit of open files: each stream needs a connection."""
    hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    with suppress(OSError, ValueError):
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))


@dataclass(frozen=True, slots=True, kw_only=True)
class Address:
    """The base URL of a server. `path` is the common prefix of its routes, such as /v1."""

    host: str
    port: int
    path: str
    tls: bool

    @classmethod
    def parse(cls, url: str) -> Address:
        """Parse http(s)://HOST[:PORT][/v1]. Raises InvalidRequest."""
        try:
            parts = urlsplit(url)
            host, port = parts.hostname, parts.port
        except ValueError as error:
            raise InvalidRequest("url", f"invalid URL {url!r}: {error}") from None
        if parts.scheme not in PORTS or not host or parts.query or parts.fragment or not url.isprintable():
            raise InvalidRequest("url", f"invalid URL {url!r} (expected http://HOST:PORT/v1)")
        if parts.username is not None or parts.password is not None:
            raise InvalidRequest("url", "contains a user name or password: set OPENAI_API_KEY instead")
        path = parts.path.rstrip("/") or "/v1"
        return cls(host=host, port=port or PORTS[parts.scheme], path=path, tls=parts.scheme == "https")

    def __str__(self) -> str:
        host = f"[{self.host}]" if ":" in self.host else self.host
        return f"{'https' if self.tls else 'http'}://{host}:{self.port}{self.path}"

    def head(self, method: str, what: str, key: str) -> bytes:
        """Return the request line and headers, without those of the content and without the final empty line.

        Args:
            method: The HTTP method.
            what: The path below the base URL.
            key: The API key; "" for none.

        Raises:
            InvalidRequest: The key cannot be sent in a header.
        """
        if not (key.isascii() and key.isprintable()):
            raise InvalidRequest("OPENAI_API_KEY", "contains a character that is not allowed in a header")
        host = f"[{self.host}]" if ":" in self.host else self.host
        lines = [f"{method} {self.path}{what} HTTP/1.1", f"Host: {host}:{self.port}"]
        if key:
            lines.append(f"Authorization: Bearer {key}")
        return "".join(f"{line}\r\n" for line in lines).encode()


Count = Annotated[int, msgspec.Meta(ge=0)] | None


class Details(msgspec.Struct):
    """The details of a prompt's token count: those from the prefix cache."""

    cached_tokens: Count = None


class Usage(msgspec.Struct):
    """The server's token counts."""

    prompt_tokens: Count = None
    completion_tokens: Count = None
    prompt_tokens_details: Details | None = None


class Delta(msgspec.Struct):
    """The addition of an event to a chat answer."""

    role: str | None = None
    content: str | None = None
    reasoning_content: str | None = None
    reasoning: str | None = None

    @property
    def has_text(self) -> bool:
        """Whether it contains text, of the answer or of the reasoning."""
        return bool(self.content or self.reasoning_content or self.reasoning)


class Choice(msgspec.Struct):
    """The addition of an event to an answer. `token_ids` are present if requested (vLLM)."""

    text: str | None = None
    delta: Delta | None = None
    finish_reason: str | None = None
    token_ids: list[int] | None = None

    @property
    def answer_text(self) -> str:
        """The text of the answer. Reasoning is excluded, since it is not sent back."""
        return self.text or (self.delta.content if self.delta is not None else None) or ""

    @property
    def tokens(self) -> int:
        """The assumed number of tokens, until the server reports its count.

        Servers send one event per token, without text for a part of a character. An event that only opens a chat or
        carries the finish reason counts as none.
        """
        if self.token_ids is not None:
            return len(self.token_ids)
        delta = self.delta
        if self.text or (delta is not None and delta.has_text):
            return 1
        return 0 if self.finish_reason is not None or (delta is not None and delta.role is not None) else 1


class Event(msgspec.Struct):
    """A streamed event."""

    choices: list[Choice] = []
    usage: Usage | None = None
    error: Any = None


class Problem(msgspec.Struct):
    """An error body: OpenAI's is wrapped in `error`, FastAPI's has only `detail`."""

    code: str | int | None = None
    type: str | None = None
    message: str | None = None
    detail: str | None = None


class _Wrapped(msgspec.Struct):
    error: Problem | str


@cache
def _numbers() -> npt.NDArray[np.uint64]:
    """Return each token id as a list has it, padded to eight bytes."""
    return np.frombuffer(b"".join(b"%7d," % number for number in range(TABLE_IDS)), np.uint64)


def token_ids(ids: Int32Array) -> msgspec.Raw | list[int]:
    """Encode token ids, [tokens] int32: 100,000 take half a millisecond."""
    if not len(ids) or ids.min() < 0 or ids.max() >= TABLE_IDS:
        return [int(number) for number in ids]
    return msgspec.Raw(b"[" + _numbers()[ids].tobytes()[:-1] + b"]")


event = msgspec.json.Decoder(Event).decode
encode = msgspec.json.Encoder().encode
_problem = msgspec.json.Decoder(Problem).decode
_wrapped = msgspec.json.Decoder(_Wrapped).decode


def error_of(body: bytes, status: int = 0) -> tuple[str, str]:
    """Return a code and a message for an error body.

    The code is the server's if it is a word, else http_STATUS; numeric codes only repeat the status.

    Args:
        body: The body.
        status: The HTTP status; 0 for an error within an answer.
    """
    problem: Problem | str
    try:
        problem = _wrapped(body).error
    except (msgspec.MsgspecError, UnicodeError):
        try:
            problem = _problem(body)
        except (msgspec.MsgspecError, UnicodeError):
            problem = body.decode(errors="replace")
    if isinstance(problem, str):
        problem = Problem(message=problem)
    word = problem.code if isinstance(problem.code, str) and not problem.code.isdigit() else None
    code = word or (f"http_{status}" if status else problem.type or "server_error")
    message = " ".join((problem.message or problem.detail or "").split())
    return code[:MESSAGE_CHARS_MAX], message[:MESSAGE_CHARS_MAX]
