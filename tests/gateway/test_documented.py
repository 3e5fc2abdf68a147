"""What the documentation says of fields is what the code does."""

from __future__ import annotations

from pathlib import Path

from gateway.anthropic.asked import IGNORED as ANTHROPIC
from gateway.openai.fields import IGNORED as OPENAI
from gateway.openai.responses_asked import IGNORED as RESPONSES
from gateway.parse.formats import FORMATS

DOCUMENT = (Path(__file__).parents[2] / "docs" / "http.md").read_text(encoding="utf-8")


def test_every_field_that_has_no_effect_is_in_the_list_and_no_other() -> None:
    wanted = {f"| `{name}` | {why} |" for name, why in {**OPENAI, **RESPONSES, **ANTHROPIC}.items()}
    table = DOCUMENT.split("| field | why |\n|---|---|\n")[1].split("\n\n")[0]
    assert set(table.split("\n")) == wanted


def test_every_format_of_calls_is_named() -> None:
    assert [name for name in FORMATS if name not in DOCUMENT] == []
