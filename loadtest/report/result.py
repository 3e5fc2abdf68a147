"""result.json: written whole or not at all, and read back only where this version understands it."""

from __future__ import annotations

import csv
import io
import json
import os
from collections.abc import Iterable
from pathlib import Path
from typing import Annotated, Any

import msgspec

from kvforge.protocol.errors import InvalidRequest

from ..drive.outcome import Outcome
from ..measure.document import FORMAT

NAME = "result.json"
REQUESTS = "requests.csv"
BYTES_MAX = 1 << 30
FIELDS = (
    "session", "turn", "tenant", "kind", "state", "code", "request_id", "due_s", "awake_s", "sent_s", "accepted_s",
    "ended_s", "prompt_tokens", "cached_tokens", "asked_tokens",
)  # fmt: skip


_Number = Annotated[float, msgspec.Meta(ge=0, le=1e15)]


class _Interval(msgspec.Struct):
    mean: _Number
    half: _Number
    values: list[_Number | None]


class _Windows(msgspec.Struct):
    seconds: _Number
    intervals: dict[str, _Interval | None]


class _Verdict(msgspec.Struct):
    valid: bool
    why: list[str]


class _Compared(msgspec.Struct):
    """What `compare` reads of a document."""

    verdict: _Verdict
    seed: int
    windows: _Windows
    options: dict[str, Any]
    machine: dict[str, Any]
    versions: dict[str, Any]
    model: dict[str, Any] | None
    objective: dict[str, Any] | None


def save(path: Path, content: bytes) -> None:
    """Replaces the file in one step: a reader sees the old one or the new one. Raises OSError naming the file."""
    beside = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        beside.write_bytes(content)
        beside.replace(path)
    except OSError as error:  # of a full disk it knows no name
        raise OSError(error.errno, error.strerror, str(path)) from error
    finally:
        beside.unlink(missing_ok=True)


def encoded(found: dict[str, Any]) -> bytes:
    return json.dumps(found, indent=1, allow_nan=False, default=str).encode() + b"\n"


def requests(outcomes: Iterable[Outcome]) -> bytes:
    """A line for each planned request, with what every measure is made of: so that anybody can add up anew."""
    out = io.StringIO()
    lines = csv.writer(out, lineterminator="\n")
    lines.writerow((*FIELDS, "tokens", "first_token_s", "last_token_s", "first_scheduled_us"))
    for outcome in outcomes:
        times = outcome.tokens_s
        ends = (times[0], times[-1]) if times else (-1.0, -1.0)
        values = (getattr(outcome, name) for name in FIELDS)
        lines.writerow(map(_cell, (*values, len(times), *ends, outcome.timings.first_scheduled_us)))
    return out.getvalue().encode()


def read(path: Path, option: str = "compare") -> dict[str, Any]:
    """A document as `save` left it. Raises InvalidRequest that names the option: what is wrong with the file."""
    try:
        if path.stat().st_size > BYTES_MAX:
            raise InvalidRequest(option, f"{path} is larger than {BYTES_MAX >> 20} MiB: no result is")
        found = json.loads(path.read_bytes())
    except OSError as error:
        raise InvalidRequest(option, f"{path} cannot be read: {error.strerror}") from error
    except ValueError as error:
        raise InvalidRequest(option, f"{path} is no JSON ({error}): give the {NAME} of an earlier run") from error
    return checked(found, option, str(path))


def checked(found: Any, option: str, name: str) -> dict[str, Any]:
    """The document, if it is one of this format. Raises InvalidRequest."""
    if not isinstance(found, dict) or "format" not in found or "windows" not in found:
        raise InvalidRequest(option, f"{name} is no result of this load test: give the {NAME} of an earlier run")
    if found["format"] != FORMAT:
        problem = f"{name} has format {found['format']}, and this version reads {FORMAT}: measure it anew"
        raise InvalidRequest(option, problem)
    try:
        msgspec.convert(found, _Compared)
    except msgspec.ValidationError as error:
        raise InvalidRequest(option, f"{name} is damaged ({error}): give the {NAME} of an earlier run") from error
    return found


def _cell(value: object) -> object:
    # A spreadsheet takes a word that begins like this for a formula.
    return f"'{value}" if isinstance(value, str) and value[:1] in ("=", "+", "-", "@") else _short(value)


def _short(value: object) -> object:
    return round(value, 7) if isinstance(value, float) else value
