"""`kvforge drain --wait`, against a scripted coordinator."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any, Self

import pytest

from kvforge.commands import drain, parsing
from kvforge.commands.cli import main
from kvforge.protocol.errors import CoordinatorUnavailable
from kvforge.protocol.exits import OK, TIMED_OUT, UNAVAILABLE


class Played:
    """Answers `stats` with these counts of requests in turn, then always with the last."""

    def __init__(self, *running: int) -> None:
        self.running = list(running)
        self.said: list[str] = []

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.said.append("close")

    def drain(self, deadline_s: float | None = None) -> None:
        self.said.append("drain" if deadline_s is None else f"drain {deadline_s}")

    def stats(self) -> Any:
        left = self.running.pop(0) if len(self.running) > 1 else self.running[0]
        self.said.append(str(left))
        return SimpleNamespace(requests=SimpleNamespace(pending=left // 2, running=left - left // 2))


def test_admission_stops_first_and_progress_is_told_until_the_end(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    played = Played(3, 3, 1, 0)
    monkeypatch.setattr(parsing, "open_client", lambda options: played)
    monkeypatch.setattr(drain, "POLL_S", 0.0)
    assert main(["drain", "--wait", "60"]) == OK
    assert played.said == ["drain", "3", "3", "1", "0", "close"]
    told = [line for line in capsys.readouterr().err.splitlines() if "draining" in line]
    assert [line.split("; ")[1] for line in told] == [
        "2 running, 1 waiting",
        "1 running, 0 waiting",
        "0 running, 0 waiting",
    ]


def test_what_does_not_end_in_time_is_counted(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(parsing, "open_client", lambda options: Played(2))
    monkeypatch.setattr(drain, "POLL_S", 0.0)
    assert main(["drain", "--wait", "0.01"]) == TIMED_OUT
    assert "2 requests still run after 0.01 s" in capsys.readouterr().err


def test_a_deadline_goes_to_the_coordinator(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    played = Played(2)
    monkeypatch.setattr(parsing, "open_client", lambda options: played)
    monkeypatch.setattr(drain, "POLL_S", 0.0)
    assert main(["drain", "--deadline", "30", "--wait", "0.01"]) == TIMED_OUT
    assert played.said[0] == "drain 30.0"
    assert "they go on, at most until 30 s after the command" in capsys.readouterr().err


def test_without_a_wait_it_tells_and_leaves(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(parsing, "open_client", lambda options: Played(2))
    assert main(["drain"]) == OK


def test_nobody_there_is_one_line(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    def nobody(options: object) -> Any:
        raise CoordinatorUnavailable("nobody answers")

    monkeypatch.setattr(parsing, "open_client", nobody)
    assert main(["drain", "--wait", "1"]) == UNAVAILABLE
    assert capsys.readouterr().err == "kvforge: nobody answers\n"
