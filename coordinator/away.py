"""For how long there was no coordinator between two lives, whatever happened to the wall clock.

While it serves, a coordinator keeps the difference between the host's boot clock (CLOCK_BOOTTIME, which nothing sets)
and the core's time in the file `clock` of its state folder. In the same boot of the host the next life computes from it
exactly how long it was away. After a restart of the host there is only the wall clock, which may have been set: the
time away is at least the host's uptime, and at most `journal.away_s_max` more.
"""

from __future__ import annotations

import logging
import time
from pathlib import Path
from typing import NamedTuple

import msgspec

CLOCK_FILE = "clock"
CHECK_US = 1_000_000  # so often the difference is looked at
DRIFT_US = 100_000  # one that changed by more is written again: after a standstill, or a suspended host
_BOOT_ID = Path("/proc/sys/kernel/random/boot_id")
log = logging.getLogger("coordinator")


class HostTime(NamedTuple):
    """One moment, as the host has it.

    boot_id: names the boot of the host; "": the system does not name it. uptime_us: since then. wall_s: Unix time.
    """

    boot_id: str
    uptime_us: int
    wall_s: float


class Anchor(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The difference between the host's uptime and the core's time, in microseconds, in one boot of the host."""

    boot_id: str
    difference_us: int


def boot_id() -> str:
    """Return the name of this boot of the host; empty where the system does not name it."""
    try:
        return _BOOT_ID.read_text(encoding="ascii").strip()
    except (OSError, UnicodeDecodeError):
        return ""


def uptime_us() -> int:
    """Return the time since the host's boot in microseconds, with the time in which it was suspended."""
    return time.clock_gettime_ns(time.CLOCK_BOOTTIME) // 1000


def host_time() -> HostTime:
    """Return the present moment."""
    return HostTime(boot_id(), uptime_us(), time.time())


def away_us(anchor: Anchor | None, last_us: int, written_s: float, now: HostTime, away_s_max: float) -> int:
    """Compute how long no coordinator was there.

    Args:
        anchor: As the last life wrote it; None where there is none.
        last_us: The core's time of its last event.
        written_s: When its journal was written last, by the wall clock of then.
        now: The present moment.
        away_s_max: Beyond the uptime, no more is believed of the wall clock after a restart of the host.

    Returns:
        Microseconds, 0 at least.
    """
    if anchor is not None and anchor.boot_id and anchor.boot_id == now.boot_id:
        return max(0, now.uptime_us - anchor.difference_us - last_us)
    wall_us = int((now.wall_s - written_s) * 1e6)
    most_us = int(away_s_max * 1e6)
    if anchor is not None and anchor.boot_id and now.boot_id:  # the host was started again since
        least_us = now.uptime_us
    else:
        least_us = 0
    found_us = min(max(wall_us, least_us), least_us + most_us)
    if found_us != wall_us:
        log.warning(
            "the wall clock shows %.0f s without a coordinator; %.0f s are counted (journal.away_s_max)",
            wall_us / 1e6,
            found_us / 1e6,
        )
    return found_us


class ClockFile:
    """The anchor of one state folder, kept while a coordinator serves there."""

    def __init__(self, folder: Path) -> None:
        self._path = folder / CLOCK_FILE
        self._boot_id = boot_id()
        self._difference_us: int | None = None
        self._checked_us = 0

    def read(self) -> Anchor | None:
        """Return what the last life wrote; None where it wrote nothing that can be read."""
        try:
            return msgspec.json.decode(self._path.read_bytes(), type=Anchor)
        except FileNotFoundError:
            return None
        except (OSError, msgspec.MsgspecError) as error:
            log.warning("%s cannot be read, so the wall clock counts: %s", self._path, error)
            return None

    def keep(self, core_us: int) -> None:
        """Note the core's time of now. The file is written where the difference has changed.

        Args:
            core_us: The core's time.
        """
        if self._difference_us is not None and core_us - self._checked_us < CHECK_US:
            return
        self._checked_us = core_us
        difference_us = uptime_us() - core_us
        if self._difference_us is not None and abs(difference_us - self._difference_us) <= DRIFT_US:
            return
        self._difference_us = difference_us
        part = self._path.with_suffix(".part")
        try:
            part.write_bytes(msgspec.json.encode(Anchor(self._boot_id, difference_us)))
            part.replace(self._path)
        except OSError as error:
            log.warning("%s cannot be written, so the next start believes the wall clock: %s", self._path, error)

    def remove(self) -> None:
        """Nothing is kept any more. Idempotent."""
        self._path.unlink(missing_ok=True)
