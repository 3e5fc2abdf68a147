"""Runs a seed to an outcome, and shrinks a failure to a short scenario."""

from __future__ import annotations

import gc
import logging
import os
import re
import tempfile
import traceback
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from random import Random

import msgspec

from tools.simulation.actions import Action, ActionDrawer, text
from tools.simulation.draws import Draws
from tools.simulation.replay import OutputDigest
from tools.simulation.settings import (
    BATCHES_SHARE,
    DISKS_SHARE,
    DRAFTS_SHARE,
    HOSTS_SHARE,
    STATES_SHARE,
    WINDOWS_SHARE,
    Settings,
    draw_settings,
    with_batches,
    with_crashes,
    with_disks,
    with_drafts,
    with_hosts,
    with_kinds,
    with_ranks,
    with_standstills,
    with_states,
    with_windows,
)
from tools.simulation.shrink import shrink
from tools.simulation.world import FULL_CHECK_EVERY, World

SHRINK_RUNS_MAX = 400
NO_LIMIT = 1 << 60
# Worlds keep their files in memory where possible, so that no disk access slows them down.
_MEMORY = "/dev/shm"
FOLDERS = _MEMORY if os.access(_MEMORY, os.W_OK) else None


class Outcome(msgspec.Struct):
    """The result of one seed; `error` is empty if all promises were kept."""

    seed: int
    events: int
    error: str
    where: str
    settings: Settings
    actions: list[Action]


def drawn(
    seed: int,
    states: float = STATES_SHARE,
    windows: float = WINDOWS_SHARE,
    drafts: float = DRAFTS_SHARE,
    hosts: float = HOSTS_SHARE,
    disks: float = DISKS_SHARE,
    batches: float = BATCHES_SHARE,
) -> tuple[Settings, ActionDrawer]:
    """Return the settings and the action drawer of a seed.

    Args:
        seed: the seed.
        states: the share of models with a recurrent state.
        windows: the share of models with layers that have a sliding window.
        drafts: the share of worlds in which workers propose drafts.
        hosts: the share of worlds in which workers have host files.
        disks: the share of those in which workers have disk tiers too.
        batches: the share of worlds in which most requests are of batches.
    """
    settings = with_crashes(draw_settings(Random(f"settings/{seed}")), Random(f"crashes/{seed}"))
    settings = with_ranks(with_kinds(settings, Random(f"kinds/{seed}")), Random(f"ranks/{seed}"))
    settings = with_standstills(settings, Random(f"stands/{seed}"))
    settings = with_states(settings, Random(f"states/{seed}"), states)
    settings = with_windows(settings, Random(f"windows/{seed}"), windows)
    settings = with_drafts(settings, Random(f"drafts/{seed}"), drafts)
    settings = with_hosts(settings, Random(f"hosts/{seed}"), hosts)
    settings = with_disks(settings, Random(f"disks/{seed}"), disks)
    settings = with_batches(settings, Random(f"batches/{seed}"), batches)
    return settings, ActionDrawer(settings, Draws(f"actions/{seed}"), Draws(f"deaths/{seed}"))


def run_seed(
    seed: int,
    events: int,
    check_every: int = FULL_CHECK_EVERY,
    states: float = STATES_SHARE,
    windows: float = WINDOWS_SHARE,
    drafts: float = DRAFTS_SHARE,
    hosts: float = HOSTS_SHARE,
    disks: float = DISKS_SHARE,
    batches: float = BATCHES_SHARE,
) -> Outcome:
    """Run a seed for about `events` events and to its end; the shares are as in `drawn`."""
    settings, drawer = drawn(seed, states, windows, drafts, hosts, disks, batches)
    return play(seed, settings, drawer.actions(), events, check_every)


