"""Restarts of a child process that exits, and their limit."""

from __future__ import annotations

import os
import select
from collections.abc import Iterator
from pathlib import Path
from time import monotonic

import pytest

from kvforge.launch import child as children
from kvforge.launch.child import BACKOFF_S_MAX, BACKOFF_S_MIN, RESTARTS_MAX, Child

END_S = 30.0


class Clock:
    """A clock that advances only on request."""

    def __init__(self) -> None:
        self.now = 1000.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Iterator[Clock]:
    made = Clock()
    monkeypatch.setattr(children, "monotonic", made)
    yield made


def failing(tmp_path: Path, lines: list[str]) -> Child:
    return Child("worker-0", ["-c", "raise SystemExit('worker: no such thing.')"], tmp_path, lines.append)


def run_to_its_end(child: Child) -> int:
    child.start()
    deadline = monotonic() + END_S
    while (status := child.ended()) is None:
        assert monotonic() < deadline, "it does not end"
        if child.output >= 0:
            select.select([child.output], [], [], 1.0)
            child.read()
    return status


def test_one_that_never_serves_is_started_ever_later_and_then_given_up(tmp_path: Path, clock: Clock) -> None:
    lines: list[str] = []
    child, pauses = failing(tmp_path, lines), []
    while not child.given_up:
        assert run_to_its_end(child) == 1
        child.plan_restart()
        pauses.append(None if child.restart_at is None else child.restart_at - clock.now)
    assert pauses == [*(min(BACKOFF_S_MIN * 2**n, BACKOFF_S_MAX) for n in range(RESTARTS_MAX)), None]
    assert child.last_words() == "no such thing"
    assert lines == ["worker: no such thing."] * (RESTARTS_MAX + 1)


def test_one_that_has_served_is_started_soon_again_however_often(tmp_path: Path, clock: Clock) -> None:
    child = failing(tmp_path, [])
    for _ in range(2 * RESTARTS_MAX):
        run_to_its_end(child)
        child.served = True
        child.plan_restart()
        assert child.restart_at == clock.now + BACKOFF_S_MIN
    assert not child.given_up


def test_its_output_is_closed_with_it(tmp_path: Path) -> None:
    before = len(os.listdir("/proc/self/fd"))  # noqa: PTH208
    child = failing(tmp_path, [])
    run_to_its_end(child)
    assert (child.output, child.running) == (-1, False)
    assert len(os.listdir("/proc/self/fd")) == before  # noqa: PTH208


def test_what_is_for_the_first_start_is_not_repeated(tmp_path: Path, clock: Clock) -> None:
    lines: list[str] = []
    command = ["-c", "import sys; print(sys.argv[1:])", "always"]
    child = Child("coordinator", command, tmp_path, lines.append, once=("--fresh",))
    for _ in range(3):
        run_to_its_end(child)
    assert lines == ["['always', '--fresh']", "['always']", "['always']"]
