"""The processes of a chaos run: killed and stopped by it, started again as `kvforge up` would, measured, and ended."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Collection
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from time import monotonic
from typing import Any

from tests.integration.cluster import Cluster

from .misfortunes import COORDINATOR, GATEWAY, KILL, STOP, Misfortune
from .notes import Story
from .sizes import Sample, Span, sample

CLIENT_END_S = 90.0
GATEWAY_END_S = 20.0
LEFT_TAKEN_UP_MAX = 5
ENDS_WITH_S = 30.0  # at most so long after one rank the others end
# A process that has served so long has all that it needs, by its name's first letter: what a worker computes with is
# compiled when it is needed first.
WARM_S = {"c": 5.0, "g": 15.0, "h": 5.0, "w": 10.0, "p": 5.0}
GATEWAY_CONFIG = "drain_s = 3\n"


@dataclass
class Life:
    """One process in a member's place. serves_since: None where it does not yet; ended_by_us: the signals that were
    sent to end it."""

    pid: int
    serves_since: float | None
    ended_by_us: set[int] = field(default_factory=set)
    warm: Sample | None = None
    last: Sample | None = None


@dataclass(frozen=True)
class Absence:
    """A process was stopped for so long that others took it for gone."""

    member: str
    since: float
    until: float


class Processes:
    """Coordinator and workers of a cluster, and client processes. `faults`: ends that nobody asked for."""

    def __init__(
        self,
        cluster: Cluster,
        workers: tuple[str, ...],
        clients: tuple[str, ...],
        client: dict[str, Any],
        together: bool = False,
    ) -> None:
        """client: the options of each client process, as `client` has them. together: the workers are the ranks of one:
        where one of them was struck, the others end too."""
        self._together, self._struck = together, float("-inf")
        self.cluster, self.workers, self.clients = cluster, workers, clients
        self._client = client
        self._popen: dict[str, subprocess.Popen[bytes]] = {}
        self._incarnations = dict.fromkeys(clients, 0)
        self.lives: dict[str, list[Life]] = {}
        self.stopped: dict[str, tuple[float, float]] = {}  # since, until
        self.absences: list[Absence] = []
        self.killed_clients: set[str] = set()  # processes' names
        self.faults: list[str] = []
        self._again: dict[str, float] = {}
        self._down_until: dict[str, float] = {}
        self._kill_at: list[tuple[float, str]] = []
        self._gone_s: float = client["gone_s"]
        # It outlives each gateway: who connects while there is none waits for the next.
        self._listener = socket.create_server(("127.0.0.1", 0), backlog=128)

    # ---------------------------------------------------------------------------------------------------------- lives

    def begin(self, member: str) -> None:
        """The process that the cluster has started in this place."""
        self.lives.setdefault(member, []).append(Life(self._pid(member), None))

    async def gateway_serves(self) -> int | None:
        """The gateway's process where it says that it serves a model: it has read a tokenizer and all that it takes."""
        pid = self.lives[GATEWAY][-1].pid
        reader, writer = await asyncio.open_connection(*self._listener.getsockname()[:2])
        try:
            writer.write(b"GET /health HTTP/1.0\r\n\r\n")
            answer = await reader.readline()
        finally:
            writer.close()
        return pid if b" 200 " in answer else None

    def start_gateway(self) -> None:
        """The first one, and the next in its place."""
        config, listener = self.cluster.folder / "gateway.toml", self._listener.fileno()
        config.write_text(f'runtime_dir = "{self.cluster.runtime}"\n{GATEWAY_CONFIG}')
        command = [sys.executable, "-m", "gateway", "--config", str(config), "--listen", str(listener)]
        with (self.cluster.folder / f"{GATEWAY}.log").open("ab") as log:
            self._popen[GATEWAY] = subprocess.Popen(
                command,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                pass_fds=(listener,),
                env={**os.environ, "TMPDIR": str(self.cluster.folder)},
            )
        self.begin(GATEWAY)

    def start_client(self, member: str) -> None:
        """The next process in a client's place, which takes up what the one before left."""
        before = self._left_behind(member)
        if member in self._popen:
            _close(self._popen[member])
        module = "web" if member.startswith("h") else "client"
        self._incarnations[member] += 1
        name = self.process_name(member)
        folder = self.cluster.folder
        options = {**self._client, "name": name, "notes": str(self.notes(name)), "before": before}
        options["url"] = f"http://127.0.0.1:{self._listener.getsockname()[1]}"
        file = folder / f"{name}.json"
        file.write_text(json.dumps(options))
        with (folder / f"{member}.log").open("ab") as log:
            self._popen[member] = subprocess.Popen(
                [sys.executable, "-m", f"tests.chaos.{module}", str(file)],
                stdin=subprocess.PIPE,
                stdout=log,
                stderr=log,
            )
        self.lives.setdefault(member, []).append(Life(self._popen[member].pid, None))

    def process_name(self, member: str) -> str:
        """Of the present client process in this place."""
        return f"{member}.{self._incarnations[member]}"

    def notes(self, name: str) -> Path:
        """What a client process writes."""
        return self.cluster.folder / f"{name}.notes"

    def stories(self) -> list[Story]:
        """What all client processes wrote, also those that were killed."""
        names = [f"{member}.{i}" for member in self.clients for i in range(1, self._incarnations[member] + 1)]
        return [Story.of(name, self.notes(name)) for name in names]

    def _left_behind(self, member: str) -> list[dict[str, Any]]:
        """Intents that the process before did not bring to an end, and the last of those that it left alone on purpose:
        earlier ones may be forgotten by now."""
        if not self._incarnations[member]:
            return []
        name = self.process_name(member)
        story = Story.of(name, self.notes(name))
        alone = set(sorted(story.left)[:-LEFT_TAKEN_UP_MAX])
        left = []
        for intent in story.intents.values():
            over = intent.settled and all(request_id in story.ended or request_id in alone for request_id in intent.ids)
            if not over and (intent.how == "key" or (intent.how == "detached" and intent.ids)):
                left.append({"name": intent.name, "case": intent.case, "how": intent.how, "ids": intent.ids})
        return left

    # ----------------------------------------------------------------------------------------------------- misfortunes

    def strike(self, misfortune: Misfortune) -> None:
        """Does it. A stopped process goes on, a dead one is started again, by `tend`."""
        now = monotonic()
        if any(member in self.workers for member in misfortune.members):
            self._struck = now
        for member in misfortune.members:
            if misfortune.kind == STOP:
                if member not in self.stopped and self._poll(member) is None:
                    self._signal(member, signal.SIGSTOP)
                    self.stopped[member] = (now, now + misfortune.for_s)
                continue
            number = signal.SIGKILL if misfortune.kind == KILL else signal.SIGTERM
            if self._end(member, number):
                if misfortune.again_s is not None:
                    self._again[member] = misfortune.again_s
                if misfortune.down_s and member != COORDINATOR:
                    self._down_until[member] = now + misfortune.down_s

    def _end(self, member: str, number: signal.Signals) -> bool:
        if self._poll(member) is not None:
            return False
        self.lives[member][-1].ended_by_us.add(number)
        if number == signal.SIGKILL and member in self.clients:
            self.killed_clients.add(self.process_name(member))
        self._signal(member, number)
        return True

    def tend(self) -> None:
        """Does what is due: stopped processes go on, those that have ended are started again."""
        now = monotonic()
        for member, (since, until) in list(self.stopped.items()):
            if now >= until:
                self.resume(member, since)
        for at, member in list(self._kill_at):
            if now >= at:
                self._kill_at.remove((at, member))
                self._end(member, signal.SIGKILL)
        for member in (COORDINATOR, *self.workers, *self._popen):
            status = self._poll(member)
            if status is not None and now >= self._down_until.get(member, now):
                self._revive(member, status)

    def resume(self, member: str, since: float) -> None:
        """A stopped process goes on."""
        del self.stopped[member]
        self._signal(member, signal.SIGCONT)
        now = monotonic()
        if now - since > self._gone_s:
            self.absences.append(Absence(self._who(member), since, now))

    def _revive(self, member: str, status: int) -> None:
        life = self.lives[member][-1]
        self._down_until.pop(member, None)
        since, _ = self.stopped.pop(member, (None, None))
        asked = {-number for number in life.ended_by_us} | ({0} if signal.SIGTERM in life.ended_by_us else set())
        if since is not None or any(absence.member == member for absence in self.absences[-3:]):
            asked.add(-signal.SIGKILL)  # one from which nothing came is replaced
        with_others = self._together and member in self.workers and monotonic() - self._struck < ENDS_WITH_S
        if status not in asked and not with_others:
            self.faults.append(f"{member} (process {life.pid}) ended by itself, status {status}")
        if member == COORDINATOR:
            self.cluster.start_coordinator()
        elif member in self.workers:
            self.cluster.start_worker(member)
        elif member == GATEWAY:
            self.start_gateway()
        else:
            self.start_client(member)
        if member not in self._popen:
            self.begin(member)
        if (again_s := self._again.pop(member, None)) is not None:
            self._kill_at.append((monotonic() + again_s, member))

    def _who(self, member: str) -> str:
        return self.process_name(member) if member in self.clients else member

    def _pid(self, member: str) -> int:
        return self._popen[member].pid if member in self._popen else self.cluster.pid(member)

    def _poll(self, member: str) -> int | None:
        return self._popen[member].poll() if member in self._popen else self.cluster.status(member)

    def _signal(self, member: str, number: signal.Signals) -> None:
        with suppress(ProcessLookupError):
            os.kill(self.lives[member][-1].pid, number)

    # ------------------------------------------------------------------------------------------------------- measuring

    def measure(self) -> None:
        """Looks at the size of each process that runs."""
        now = monotonic()
        for member, lives in self.lives.items():
            life = lives[-1]
            if (size := sample(life.pid)) is None:
                continue
            life.last = size
            if life.warm is None and life.serves_since is not None and now - life.serves_since > WARM_S[member[0]]:
                life.warm = size

    def spans(self, member: str) -> list[Span]:
        """The sizes of the processes in a member's place that lived long enough to be warm."""
        lives = self.lives[member]
        return [Span(life.warm, life.last) for life in lives if life.warm is not None and life.last is not None]

    def serving(self, pids: Collection[int]) -> None:
        """These processes serve; and client processes that have asked for something do what they are there for."""
        now = monotonic()
        for member, lives in self.lives.items():
            asks = member in self.clients and self._has_asked(member)
            if (asks or lives[-1].pid in pids) and lives[-1].serves_since is None:
                lives[-1].serves_since = now

    def _has_asked(self, member: str) -> bool:
        notes = self.notes(self.process_name(member))
        return notes.exists() and notes.stat().st_size > 0

    # ---------------------------------------------------------------------------------------------------------- the end

    def calm(self) -> None:
        """Nothing happens to anybody any more."""
        self._kill_at.clear()
        self._again.clear()
        self._down_until.clear()
        for member, (since, _) in list(self.stopped.items()):
            self.resume(member, since)

    def end_clients(self) -> None:
        """Tells the clients to end; who has not ended by its time hangs, and says in its log where."""
        for member in self.clients:
            _close(self._popen[member])

    def end_gateway(self) -> int:
        """When no client is left. Returns its exit status."""
        self._popen[GATEWAY].terminate()
        return self._popen[GATEWAY].wait(GATEWAY_END_S)

    def clients_ended(self, late: bool) -> bool:
        """Whether all have. late: those that have not are killed."""
        running = {member: self._popen[member] for member in self.clients if self._popen[member].poll() is None}
        if late:
            for member, process in running.items():
                process.send_signal(signal.SIGUSR1)
                self.faults.append(f"{member} hangs: what it waits for is in its log")
        return not running

    def close(self) -> None:
        """Kills the client processes that are left; the cluster ends the others."""
        for process in self._popen.values():
            process.kill()
            process.wait()
            _close(process)
        self._listener.close()


def _close(process: subprocess.Popen[bytes]) -> None:
    """Its input ends."""
    if process.stdin is not None:
        process.stdin.close()
