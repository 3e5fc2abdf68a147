"""Watchdogs of `kvforge up`: a child that stops reporting is ended, whatever it waits for."""

from __future__ import annotations

import signal
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from kvforge.launch import child as children
from kvforge.launch import watchdog as watchdogs
from kvforge.launch.child import ABORT_S, Child
from kvforge.launch.settings import Settings
from kvforge.launch.watchdog import ChildWatchdog
from kvforge.protocol import notify as notifying
from kvforge.protocol.notify import Watchdog, notify, working

PERIOD_S, END_S = 20.0, 30.0
READY = "from kvforge.protocol.notify import notify; assert notify('READY=1')"
SLEEP = "import time; print('ready', flush=True); time.sleep(600)"


class Clock:
    """A clock that advances only on request."""

    def __init__(self) -> None:
        self.now = 1000.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    made = Clock()
    monkeypatch.setattr(children, "monotonic", made)
    monkeypatch.setattr(watchdogs, "monotonic", made)
    return made


@pytest.fixture
def watchdog(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[ChildWatchdog]:
    """A watchdog to which this process reports."""
    made = ChildWatchdog(tmp_path / "worker-0.notify", PERIOD_S)
    for name, value in made.begin().items():
        monkeypatch.setenv(name, value)
    yield made
    made.close()


def test_the_watch_begins_when_the_child_is_ready(watchdog: ChildWatchdog, clock: Clock) -> None:
    working("loading", 5.0)
    assert not watchdog.hangs()
    clock.now += 100 * PERIOD_S
    assert not watchdog.hangs()
    assert notify("READY=1", "STATUS=serving")
    assert not watchdog.hangs()
    clock.now += PERIOD_S
    assert not watchdog.hangs()
    clock.now += 0.1
    assert watchdog.hangs()


def test_reports_and_extensions_postpone_it(watchdog: ChildWatchdog, clock: Clock) -> None:
    notify("READY=1")
    assert not watchdog.hangs()
    feeder = Watchdog()
    assert feeder.every_us == PERIOD_S * 1e6 / notifying.FEEDS
    for number in range(5):
        clock.now += PERIOD_S
        feeder.feed(int((number + 1) * PERIOD_S * 1e6))
        assert not watchdog.hangs()
    working("capturing graphs", 3 * PERIOD_S)
    assert not watchdog.hangs()
    feeder.feed(int(10 * PERIOD_S * 1e6))
    assert not watchdog.hangs(), "a report does not shorten the extension"
    clock.now += 3 * PERIOD_S
    assert not watchdog.hangs()
    clock.now += 0.1
    assert watchdog.hangs()


def test_a_new_process_is_not_watched_for_what_the_one_before_owed(watchdog: ChildWatchdog, clock: Clock) -> None:
    notify("READY=1")
    assert not watchdog.hangs()
    clock.now += 2 * PERIOD_S
    assert watchdog.hangs()
    watchdog.begin()
    assert not watchdog.hangs()


def test_its_socket_goes_with_it(watchdog: ChildWatchdog, tmp_path: Path) -> None:
    assert [path.name for path in tmp_path.iterdir()] == ["worker-0.notify"]
    watchdog.close()
    assert not list(tmp_path.iterdir()) and not watchdog.hangs()


def test_a_name_that_is_no_address_leaves_the_child_without_a_watch(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """A runtime folder may be too long a name for one more socket, though not for the coordinator's."""
    watchdog = ChildWatchdog(tmp_path / ("n" * 120), PERIOD_S)
    lines: list[str] = []
    child = Child(
        "worker-0",
        ["-c", f"{READY.replace('assert ', 'assert not ')}; print('ready')"],
        tmp_path,
        lines.append,
        watchdog=watchdog,
    )
    child.start()
    assert child.wait(time.monotonic() + END_S)
    assert lines == ["ready"] and child.end_if_it_hangs() == 0.0
    assert "no watchdog at" in caplog.text and not list(tmp_path.iterdir())


@pytest.mark.parametrize("ignored", [False, True])
def test_a_child_that_hangs_is_aborted_and_then_killed(ignored: bool, tmp_path: Path, clock: Clock) -> None:
    """One that ignores SIGABRT too."""
    ignoring = "import signal; signal.signal(signal.SIGABRT, signal.SIG_IGN); " if ignored else ""
    lines: list[str] = []
    watchdog = ChildWatchdog(tmp_path / "worker-0.notify", PERIOD_S)
    child = Child("worker-0", ["-c", f"{ignoring}{READY}; {SLEEP}"], tmp_path, lines.append, watchdog=watchdog)
    child.start()
    try:
        until(lambda: (child.read(), lines)[1] == ["ready"])
        assert child.end_if_it_hangs() == 0.0
        clock.now += PERIOD_S + 0.1
        assert child.end_if_it_hangs() == PERIOD_S
        assert child.end_if_it_hangs() == 0.0, "it is reported once"
        if ignored:
            assert child.ended() is None
            clock.now += ABORT_S + 0.1
            assert child.end_if_it_hangs() == 0.0
        ended: list[int] = []
        until(lambda: ended or ((status := child.ended()) is not None and ended.append(status)))
        assert ended == [-signal.SIGKILL if ignored else -signal.SIGABRT]
        assert not (tmp_path / "worker-0.notify").exists()
    finally:
        child.send(signal.SIGKILL)
        child.wait(time.monotonic() + END_S)


@pytest.mark.parametrize(("schedule", "period_s"), [({}, 120.0), ({"step_timeout_s": 300}, 600.0)])
def test_a_worker_is_given_more_time_than_a_step_may_take(schedule: dict[str, float], period_s: float) -> None:
    settings = Settings(model=Path("model"), runtime_dir=Path("run"), schedule=schedule)
    assert settings.worker_watchdog_s == period_s


def until(true: Callable[[], object]) -> None:
    """Wait until `true()` is true."""
    deadline = time.monotonic() + END_S
    while not true():
        assert time.monotonic() < deadline, "it did not come true"
        time.sleep(0.02)
