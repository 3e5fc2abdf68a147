"""Creation or recovery of a server's machine, and persistence of its state.

The loop's clock is the core's: it continues from the last event of the journal plus the time without a coordinator
(`host.downtime`). Deadlines therefore stay correct after a reboot, which resets the monotonic clock, or a change of the
wall clock.
"""

from __future__ import annotations

import logging
import secrets
import time
from collections.abc import Callable
from pathlib import Path

import msgspec

from kvforge.protocol.errors import Field, InvalidConfiguration, KvforgeError
from kvforge.protocol.logs import log_event
from kvforge.protocol.steady_clock import monotonic_ns

from .config import CoordinatorConfig
from .core.events import Boot
from .core.limits import Limits
from .core.machine import Machine
from .host.downtime import ClockFile, downtime_us, host_time
from .host.ids import first_id
from .journal.log import Journal
from .journal.recovery import Recovered
from .journal.state_folder import StateFolder

GENERATION_BITS = 30  # of 31: leaves room to count
log = logging.getLogger("coordinator")


class MachineStore:
    """A machine with its journal, for the lifetime of one process.

    Attributes:
        journal: The journal; None without persistence.
        numbers: Connection numbers used so far.
        again: The machine was recovered.
    """

    def __init__(self, config: CoordinatorConfig, stopping: Callable[[], bool], discard: bool = False) -> None:
        """Create or recover the machine.

        Args:
            config: The configuration.
            stopping: Returns whether the process was asked to stop.
            discard: Discard the state of earlier processes.

        Raises:
            InvalidConfiguration: A setting is invalid, or cannot change while state is kept.
            CoordinatorInUse: Another coordinator uses the state folder.
            JournalCorrupt: The state is damaged.
        """
        self._config = config
        self._offset_us = self.numbers = 0
        self.again = False
        self._state_folder: StateFolder | None = None
        self._clock_file: ClockFile | None = None
        self.journal: Journal | None = None
        limits = config.core_limits()
        if config.durability == "none":
            self.machine = self._create(limits)
            return
        journal = config.journal
        state_folder = self._state_folder = StateFolder(
            config.state_path,
            config.durability,
            journal.bytes_max,
            int(journal.replay_ms_max * 1e3),
            journal.message_deaths_max,
        )
        clock_file = self._clock_file = ClockFile(state_folder.folder)
        keep = True
        try:
            found = self._recover(state_folder, limits, discard)
            keep = found is not None
            self.machine = self._continue_from(found) if found is not None else self._create(limits)
            self.journal = state_folder.begin(found, stopping, self.machine.boot)
            if found is None:
                self.journal.note(self._boot, self.machine.start_us)
                self.journal.commit()
        except KvforgeError:
            state_folder.close(keep=keep)
            raise
        self.again = found is not None
        clock_file.keep(self.now_us())

    def now_us(self) -> int:
        """Return the core's time in microseconds. Time in which this process was suspended does not count."""
        return monotonic_ns() // 1000 + self._offset_us

    @property
    def offset_us(self) -> int:
        """The core's time minus the steady clock, in microseconds."""
        return self._offset_us

    def next_number(self) -> int:
        """Return a connection number that was never used before."""
        self.numbers += 1
        return self.numbers

    def turned(self, began_us: int) -> None:
        """Persist the clock and write a snapshot if due, after a turn that began at `began_us`."""
        if self._state_folder is not None:
            assert self._clock_file is not None
            self._clock_file.keep(now_us := self.now_us())
            self._state_folder.turned(self.machine, now_us - began_us, now_us, self.numbers)

    def rebuild(self) -> str:
        """Write the state to a new journal folder after the old one was removed. Return what was done.

        Raises:
            KvforgeError: The folder cannot be created or written.
        """
        assert self._state_folder is not None
        done = self._state_folder.rebuild(self.machine, self.now_us(), self.numbers)
        self._clock_file = ClockFile(self._state_folder.folder)
        self._clock_file.keep(self.now_us())
        return done

    def close(self, ended: bool) -> None:
        """Close the journal. Idempotent.

        Args:
            ended: The process ended regularly; state that no client can ask for is then discarded.
        """
        if self._state_folder is not None:
            goes_on = self._config.on_stop == "keep" and bool(self.machine.requests.live)
            keep = not ended or goes_on or self.machine.kept > 0
            if ended and keep:
                self._state_folder.leave_snapshot(self.machine, self.now_us(), self.numbers)
            if not keep and self._clock_file is not None:
                self._clock_file.remove()
                self._clock_file = None
            self._state_folder.close(keep=keep)

    # ------------------------------------------------------------------------------------------------------- recovery

    def _recover(self, state_folder: StateFolder, limits: Limits, discard: bool) -> Recovered | None:
        if discard:
            state_folder.discard()
            return None
        found = state_folder.recover()
        if found is None or found.machine.limits == limits:
            return found
        if not found.machine.kept and not found.machine.requests.live:
            state_folder.discard()  # the limits changed, and no state depends on the old ones
            return None
        raise _fixed(found.machine, limits, state_folder.folder)

    def _continue_from(self, found: Recovered) -> Machine:
        assert self._clock_file is not None, "recovered state has a folder"
        anchor, away_s_max = self._clock_file.read(), self._config.journal.away_s_max
        gone_us = downtime_us(anchor, found.now_us, found.written_s, host_time(), away_s_max)
        self._offset_us = found.now_us + gone_us - monotonic_ns() // 1000
        self.numbers = found.numbers
        facts: dict[str, Field] = {
            "snapshot_ms": found.snapshot_us // 1000,
            "records": found.records,
            "records_ms": (found.took_us - found.snapshot_us) // 1000,
            "requests": len(found.machine.requests.live),
            "workers": len(found.machine.workers),
        }
        log_event(log, "info", f"recovered from {self._config.state_path}", "went_on", facts)
        return found.machine

    def _create(self, limits: Limits) -> Machine:
        """Create a new machine with a unique boot id."""
        first, generation = first_id(time.time_ns() // 1_000_000), secrets.randbits(GENERATION_BITS)
        self._boot = Boot(secrets.token_hex(16), secrets.token_bytes(32), limits, first, generation)
        return Machine(self._boot, self.now_us())


def _fixed(machine: Machine, wanted: Limits, folder: Path) -> InvalidConfiguration:
    """Return the error for settings that differ from those of the kept state."""
    changed = _differences(msgspec.to_builtins(machine.limits), msgspec.to_builtins(wanted))
    first, *others = [(name.replace("bounds.", "limits."), old, new) for name, old, new in changed]
    live, kept = len(machine.requests.live), machine.kept
    more = "".join(f"; {name} is {new}, not {old}" for name, old, new in others)
    name, old, new = first
    return InvalidConfiguration(
        name,
        f"is {new}, and the state in {folder} (live requests: {live}, answers and sequences kept: {kept}) was "
        f"made with {old}{more}: set it back, or end what is kept (`kvforge drain --wait 600`, then a restart), or "
        "start with --fresh, which discards it",
    )


def _differences(old: object, new: object, path: str = "") -> list[tuple[str, object, object]]:
    """Return the differences of two settings trees as (name, old, new); None for a missing setting."""
    if not isinstance(old, dict) or not isinstance(new, dict):
        return [(path, old, new)] if old != new else []
    names = [*old, *(name for name in new if name not in old)]
    return [
        difference
        for name in names
        for difference in _differences(old.get(name), new.get(name), f"{path}.{name}" if path else str(name))
    ]