def play(
    seed: int, settings: Settings, actions: Iterable[Action], events: int, check_every: int = FULL_CHECK_EVERY
) -> Outcome:
    """Run a scenario; any exception, of the system or the simulator, becomes the outcome's error."""
    performed: list[Action] = []

    def recorded() -> Iterable[Action]:
        for action in actions:
            performed.append(action)
            yield action

    with _quiet(), tempfile.TemporaryDirectory(dir=FOLDERS) as folder:
        world = World(settings, str(seed), Path(folder), check_every)
        error = where = ""
        try:
            world.run(recorded(), events)
        except Exception as problem:  # noqa: BLE001 - any exception is a finding
            error = f"{type(problem).__name__}: {problem}"
            where = "".join(traceback.format_exc(limit=-6))
        finally:
            world.close()
    count = world.events
    del world
    if not gc.isenabled():
        gc.collect()
    return Outcome(seed, count, error, where, settings, performed)


def trace_seed(seed: int, events: int) -> list[str]:
    """Return a trace of a seed's events, with the machine's digest after each turn."""
    settings, drawer = drawn(seed)
    with tempfile.TemporaryDirectory(dir=FOLDERS) as folder:
        world = World(settings, str(seed), Path(folder))
        world.trace = []
        try:
            world.run(drawer.actions(), events)
        except Exception as problem:  # noqa: BLE001 - the trace ends at the failure
            world.trace.append(f"{type(problem).__name__}: {problem}\n{traceback.format_exc(limit=-8)}")
        finally:
            world.close()
        return world.trace


def digest_seed(seed: int, events: int, windows: float = WINDOWS_SHARE, hosts: float = HOSTS_SHARE) -> str:
    """Return one digest of all that leaves the core in a seed's world, independent of the core's structure.

    Args:
        seed: the seed.
        events: about how many events to run.
        windows: as in `drawn`.
        hosts: as in `drawn`.
    """
    settings, drawer = drawn(seed, windows=windows, hosts=hosts)
    with _quiet(), tempfile.TemporaryDirectory(dir=FOLDERS) as folder:
        world = World(settings, str(seed), Path(folder))
        world.recording = left = OutputDigest()
        try:
            world.run(drawer.actions(), events)
            return left.over(world.coordinator.tables)
        finally:
            world.close()


@contextmanager
def collected_at_their_end() -> Iterator[None]:
    """Collect each world, a large cycle with open files, after its end and not during its life."""
    frozen = gc.get_freeze_count()  # by the process around it: a thaw would let later collections walk it all
    gc.collect()
    gc.freeze()
    gc.disable()
    try:
        yield
    finally:
        gc.enable()
        if not frozen:
            gc.unfreeze()


@contextmanager
def _quiet() -> Iterator[None]:
    """Suppress the coordinator's log entries below critical inside the block."""
    logger = logging.getLogger("coordinator")
    level = logger.level
    logger.setLevel(logging.CRITICAL)
    try:
        yield
    finally:
        logger.setLevel(level)


def shrunk(outcome: Outcome) -> list[Action]:
    """Return a short list of actions that fails with the same words, whatever the numbers."""
    words = _words(outcome.error)

    def fails(actions: list[Action]) -> bool:
        return _words(play(outcome.seed, outcome.settings, actions, NO_LIMIT).error) == words

    return shrink(outcome.actions, fails, SHRINK_RUNS_MAX)


def _words(error: str) -> str:
    return re.sub(r"[^a-z ]+", "", error)[:60]


def shrunk_text(outcome: Outcome, _events: int = 0) -> str:
    """Return the short scenario, its world and its failure as text."""
    actions = shrunk(outcome)
    last = play(outcome.seed, outcome.settings, actions, NO_LIMIT)
    differs = {
        field: value
        for field, value in msgspec.structs.asdict(outcome.settings).items()
        if value != getattr(Settings(), field)
    }
    lines = [f"world: {differs}", f"{len(actions)} of {len(outcome.actions)} actions suffice:"]
    return "\n".join([*lines, *("  " + text(action) for action in actions), "", last.error, "", last.where])
