"""The OpenAI API over HTTP, as bytes: addresses, requests, and the JSON of streamed events and of errors."""

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
TABLE_IDS = 1 << 18  # more than vocabularies have
PORTS = {"http": 80, "https": 443}


def httptools() -> Any:
    """The module that parses HTTP. Raises Unavailable where it is not installed."""
    try:
        import httptools as found
    except ImportError as error:
        raise Unavailable(f"HTTP needs the extra `loadtest` ({error}): {install_command('loadtest')}") from error
    return found


def many_files() -> None:
    """Each stream is a connection, which is a file to the kernel: as many as this process may have."""
    hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    with suppress(OSError, ValueError):
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))


@dataclass(frozen=True, slots=True, kw_only=True)
class Address:
    """Where a server is. path: what all its addresses begin with, such as /v1."""

    host: str
    port: int
    path: str
    tls: bool

    @classmethod
    def parse(cls, url: str) -> Address:
        """Of http(s)://HOST[:PORT][/v1]. Raises InvalidRequest."""
        try:
            parts = urlsplit(url)
            host, port = parts.hostname, parts.port
        except ValueError as error:
            raise InvalidRequest("url", f"{url!r} is no address: {error}") from None
        if parts.scheme not in PORTS or not host or parts.query or parts.fragment or not url.isprintable():
            raise InvalidRequest("url", f"is {url!r}; it must be like http://localhost:8000/v1")
        if parts.username is not None or parts.password is not None:
            raise InvalidRequest("url", "holds a name or password: give the key in OPENAI_API_KEY")
        path = parts.path.rstrip("/") or "/v1"
        return cls(host=host, port=port or PORTS[parts.scheme], path=path, tls=parts.scheme == "https")

    def __str__(self) -> str:
        host = f"[{self.host}]" if ":" in self.host else self.host
        return f"{'https' if self.tls else 'http'}://{host}:{self.port}{self.path}"

    def head(self, method: str, what: str, key: str) -> bytes:
        """A request's line and headers, without those of its content and without the empty line at the end.

        key: the API key, "" for none. Raises InvalidRequest.
        """
        if not (key.isascii() and key.isprintable()):
            raise InvalidRequest("OPENAI_API_KEY", "holds a character that no header may have")
        host = f"[{self.host}]" if ":" in self.host else self.host
        lines = [f"{method} {self.path}{what} HTTP/1.1", f"Host: {host}:{self.port}"]
        if key:
            lines.append(f"Authorization: Bearer {key}")
        return "".join(f"{line}\r\n" for line in lines).encode()


Count = Annotated[int, msgspec.Meta(ge=0)] | None


class Details(msgspec.Struct):
    """Of a prompt's tokens, how many were found in the prefix cache."""

    cached_tokens: Count = None


class Usage(msgspec.Struct):
    """What a server says it has counted."""

    prompt_tokens: Count = None
    completion_tokens: Count = None
    prompt_tokens_details: Details | None = None


class Delta(msgspec.Struct):
    """What an event adds to a chat's answer."""

    role: str | None = None
    content: str | None = None
    reasoning_content: str | None = None
    reasoning: str | None = None

    @property
    def says(self) -> bool:
        """There is text in it: of the answer, or of what the model thinks first."""
        return bool(self.content or self.reasoning_content or self.reasoning)


class Choice(msgspec.Struct):
    """What an event adds to the answer. token_ids: where they were asked for (vLLM)."""

    text: str | None = None
    delta: Delta | None = None
    finish_reason: str | None = None
    token_ids: list[int] | None = None

    @property
    def said(self) -> str:
        """The words of the answer; what a model thinks before it is none of them: nobody sends that back."""
        return self.text or (self.delta.content if self.delta is not None else None) or ""

    @property
    def tokens(self) -> int:
        """How many tokens this is taken for, until the server says how many there were.

        Servers send one event for each, with no text where it is a part of a character; but one that only opens a
        chat, or says why the answer ends, is none.
        """
        if self.token_ids is not None:
            return len(self.token_ids)
        delta = self.delta
        if self.text or (delta is not None and delta.says):
            return 1
        return 0 if self.finish_reason is not None or (delta is not None and delta.role is not None) else 1


class Event(msgspec.Struct):
    """One streamed event."""

    choices: list[Choice] = []
    usage: Usage | None = None
    error: Any = None


class Problem(msgspec.Struct):
    """An error as servers write it: OpenAI's has `error` around it, FastAPI's own is only `detail`."""

    code: str | int | None = None
    type: str | None = None
    message: str | None = None
    detail: str | None = None


class _Wrapped(msgspec.Struct):
    error: Problem | str


@cache
def _numbers() -> npt.NDArray[np.uint64]:
    """Each token id as it is written in a list, padded to eight bytes."""
    return np.frombuffer(b"".join(b"%7d," % number for number in range(TABLE_IDS)), np.uint64)


def token_ids(ids: Int32Array) -> msgspec.Raw | list[int]:
    """Token ids, [tokens] int32, to be encoded: a prompt of 100,000 in half a millisecond."""
    if not len(ids) or ids.min() < 0 or ids.max() >= TABLE_IDS:
        return [int(number) for number in ids]
    return msgspec.Raw(b"[" + _numbers()[ids].tobytes()[:-1] + b"]")


event = msgspec.json.Decoder(Event).decode
encode = msgspec.json.Encoder().encode
_problem = msgspec.json.Decoder(Problem).decode
_wrapped = msgspec.json.Decoder(_Wrapped).decode


def said(body: bytes, status: int = 0) -> tuple[str, str]:
    """A code and a message for what a server said was wrong. status: of HTTP; 0: it came within an answer.

    The code is the server's where that is a word, else http_STATUS: a number as a code repeats the status.
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
