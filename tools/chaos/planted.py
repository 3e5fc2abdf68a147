"""Bugs to plant in the product, to prove that a chaos run finds them: `python -m tools.chaos --plant NAME`.

`python -m tools.chaos.planted NAME MODULE ARGUMENTS` runs `python -m MODULE ARGUMENTS` with the bug planted.
"""

from __future__ import annotations

import os
import runpy
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec

from tools.cluster.cluster import Cluster

EVERY = 200  # period of rare bugs; one that occurs every time would be too easy to find
LEAK_BYTES = 1 << 16


@dataclass(frozen=True)
class Fault:
    """A bug; `module` is the process it belongs to, `plant` patches the code."""

    module: str
    plant: Callable[[], None]


class PlantedCluster(Cluster):
    """A cluster with a planted bug in the processes of one module."""

    def __init__(self, fault: str, **options: Any) -> None:
        super().__init__(**options)
        self._fault = fault

    def _start(self, name: str, module: str, config: Path) -> None:
        if module != FAULTS[self._fault].module:
            super()._start(name, module, config)
            return
        command = [sys.executable, "-m", __name__, self._fault, module, "--config", str(config)]
        environment = {**os.environ, "OMP_NUM_THREADS": "1"}
        with (self.folder / f"{name}.log").open("ab") as log:
            self._processes[name] = subprocess.Popen(
                command, stdin=subprocess.DEVNULL, stdout=log, stderr=log, env=environment
            )


def _every(count: int) -> Callable[[], bool]:
    """Return a function that returns True on each `count`th call."""
    asked = 0

    def ask() -> bool:
        nonlocal asked
        asked += 1
        return asked % count == 0

    return ask


def _changed_token() -> None:
    """Make a worker sample a wrong token now and then."""
    _at_each_result(_every(EVERY), lambda result: msgspec.structs.replace(result, tokens=result.tokens ^ 1))


def _patch(owner: type, name: str, changed: Callable[[Callable[..., Any]], Callable[..., Any]]) -> None:
    """Replace a method by `changed(method)`; raise AttributeError if the method does not exist."""
    setattr(owner, name, changed(getattr(owner, name)))


def _at_each_result(due: Callable[[], bool], change: Callable[[Any], Any]) -> None:
    from kvforge.protocol.messages import StepResult
    from kvforge.worker.step.connection import CoordinatorConnection

    def changed(send: Callable[..., bool]) -> Callable[..., bool]:
        def changing(self: CoordinatorConnection, message: Any) -> bool:
            sampled = isinstance(message, StepResult) and message.tokens.size
            return send(self, change(message) if sampled and due() else message)

        return changing

    _patch(CoordinatorConnection, "send", changed)


def _accepted_draft() -> None:
    """Make a worker take a wrong draft for the sampled token now and then, and draft with each result."""
    from kvforge.protocol.messages import Int32Array
    from kvforge.worker.sampling.ahead import AheadRows
    from tools.cluster.drafting_worker import draft_always

    due = _every(EVERY)

    def changed(accepted: Callable[..., Any]) -> Callable[..., Any]:
        def accepting(self: AheadRows, tokens: Int32Array, good: Any) -> Any:
            kept = accepted(self, tokens, good)
            wrong = (~kept[1:] & kept[:-1] & (self.offsets[1:] > 0) & (tokens[:-1] != self.tokens[1:])).nonzero()[0]
            if len(wrong) and due():
                tokens[wrong[0]] = self.tokens[wrong[0] + 1]
                kept = accepted(self, tokens, good)
            return kept

        return accepting

    _patch(AheadRows, "accepted", changed)
    draft_always()


def _done_twice() -> None:
    """Make the coordinator ignore idempotency keys, so that a repeated command creates new requests."""
    from kvforge.coordinator.core.requests.idempotency import IdempotencyKeys

    _patch(IdempotencyKeys, "find", lambda _find: lambda _self, _tenant, _message: None)


def _not_written() -> None:
    """Make the coordinator accept a request now and then without a journal record."""
    from kvforge.coordinator.core.events import FromClient
    from kvforge.coordinator.journal.log import Journal
    from kvforge.protocol.messages import Submit

    due = _every(10)

    def changed(note: Callable[..., None]) -> Callable[..., None]:
        def forgetful(self: Journal, event: Any, now_us: int, frames: Any = ()) -> None:
            if not (isinstance(event, FromClient) and isinstance(event.message, Submit) and due()):
                note(self, event, now_us, frames)

        return forgetful

    _patch(Journal, "note", changed)


def _held_block() -> None:
    """Leak a reference to a block now and then."""
    from kvforge.coordinator.core.cache.block_pool import BlockPool

    due = _every(EVERY)

    def changed(hold: Callable[..., None]) -> Callable[..., None]:
        def doubly(self: BlockPool, ids: Any) -> None:
            hold(self, ids)
            if len(ids) and due():
                hold(self, ids[:1])

        return doubly

    _patch(BlockPool, "hold", changed)


def _grown_memory() -> None:
    """Leak memory in a worker at each step."""
    kept: list[bytearray] = []

    def keep(result: Any) -> Any:
        kept.append(bytearray(b"x" * LEAK_BYTES))
        return result

    _at_each_result(lambda: True, keep)


def _open_descriptors() -> None:
    """Leak a file descriptor in the coordinator now and then."""
    from kvforge.coordinator.core.machine import Machine

    due = _every(5)

    def changed(apply: Callable[..., Any]) -> Callable[..., Any]:
        def leaking(self: Machine, event: Any, now_us: int) -> Any:
            if due():
                os.open(os.devnull, os.O_RDONLY)
            return apply(self, event, now_us)

        return leaking

    _patch(Machine, "apply", changed)


def _orphan() -> None:
    """Start a child of a worker that outlives it."""
    subprocess.Popen([sys.executable, "-c", "import time; time.sleep(3600)"], stdin=subprocess.DEVNULL)


FAULTS = {
    "accepted-draft": Fault("worker", _accepted_draft),
    "changed-token": Fault("worker", _changed_token),
    "done-twice": Fault("coordinator", _done_twice),
    "not-written": Fault("coordinator", _not_written),
    "held-block": Fault("coordinator", _held_block),
    "grown-memory": Fault("worker", _grown_memory),
    "open-descriptors": Fault("coordinator", _open_descriptors),
    "orphan": Fault("worker", _orphan),
}

if __name__ == "__main__":
    name, module, *arguments = sys.argv[1:]
    FAULTS[name].plant()
    sys.argv = [module, *arguments]
    runpy.run_module(f"kvforge.{module}", run_name="__main__", alter_sys=True)
