"""The documentation of fields matches the code."""

from __future__ import annotations

from kvforge.gateway.parse.formats import FORMATS
from tests.gateway import documented

DOCUMENT = documented.FILE.read_text(encoding="utf-8")


def test_the_tables_of_fields_are_of_this_code() -> None:
    assert documented.document() == DOCUMENT, "write it anew: python -m tests.gateway.documented"


def test_every_format_of_calls_is_named() -> None:
    assert [name for name in FORMATS if name not in DOCUMENT] == []
