"""Every scenario gives its recorded results; `python -m tests.scenarios --update` rewrites them."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.scenarios.runner import play_text, scenario_files


@pytest.mark.parametrize("path", scenario_files(), ids=lambda path: path.stem)
def test_story(path: Path) -> None:
    text = path.read_text()
    assert play_text(text) == text


def test_there_are_enough_stories() -> None:
    assert len(scenario_files()) >= 12
