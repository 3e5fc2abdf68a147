"""Answers with line breaks of Unicode, for clients that split a text with `str.splitlines`."""

from __future__ import annotations

import json
from typing import Any

import msgspec
import pytest

from kvforge.gateway.anthropic import messages
from kvforge.gateway.batches import outcomes
from kvforge.gateway.http.encoding import encode
from kvforge.gateway.openai import bodies, response_items

FOUND = [chr(code) for code in range(1, 0x3000) if len(f"a{chr(code)}b".splitlines()) > 1]
TEXT = "one " + " two ".join(FOUND) + " three é \N{GRINNING FACE}"


def test_python_splits_at_ten_characters() -> None:
    assert "".join(FOUND) == "\n\v\f\r\x1c\x1d\x1e\x85\u2028\u2029"


@pytest.mark.parametrize("value", [TEXT, {"text": [TEXT]}, msgspec.Raw(json.dumps(TEXT, ensure_ascii=False).encode())])
def test_json_is_one_line(value: Any) -> None:
    line = encode(value).decode()
    assert len(line.splitlines()) == 1
    assert json.loads(line) in (TEXT, {"text": [TEXT]})
    assert "é" in line, "other characters stay"


def test_events_and_lines_of_files_have_their_own_line_breaks_only() -> None:
    encoder = bodies.EventEncoder("id", "chat.completion.chunk", 0, "tiny", usage_null=False)
    body = json.dumps({"text": TEXT}, ensure_ascii=False).encode()
    made = {
        "chat": (encoder.text(0, TEXT), 2),
        "completion": (encoder.completion_text(0, TEXT), 2),
        "error": (bodies.error_event({"message": TEXT}), 2),
        "response": (response_items.event("response.output_text.delta", delta=TEXT), 3),
        "message": (messages.event("content_block_delta", delta=TEXT), 3),
        "batch": (outcomes.answered("name", "line-1", "r1", body), 1),
    }
    assert {name: len(data.decode().splitlines()) for name, (data, _) in made.items()} == {
        name: lines for name, (_, lines) in made.items()
    }
