"""`python -m kvforge.drain`, against a coordinator that is played by hand."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any, Self

import pytest

from kvforge import drain
from protocol.errors import CoordinatorUnavailable


class Played:
    """Answers `stats` with these counts of running requests, one after the other, then with the last for ever."""

    def __init__(self, *running: int) -> None:
        self.running = list(running)
        self.said: list[str] = []

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.said.append("close")

    def drain(self) -> None:
        self.said.append("drain")

    def stats(self) -> Any:
        left = self.running.pop(0) if len(self.running) > 1 else self.running[0]
        self.said.append(str(left))
        return SimpleNamespace(requests=SimpleNamespace(pending=left // 2, running=left - left // 2))


def test_admission_stops_first_and_the_end_is_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    played = Played(3, 1, 0)
    monkeypatch.setattr(drain, "Client", lambda name: played)
    monkeypatch.setattr(drain, "POLL_S", 0.0)
    assert drain.main(["--wait", "60"]) == 0
    assert played.said == ["drain", "3", "1", "0", "close"]


def test_what_does_not_end_in_time_is_counted(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(drain, "Client", lambda name: Played(2))
    assert drain.main(["--wait", "0"]) == 1
    assert capsys.readouterr().err == "kvforge drain: 2 requests still run after 0 s\n"


def test_nobody_there_is_one_line(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    def nobody(name: str) -> Any:
        raise CoordinatorUnavailable("nobody answers")

    monkeypatch.setattr(drain, "Client", nobody)
    assert drain.main([]) == 1
    assert capsys.readouterr().err == "kvforge drain: nobody answers\n"
