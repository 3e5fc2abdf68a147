"""`kvforge demo` with the real model: four answers, cache statistics, no leftovers, also with Ctrl-C at any moment."""

from __future__ import annotations

import re
import signal
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from tools.cluster.running import Process, processes_of

pytestmark = pytest.mark.model


@pytest.fixture
def folder(smollm2_path: Path) -> Iterator[Path]:
    """Return the demo's temporary folder, to find leftovers."""
    assert smollm2_path.is_file()
    with tempfile.TemporaryDirectory(prefix="kvf", dir="/tmp") as path:
        yield Path(path)


def test_the_demo_answers_and_leaves_nothing(folder: Path) -> None:
    with Process("demo", "--max-tokens", "12", TMPDIR=str(folder)) as demo:
        status = demo.end()
        assert status == 0, demo.text
    for number, question in enumerate(("Why is the sky blue?", "Why do leaves turn red", "What is the capital"), 1):
        assert f"[{number}] {question}" in demo.text
    assert "The capital of France is Paris." in demo.text
    assert re.search(r"tokens generated +\d+ in [\d.]+ s", demo.text)
    assert re.search(r"blocks used at peak +[1-9]", demo.text)
    assert re.search(r"blocks used now +0$", demo.text, re.MULTILINE)
    assert re.search(r"prefix hits +[1-9]\d* of \d+ tokens", demo.text)
    assert processes_of(folder) == {}
    assert list(folder.iterdir()) == []


def test_interrupted_before_it_starts(folder: Path) -> None:
    interrupted(folder, "smollm2-135m: checking")


def test_interrupted_while_it_answers(folder: Path) -> None:
    interrupted(folder, "[1] Why is the sky blue?\n")


def interrupted(folder: Path, moment: str) -> None:
    """Check that Ctrl-C ends the demo after an output, and that nothing is left."""
    with Process("demo", TMPDIR=str(folder)) as demo:
        demo.expect(moment)
        demo.signal(signal.SIGINT)
        assert demo.end() == 130
        assert "Traceback" not in demo.text
    assert processes_of(folder) == {}
    assert list(folder.iterdir()) == []
