"""Formats of log lines: one for people, one for programs, each entry one line.

A line states what happened, to which request or worker, and how long it took. It never contains a prompt or an answer,
only counts, times and names.

Text:  2026-11-22 04:30:00,123 coordinator INFO request ended id=4 tenant=default tokens=16 ...
JSON:  {"time":"2026-11-22T04:30:00.123456Z","process":"coordinator","level":"info","event":"request_ended",
        "message":"request ended","id":4,"tenant":"default","tokens":16, ...}

Entries that programs search for have an `event`; the others have only a message.
"""

from __future__ import annotations

import json
import logging
import sys
from collections.abc import Mapping
from datetime import UTC, datetime

from .errors import Field, InvalidConfiguration
from .log_output import LogOutput, RateLimitFilter

LEVELS = ("debug", "info", "warning", "error")
FORMATS = ("text", "json")
# Keys of every JSON line, which no field may use.
RESERVED = frozenset({"time", "process", "level", "event", "message", "exception"})


def check(level: str, log_format: str) -> None:
    """Check the logging settings.

    Raises:
        InvalidConfiguration: Names `log_level` or `log_format`.
    """
    if level not in LEVELS:
        raise InvalidConfiguration("log_level", f"must be one of {', '.join(LEVELS)}")
    if log_format not in FORMATS:
        raise InvalidConfiguration("log_format", f"must be one of {', '.join(FORMATS)}")


def configure(process: str, level: str, log_format: str) -> LogOutput:
    """Send the log of this process to standard error.

    Logging never waits for standard error: lines that it does not take now are written with the next line, or by
    `flush`.

    Args:
        process: The name of the process in each line.
        level: The lowest level to log.
        log_format: One of FORMATS.

    Returns:
        The handler, to be flushed before the process ends.
    """
    output = LogOutput(sys.stderr.fileno())
    output.setFormatter(formatter(process, log_format))
    output.addFilter(RateLimitFilter())
    logging.basicConfig(level=level.upper(), handlers=[output])
    return output


def formatter(process: str, log_format: str) -> logging.Formatter:
    """Return the formatter for a log format."""
    return JsonFormatter(process) if log_format == "json" else TextFormatter(process)


def log_event(
    log: logging.Logger, level: str, message: str, event: str = "", fields: Mapping[str, Field] | None = None
) -> None:
    """Log an event that a program may search for.

    Args:
        log: The logger.
        level: One of LEVELS.
        message: The text.
        event: The event's name, in snake_case.
        fields: The event's values.
    """
    log.log(
        logging.getLevelNamesMapping()[level.upper()], "%s", message, extra={"event": event, "fields": fields or {}}
    )


class TextFormatter(logging.Formatter):
    """Formats lines for people: the message, then the fields as name=value."""

    def __init__(self, process: str) -> None:
        super().__init__(f"%(asctime)s {process.replace('%', '%%')} %(levelname)s %(message)s")

    def formatMessage(self, record: logging.LogRecord) -> str:  # noqa: N802 - logging's own name
        """Return the message and the fields as one line."""
        fields: Mapping[str, Field] = getattr(record, "fields", {})
        parts = [super().formatMessage(record), *(f"{name}={_shown(value)}" for name, value in fields.items())]
        return _one_line(" ".join(parts))


class JsonFormatter(logging.Formatter):
    """Formats lines for programs: one JSON object each."""

    def __init__(self, process: str) -> None:
        super().__init__()
        self._process = process

    def format(self, record: logging.LogRecord) -> str:
        """Return the entry as JSON."""
        return json_line(
            self._process,
            record.levelname.lower(),
            record.getMessage(),
            getattr(record, "event", ""),
            getattr(record, "fields", {}),
            at=record.created,
            exception=self.formatException(record.exc_info) if record.exc_info else "",
        )


def json_line(
    process: str,
    level: str,
    message: str,
    event: str = "",
    fields: Mapping[str, Field] | None = None,
    *,
    at: float | None = None,
    exception: str = "",
) -> str:
    """Return one entry as JSON.

    Args:
        process: The name of the process.
        level: One of LEVELS.
        message: The text.
        event: The event's name, in snake_case.
        fields: The event's values.
        at: Seconds since the epoch; None: now.
        exception: The traceback, if there is one.
    """
    fields = fields or {}
    assert not RESERVED & fields.keys(), f"reserved field names: {sorted(RESERVED & fields.keys())}"
    moment = datetime.now(UTC) if at is None else datetime.fromtimestamp(at, UTC)
    entry = {
        "time": moment.isoformat(timespec="microseconds").replace("+00:00", "Z"),
        "process": process,
        "level": level,
        **({"event": event} if event else {}),
        "message": message,
        **fields,
        **({"exception": exception} if exception else {}),
    }
    return json.dumps(entry, separators=(",", ":"))


def _shown(value: Field) -> str:
    """Return a value as text, quoted unless it is clearly one word."""
    if value is None:
        return "-"
    text = f"{value:g}" if isinstance(value, float) else str(value)
    return text if text and text.isprintable() and not set(' "=') & set(text) else json.dumps(text)


def _one_line(text: str) -> str:
    """Escape line breaks and control characters, so that a peer's text cannot imitate a log line."""
    return "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in text)
