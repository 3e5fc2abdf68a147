"""Plays a scenario file on the real core and writes the results under each command.

In a scenario file, `# ` lines are comments, `=> ` lines are the results of the command above them, and every other line
is a command. The runner checks the core's invariants after every command. Commands:

    limits NAME=VALUE ...            first, once; a quota is quota.TENANT=FLOOR:CEILING
    worker NAME BLOCKS               a worker connects and is ready with this many blocks
    worker NAME dies
    client NAME [tenant= rights=RIGHT,... requests_max=]   a client with restricted rights connects
    client NAME leaves
    create S TOKENS [tenant= salt= ttl_ms=]
    append S TOKENS; fork S T ...; remove S ...; info S; tokens S
    submit R TOKENS [max= tenant= on= stop= stream=no salt=]
    cancel R; request R; purge MS; drain; stats
    ref BLOCK HOLDER [generation=]; unref BLOCK HOLDER [generation=]; block BLOCK; explain KIND=WHAT
    turn                             the core schedules and streams
    result NAME [R=TOKEN ...]        the worker returns the result of its oldest step; `error=R` fails a row
    again NAME                       the worker returns the same result once more
    wait MS; show

TOKENS are written 1,2,3. By default, request number n samples 100n, 100n + 1, ... A trailing `by=NAME` names the client
that sends the command.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np

from kvforge.coordinator.core.events import (
    Boot,
    ClientCame,
    ClientGone,
    DropWorker,
    Effect,
    FromClient,
    FromWorker,
    Log,
    ToClient,
    ToWorker,
    Turn,
    WorkerGone,
)
from kvforge.coordinator.core.limits import Quota
from kvforge.coordinator.core.machine import Machine
from kvforge.coordinator.core.rights import EVERY_TENANT, RIGHTS, Access
from kvforge.protocol.messages import (
    ErrorInfo,
    Message,
    ModelInfo,
    RowError,
    Step,
    StepResult,
    WorkerHello,
    WorkerReady,
)
from tests.scenarios.commands import COMMANDS
from tests.scenarios.describing import Names, describe, describe_state
from tools.simulation.limits import make_limits

DEFAULTS: dict[str, Any] = {
    "block_size": 4,
    "sequences_max": 8,
    "blocks_max": 64,
    "blocks_per_sequence_max": 16,
    "lease_us": 0,
}
MODEL = ModelInfo(
    name="model", source="", architecture="any", fingerprint="1", vocab_size=100_000, context_tokens_max=64
)


class Player:
    """A scenario in progress."""

    def __init__(self) -> None:
        self.names = Names()
        self.now_us = 0
        self._settings: dict[str, Any] = {}
        self._machine: Machine | None = None
        self._workers: dict[str, int] = {}
        self._clients: dict[str, int] = {}
        self._steps: dict[str, list[Step]] = {}
        self._last: dict[str, StepResult] = {}
        self._numbers = 0
        self._rid = 0

    @property
    def machine(self) -> Machine:
        """Return the core, created on first use with the limits given so far."""
        if self._machine is None:
            quotas = {
                name[6:]: Quota(floor=int(floor), ceiling=int(ceiling))
                for name, value in self._settings.items()
                if name.startswith("quota.")
                for floor, ceiling in [str(value).split(":")]
            }
            plain = {name: value for name, value in self._settings.items() if not name.startswith("quota.")}
            self._machine = Machine(Boot("boot", b"key", make_limits(**{**DEFAULTS, **plain}, quotas=quotas)), 0)
        return self._machine

    def play(self, line: str) -> list[str]:
        """Run one command and return its results, one per line."""
        verb, *words = line.split()
        self.now_us += 1000
        handler = getattr(self, f"_{verb}", None)
        told = handler(words) if handler is not None else self._command(verb, words)
        if self._machine is not None:
            self._machine.check_invariants()
        return told

    def _apply(self, event: Any) -> list[str]:
        return [line for effect in self.machine.apply(event, self.now_us).effects for line in self._describe(effect)]

    def _describe(self, effect: Effect) -> list[str]:
        if isinstance(effect, ToClient):
            return describe(effect.message, self.names)
        if isinstance(effect, ToWorker):
            name = next(name for name, number in self._workers.items() if number == effect.worker)
            if isinstance(effect.message, Step):
                self._steps[name].append(effect.message)
            return [f"to {name}: {line}" for line in describe(effect.message, self.names)]
        if isinstance(effect, DropWorker):
            return [f"worker dropped: {effect.reason}"]
        assert isinstance(effect, Log)
        return [f"log: {effect.text}"] if effect.level != "info" else []

    # ------------------------------------------------------------------------------------------------------- commands

    def _limits(self, words: list[str]) -> list[str]:
        assert self._machine is None, "`limits` must be the first command"
        for word in words:
            name, _, value = word.partition("=")
            self._settings[name] = int(value) if value.isdigit() else value
        return []

    def _number(self, name: str, known: dict[str, int]) -> int:
        if name not in known:
            self._numbers += 1
            known[name] = self._numbers
        return known[name]

    def _command(self, verb: str, words: list[str]) -> list[str]:
        options = dict(word.split("=", 1) for word in words if "=" in word)
        plain = [word for word in words if "=" not in word]
        client = self._number(options.pop("by", "c"), self._clients)
        if client not in self.machine.clients:
            self._apply(ClientCame(client))
        self._rid += 1
        message: Message = COMMANDS[verb](self._rid, plain, options, self.names)
        return self._apply(FromClient(client, message, entropy=self._rid))

    def _worker(self, words: list[str]) -> list[str]:
        name, what = words
        if what == "dies":
            return self._apply(WorkerGone(self._workers.pop(name)))
        number = self._number(name, self._workers)
        self._steps[name] = []
        ready = WorkerReady(rid=1, model=MODEL, blocks=int(what), bytes_per_block=1, kv_dtype="int8", device="cpu")
        hello = WorkerHello(rid=0, name=name, pid=1)
        return [*self._apply(FromWorker(number, hello)), *self._apply(FromWorker(number, ready))]

    def _client(self, words: list[str]) -> list[str]:
        name, *rest = words
        if rest == ["leaves"]:
            return self._apply(ClientGone(self._clients.pop(name)))
        options = dict(word.split("=", 1) for word in rest)
        rights = tuple(options["rights"].split(",")) if "rights" in options else RIGHTS[:2]
        access = Access(name, options.get("tenant", EVERY_TENANT), rights, int(options.get("requests_max", 0)))
        return self._apply(ClientCame(self._number(name, self._clients), access=access))

    def _turn(self, _words: list[str]) -> list[str]:
        return self._apply(Turn())

    def _wait(self, words: list[str]) -> list[str]:
        self.now_us += int(words[0]) * 1000
        return []

    def _show(self, _words: list[str]) -> list[str]:
        return describe_state(self.machine, self.names)

    def _result(self, words: list[str]) -> list[str]:
        name, *rest = words
        step = self._steps[name].pop(0)
        options = dict(word.split("=") for word in rest)
        failing = options.pop("error", "")
        group = self.machine.workers[self._workers[name]].group
        assert group is not None
        slots, tokens, errors = [], [], []
        for slot in step.slots[step.samples == 1].tolist():
            request = self.names.in_slot(step, slot)
            if request == failing:
                errors.append(RowError(slot, ErrorInfo("worker_error", "the row could not be computed")))
                continue
            slots.append(slot)
            tokens.append(int(options.get(request, self.names.next_token(request))))
        result = StepResult(
            step_id=step.step_id,
            epoch=group.epoch,
            errors=tuple(errors),
            slots=np.array(slots, np.int32),
            tokens=np.array(tokens, np.int32),
            logprobs=np.zeros(len(slots), np.float32),
        )
        self._last[name] = result
        return self._apply(FromWorker(self._workers[name], result))

    def _again(self, words: list[str]) -> list[str]:
        return self._apply(FromWorker(self._workers[words[0]], self._last[words[0]]))


def play_text(text: str) -> str:
    """Return the scenario with the actual results under each command."""
    player = Player()
    lines: list[str] = []
    for line in text.splitlines():
        if line.startswith("=>"):
            continue
        lines.append(line)
        if line.strip() and not line.startswith("#"):
            lines += [f"=> {result}" for result in player.play(line)]
    return "\n".join(lines) + "\n"


def scenario_files() -> list[Path]:
    """Return the paths of all scenarios."""
    return sorted(Path(__file__).parent.glob("*.txt"))
