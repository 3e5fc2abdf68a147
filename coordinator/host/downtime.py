"""The time without a coordinator between two processes, independent of changes to the wall clock.

While it serves, a coordinator keeps the difference between the host's boot clock (CLOCK_BOOTTIME, which cannot be set)
and the core's time in the file `clock` of its state folder. In the same boot of the host, the next process computes
the exact time away from it. After a reboot there is only the wall clock, which may have been set: the time away is at
least the host's uptime, and at most `journal.away_s_max` more.
"""

from __future__ import annotations

import logging
import time
from pathlib import Path
from typing import NamedTuple

import msgspec

CLOCK_FILE = "clock"
CHECK_US = 1_000_000  # how often the difference is checked
DRIFT_US = 100_000  # a larger change is written: after a process or host was suspended
_BOOT_ID = Path("/proc/sys/kernel/random/boot_id")
log = logging.getLogger("coordinator")


class HostTime(NamedTuple):
    """One moment, as the host measures it.

    Attributes:
        boot_id: Identifies the boot of the host; "" if the system does not provide it.
        uptime_us: Microseconds since boot.
        wall_s: Unix time.
    """

    boot_id: str
    uptime_us: int
    wall_s: float


class Anchor(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The difference between the host's uptime and the core's time, in microseconds, in one boot of the host."""

    boot_id: str
    difference_us: int


def boot_id() -> str:
    """Return the id of the host's present boot; "" if the system does not provide it."""
    try:
        return _BOOT_ID.read_text(encoding="ascii").strip()
    except (OSError, UnicodeDecodeError):
        return ""


def uptime_us() -> int:
    """Return the time since the host's boot in microseconds, with the time in which it was suspended."""
    return time.clock_gettime_ns(time.CLOCK_BOOTTIME) // 1000


def host_time() -> HostTime:
    """Return the present time."""
    return HostTime(boot_id(), uptime_us(), time.time())


def downtime_us(anchor: Anchor | None, last_us: int, written_s: float, now: HostTime, away_s_max: float) -> int:
    """Compute for how long no coordinator was running.

    Args:
        anchor: The anchor that the last process wrote, or None.
        last_us: The core's time of its last event.
        written_s: When its journal was last written, by the wall clock at that time.
        now: The present time.
        away_s_max: After a reboot, the wall clock counts for at most this much beyond the uptime.

    Returns:
        Microseconds, at least 0.
    """
    if anchor is not None and anchor.boot_id and anchor.boot_id == now.boot_id:
        return max(0, now.uptime_us - anchor.difference_us - last_us)
    wall_us = int((now.wall_s - written_s) * 1e6)
    most_us = int(away_s_max * 1e6)
    if anchor is not None and anchor.boot_id and now.boot_id:  # the host has rebooted
        least_us = now.uptime_us
    else:
        least_us = 0
    found_us = min(max(wall_us, least_us), least_us + most_us)
    if found_us != wall_us:
        log.warning(
            "the wall clock shows %.0f s without a coordinator; counting %.0f s (journal.away_s_max)",
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
        """Return the anchor of the last process; None if there is none that can be read."""
        try:
            return msgspec.json.decode(self._path.read_bytes(), type=Anchor)
        except FileNotFoundError:
            return None
        except (OSError, msgspec.MsgspecError) as error:
            log.warning("%s cannot be read, so the wall clock is used: %s", self._path, error)
            return None

    def keep(self, core_us: int) -> None:
        """Record the present time of the core. The file is written only if the difference has changed.

        Args:
            core_us: The core's time in microseconds.
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
            log.warning("%s cannot be written, so the next start will use the wall clock: %s", self._path, error)

    def remove(self) -> None:
        """Remove the file. Idempotent."""
        self._path.unlink(missing_ok=True)
