"""From a seed to an outcome; from a failing outcome to a short scenario."""

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

from tools.simulation.actions import Action, Drawer, text
from tools.simulation.draws import Draws
from tools.simulation.replay import Left
from tools.simulation.settings import Settings, draw_settings, with_crashes, with_kinds, with_ranks, with_standstills
from tools.simulation.shrink import shrink
from tools.simulation.world import FULL_CHECK_EVERY, World

SHRINK_RUNS_MAX = 400
NO_LIMIT = 1 << 60
# A world's files end with it: they are kept in memory where there is a folder for that, and no disk is waited for.
_MEMORY = "/dev/shm"
FOLDERS = _MEMORY if os.access(_MEMORY, os.W_OK) else None


class Outcome(msgspec.Struct):
    """How one seed went. `error` is empty where all promises were kept."""

    seed: int
    events: int
    error: str
    where: str
    settings: Settings
    actions: list[Action]


def drawn(seed: int) -> tuple[Settings, Drawer]:
    """The world and the actions of a seed."""
    settings = with_crashes(draw_settings(Random(f"settings/{seed}")), Random(f"crashes/{seed}"))
    settings = with_ranks(with_kinds(settings, Random(f"kinds/{seed}")), Random(f"ranks/{seed}"))
    settings = with_standstills(settings, Random(f"stands/{seed}"))
    return settings, Drawer(settings, Draws(f"actions/{seed}"), Draws(f"deaths/{seed}"))


def run_seed(seed: int, events: int, check_every: int = FULL_CHECK_EVERY) -> Outcome:
    """Runs a seed for about `events` events and to its end."""
    settings, drawer = drawn(seed)
    return play(seed, settings, drawer.actions(), events, check_every)


def play(
    seed: int, settings: Settings, actions: Iterable[Action], events: int, check_every: int = FULL_CHECK_EVERY
) -> Outcome:
    """Runs a scenario. Whatever is raised is a failure of the system (or of the simulator) and becomes the outcome."""
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
    """Everything a seed does, with the digest of the machine after each turn."""
    settings, drawer = drawn(seed)
    with tempfile.TemporaryDirectory(dir=FOLDERS) as folder:
        world = World(settings, str(seed), Path(folder))
        world.trace = []
        try:
            world.run(drawer.actions(), events)
        except Exception as problem:  # noqa: BLE001 - the trace ends where the failure is
            world.trace.append(f"{type(problem).__name__}: {problem}\n{traceback.format_exc(limit=-8)}")
        finally:
            world.close()
        return world.trace


def digest_seed(seed: int, events: int) -> str:
    """One digest of all that leaves the core in a seed's world, however the core is built."""
    settings, drawer = drawn(seed)
    with _quiet(), tempfile.TemporaryDirectory(dir=FOLDERS) as folder:
        world = World(settings, str(seed), Path(folder))
        world.recording = left = Left()
        try:
            world.run(drawer.actions(), events)
            return left.over(world.coordinator.tables)
        finally:
            world.close()


@contextmanager
def collected_at_their_end() -> Iterator[None]:
    """A world is one large cycle with files open: it is collected after its end, not in the middle of its life."""
    gc.collect()
    gc.freeze()
    gc.disable()
    try:
        yield
    finally:
        gc.enable()
        gc.unfreeze()


@contextmanager
def _quiet() -> Iterator[None]:
    """The coordinator logs nothing that is less than critical; afterwards it logs as before."""
    logger = logging.getLogger("coordinator")
    level = logger.level
    logger.setLevel(logging.CRITICAL)
    try:
        yield
    finally:
        logger.setLevel(level)


def shrunk(outcome: Outcome) -> list[Action]:
    """A short list of actions that still fails in the same way: with the same words, whatever the numbers."""
    words = _words(outcome.error)

    def fails(actions: list[Action]) -> bool:
        return _words(play(outcome.seed, outcome.settings, actions, NO_LIMIT).error) == words

    return shrink(outcome.actions, fails, SHRINK_RUNS_MAX)


def _words(error: str) -> str:
    return re.sub(r"[^a-z ]+", "", error)[:60]


def shrunk_text(outcome: Outcome, _events: int = 0) -> str:
    """The short scenario, its world and its failure, for people."""
    actions = shrunk(outcome)
    last = play(outcome.seed, outcome.settings, actions, NO_LIMIT)
    differs = {
        field: value
        for field, value in msgspec.structs.asdict(outcome.settings).items()
        if value != getattr(Settings(), field)
    }
    lines = [f"world: {differs}", f"{len(actions)} of {len(outcome.actions)} actions are enough:"]
    return "\n".join([*lines, *("  " + text(action) for action in actions), "", last.error, "", last.where])
