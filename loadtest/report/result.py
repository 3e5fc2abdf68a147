"""result.json: written atomically, and read back only in a format that this version supports."""

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
    """The part of a document that `compare` reads."""

    verdict: _Verdict
    seed: int
    windows: _Windows
    options: dict[str, Any]
    machine: dict[str, Any]
    versions: dict[str, Any]
    model: dict[str, Any] | None
    objective: dict[str, Any] | None


def save(path: Path, content: bytes) -> None:
    """Replace the file atomically.

    Raises:
        OSError: Names the file.
    """
    beside = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        beside.write_bytes(content)
        beside.replace(path)
    except OSError as error:  # for a full disk the error has no file name
        raise OSError(error.errno, error.strerror, str(path)) from error
    finally:
        beside.unlink(missing_ok=True)


def encoded(found: dict[str, Any]) -> bytes:
    """Encode a document as JSON."""
    # `json` indents in Python, which takes longer than all the rest.
    return msgspec.json.format(json.dumps(found, allow_nan=False, default=str).encode(), indent=1) + b"\n"


def requests(outcomes: Iterable[Outcome]) -> bytes:
    """Return a CSV line for each planned request, with all raw values."""
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
    """Read a document that `save` wrote.

    Raises:
        InvalidRequest: Names the option and the problem of the file.
    """
    try:
        if path.stat().st_size > BYTES_MAX:
            raise InvalidRequest(option, f"{path} is larger than {BYTES_MAX >> 20} MiB: not a result")
        found = json.loads(path.read_bytes())
    except OSError as error:
        raise InvalidRequest(option, f"cannot read {path}: {error.strerror}") from error
    except ValueError as error:
        raise InvalidRequest(option, f"{path} is not JSON ({error}): give the {NAME} of an earlier run") from error
    return checked(found, option, str(path))


def checked(found: Any, option: str, name: str) -> dict[str, Any]:
    """Validate the format of a document.

    Raises:
        InvalidRequest: It is not a result of this format.
    """
    if not isinstance(found, dict) or "format" not in found or "windows" not in found:
        raise InvalidRequest(option, f"{name} is not a result of this load test: give the {NAME} of an earlier run")
    if found["format"] != FORMAT:
        problem = f"{name} has format {found['format']}, but this version reads {FORMAT}: run the load test again"
        raise InvalidRequest(option, problem)
    try:
        msgspec.convert(found, _Compared)
    except msgspec.ValidationError as error:
        raise InvalidRequest(option, f"{name} is damaged ({error}): give the {NAME} of an earlier run") from error
    return found


def _cell(value: object) -> object:
    # Spreadsheets would interpret text that starts like this as a formula.
    return f"'{value}" if isinstance(value, str) and value[:1] in ("=", "+", "-", "@") else _short(value)


def _short(value: object) -> object:
    return round(value, 7) if isinstance(value, float) else value
