"""The downtime between two lives of a coordinator, whatever the wall clock does."""

from __future__ import annotations

import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from kvforge.coordinator.config import CoordinatorConfig, LimitsSection
from kvforge.coordinator.core.events import ClientCame, FromClient
from kvforge.coordinator.host import downtime
from kvforge.coordinator.host.downtime import CHECK_US, CLOCK_FILE, Anchor, ClockFile, HostTime, downtime_us
from kvforge.coordinator.machine_store import MachineStore
from kvforge.protocol import codec
from kvforge.protocol.messages import CreateSequence, Int32Array
from tests.coordinator.driver import PROMPT
from tests.coordinator.test_away import int32

SECOND, YEAR_S, MAX_S = 1_000_000, 365 * 86_400.0, 300.0
ANCHOR = Anchor("this boot", 40 * SECOND)
LAST_US, WRITTEN_S = 1_000 * SECOND, 1_800_000_000.0


@pytest.mark.parametrize("jump_s", [-YEAR_S, -3600.0, 0.0, 3600.0, YEAR_S])
@pytest.mark.parametrize("gone_s", [0, 7, 5_000])
def test_in_one_boot_of_the_host_it_is_known_exactly(jump_s: float, gone_s: int) -> None:
    uptime_us = LAST_US + ANCHOR.difference_us + gone_s * SECOND
    now = HostTime("this boot", uptime_us, WRITTEN_S + gone_s + jump_s)
    assert downtime_us(ANCHOR, LAST_US, WRITTEN_S, now, MAX_S) == gone_s * SECOND


@pytest.mark.parametrize(
    ("wall_s", "counted_s"),
    [(100.0, 100.0), (30.0, 30.0), (-YEAR_S, 20.0), (YEAR_S, 20.0 + MAX_S), (5.0, 20.0)],
)
def test_after_a_restart_of_the_host_the_wall_clock_is_believed_within_bounds(wall_s: float, counted_s: float) -> None:
    """The host has been up for 20 s."""
    now = HostTime("the next boot", 20 * SECOND, WRITTEN_S + wall_s)
    assert downtime_us(ANCHOR, LAST_US, WRITTEN_S, now, MAX_S) == counted_s * SECOND


@pytest.mark.parametrize("anchor", [None, Anchor("", 40 * SECOND)])
@pytest.mark.parametrize(("wall_s", "counted_s"), [(100.0, 100.0), (-YEAR_S, 0.0), (YEAR_S, MAX_S)])
def test_where_the_boot_is_not_known_too(anchor: Anchor | None, wall_s: float, counted_s: float) -> None:
    now = HostTime("" if anchor else "a boot", 50_000 * SECOND, WRITTEN_S + wall_s)
    assert downtime_us(anchor, LAST_US, WRITTEN_S, now, MAX_S) == counted_s * SECOND


class Host:
    """The host's clocks, moved by hand."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.wall_s, self.boot, self._began_ns, self.booted_ns = 0.0, "one", time.monotonic_ns(), 0
        clocks = SimpleNamespace(
            time=lambda: time.time() + self.wall_s,
            clock_gettime_ns=lambda _clock: time.monotonic_ns() - self._began_ns + self.booted_ns,
            CLOCK_BOOTTIME=7,
        )
        monkeypatch.setattr(downtime, "time", clocks)
        monkeypatch.setattr(downtime, "boot_id", lambda: self.boot)

    def restart(self) -> None:
        """Restart the host: its uptime begins anew."""
        self.boot, self._began_ns, self.booted_ns = "two", time.monotonic_ns(), 0


def life(folder: Path) -> MachineStore:
    limits = LimitsSection(sequences_max=4, blocks_max=64, blocks_per_sequence_max=8)
    return MachineStore(CoordinatorConfig(runtime_dir=str(folder), durability="process", limits=limits), lambda: False)


def tokens() -> Int32Array:
    return int32(PROMPT)


def begun(folder: Path) -> MachineStore:
    """A life with a sequence that has an idle time to live of two minutes."""
    made = life(folder)
    create = CreateSequence(rid=1, tokens=tokens(), idle_ttl_ms=120_000)
    events: list[tuple[Any, list[Any]]] = [(ClientCame(1, "s"), []), (FromClient(1, create), codec.encode(create))]
    for event, frames in events:
        made.machine.apply(event, made.now_us())
        assert made.journal is not None
        made.journal.note(event, made.now_us(), frames)
        made.journal.commit()
    return made


@pytest.mark.parametrize("jump_s", [-YEAR_S, 3600.0, YEAR_S])
def test_a_wall_clock_that_was_set_between_two_lives_ends_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, jump_s: float
) -> None:
    host = Host(monkeypatch)
    first = begun(tmp_path)
    last_us = first.now_us()
    first.close(ended=False)
    host.wall_s = jump_s
    second = life(tmp_path)
    assert second.again and len(second.machine.cache.sequences) == 1
    assert 0 <= second.now_us() - last_us < 60 * SECOND
    assert (second.machine.due_us() or 0) > second.now_us()
    second.close(ended=False)


def test_a_wall_clock_that_is_wrong_after_a_restart_of_the_host_is_bounded(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    host = Host(monkeypatch)
    first = begun(tmp_path)
    last_us = first.now_us()
    first.close(ended=False)
    host.wall_s = YEAR_S
    host.restart()
    second = life(tmp_path)
    assert second.now_us() - last_us < (MAX_S + 60) * SECOND
    second.close(ended=False)


def test_the_difference_is_written_again_where_the_clocks_came_apart(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """After a standstill or a suspended host; otherwise the file is not rewritten."""
    host = Host(monkeypatch)
    file = ClockFile(tmp_path)
    file.keep(1)
    before = file.read()
    inode = (tmp_path / CLOCK_FILE).stat().st_ino
    assert before is not None and before.boot_id == "one"
    host.booted_ns = 20_000
    file.keep(1 + 2 * CHECK_US)
    host.booted_ns = 2 * CHECK_US * 1000
    file.keep(1 + 4 * CHECK_US)
    after = file.read()
    assert after is not None and after != before
    assert (tmp_path / CLOCK_FILE).stat().st_ino != inode
    file.remove()
    file.remove()
    assert file.read() is None and not list(tmp_path.iterdir())


def test_a_file_that_cannot_be_read_is_no_reason_not_to_start(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    (tmp_path / CLOCK_FILE).write_bytes(b"\xff{")
    assert ClockFile(tmp_path).read() is None
    assert "the wall clock is used" in caplog.text


def test_this_host_names_its_boot() -> None:
    here = downtime.host_time()
    assert here.uptime_us > 0 and here == (here.boot_id, here.uptime_us, here.wall_s)
