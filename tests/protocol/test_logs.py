"""Lines of the log: each entry is one line, as text and as JSON, whatever name a peer chose."""

from __future__ import annotations

import json
import logging
from datetime import datetime
from typing import Any

import pytest

from kvforge.protocol import logs
from kvforge.protocol.errors import InvalidConfiguration

HOSTILE = 'a"\n2026-01-01 00:00:00,000 coordinator ERROR all is lost\r\u2028\x1b[2J'


def entry(message: str, event: str = "", fields: dict[str, Any] | None = None) -> logging.LogRecord:
    record = logging.LogRecord("coordinator", logging.WARNING, __file__, 1, "%s", (message,), None)
    record.event, record.fields = event, fields or {}
    record.created = 1_700_000_000.25
    return record


def test_text_is_the_message_and_its_fields_on_one_line() -> None:
    fields = {"id": 4, "tenant": "a b", "reason": "length", "queue_ms": 0.25, "worker": None, "name": "", "on": True}
    line = logs.formatter("coordinator", "text").format(entry("request ended", "request_ended", fields))
    words = 'coordinator WARNING request ended id=4 tenant="a b" reason=length queue_ms=0.25 worker=- name="" on=True'
    assert line.endswith(words)


def test_json_is_one_document_a_line() -> None:
    fields = {"id": 4, "tenant": HOSTILE, "total_ms": 1.5, "worker": None}
    line = logs.formatter("worker-0", "json").format(entry("request ended", "request_ended", fields))
    assert "\n" not in line
    document = json.loads(line)
    at = datetime.fromisoformat(document.pop("time"))
    assert at.timestamp() == 1_700_000_000.25
    assert document == {
        "process": "worker-0",
        "level": "warning",
        "event": "request_ended",
        "message": "request ended",
        **fields,
    }
    plain = json.loads(logs.formatter("worker-0", "json").format(entry("as it is")))
    assert set(plain) == {"time", "process", "level", "message"}


@pytest.mark.parametrize("log_format", logs.FORMATS)
def test_a_peers_words_never_make_a_line_of_their_own(log_format: str) -> None:
    line = logs.formatter("a%process", log_format).format(entry(HOSTILE, "refused", {"name": HOSTILE}))
    assert line.isprintable()
    assert line.count("all is lost") == 2


def test_an_exception_is_kept(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level("ERROR"):
        try:
            raise ValueError("which")
        except ValueError:
            logging.getLogger("coordinator").exception("it failed")
    record = caplog.records[0]
    assert "ValueError: which" in json.loads(logs.formatter("c", "json").format(record))["exception"]
    assert "ValueError: which" in logs.formatter("c", "text").format(record)


def test_what_is_told_carries_its_event(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level("DEBUG"):
        logs.log_event(logging.getLogger("coordinator"), "info", "worker ready", "worker_ready", {"worker": "w0"})
    line = json.loads(logs.formatter("coordinator", "json").format(caplog.records[0]))
    assert (line["event"], line["level"], line["worker"]) == ("worker_ready", "info", "w0")


@pytest.mark.parametrize(
    ("level", "log_format", "field"), [("loud", "text", "log_level"), ("info", "xml", "log_format")]
)
def test_a_wrong_setting_is_named(level: str, log_format: str, field: str) -> None:
    with pytest.raises(InvalidConfiguration) as raised:
        logs.check(level, log_format)
    assert raised.value.field == field
