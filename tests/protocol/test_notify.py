"""Messages to systemd, over a real notify socket."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import pytest

from kvforge.protocol.notify import FEEDS, Watchdog, notify, working
from tests.protocol.systemd_ear import Ear


@pytest.fixture
def ear(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Ear]:
    with closing(Ear(tmp_path / "notify", monkeypatch)) as made:
        yield made


def test_lines_arrive_together(ear: Ear) -> None:
    assert notify("READY=1", "STATUS=serving")
    assert ear.heard() == ["READY=1\nSTATUS=serving"]


def test_nobody_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("NOTIFY_SOCKET", raising=False)
    assert not notify("READY=1")


def test_nobody_is_there(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NOTIFY_SOCKET", str(tmp_path / "gone"))
    assert not notify("READY=1")


def test_whoever_loads_asks_for_time(ear: Ear) -> None:
    assert working("loading weights 30 %", 1.5)
    assert ear.heard() == ["STATUS=loading weights 30 %\nEXTEND_TIMEOUT_USEC=1500000"]


def test_the_watchdog_is_fed_several_times_in_its_time(ear: Ear) -> None:
    ear.watch(2_000_000)
    watchdog = Watchdog()
    for now_us in range(10_000_000, 12_000_000, 1000):
        watchdog.feed(now_us)
    assert ear.heard() == ["WATCHDOG=1"] * FEEDS


def test_a_watchdog_whose_socket_takes_nothing_is_not_waited_for(ear: Ear) -> None:
    ear.watch(4)
    watchdog = Watchdog()
    for now_us in range(10_000):  # more than a socket holds
        watchdog.feed(now_us)
    assert 0 < len(ear.heard()) < 10_000


@pytest.mark.parametrize("pid", ["", "ours", "another"])
def test_a_watchdog_is_for_one_process(ear: Ear, pid: str, monkeypatch: pytest.MonkeyPatch) -> None:
    ear.watch(2_000_000)
    said = {"": "", "ours": str(os.getpid()), "another": "1"}[pid]
    monkeypatch.setenv("WATCHDOG_PID", said)
    Watchdog().feed(1)
    assert ear.heard() == ["WATCHDOG=1"] * (pid != "another")


@pytest.mark.parametrize("microseconds", ["", "0", "soon"])
def test_no_watchdog(ear: Ear, microseconds: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WATCHDOG_USEC", microseconds)
    Watchdog().feed(1)
    assert ear.heard() == []
