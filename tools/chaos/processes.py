"""The processes of a chaos run: strikes them, restarts them as `kvforge up` would, measures and ends them."""

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

from tools.cluster.cluster import Cluster

from .interruptions import COORDINATOR, DISK, GATEWAY, KILL, STOP, Interruption
from .notes import ClientNotes
from .sizes import Sample, Span, sample

CLIENT_END_S = 90.0
GATEWAY_END_S = 20.0
LEFT_TAKEN_UP_MAX = 5
ENDS_WITH_S = 30.0  # after one rank ends, the others end within this time
# Serving time after which a process has allocated all it needs (a worker compiles kernels on first use), by the first
# letter of its name.
WARM_S = {"c": 5.0, "g": 15.0, "h": 5.0, "w": 10.0, "p": 5.0}
GATEWAY_CONFIG = "drain_s = 3\n"


@dataclass
class ProcessRun:
    """One process of a member.

    Attributes:
        pid: its process id.
        serves_since: when it started to serve, or None.
        ended_by_us: signals sent to end it.
        warm: its size once warm.
        last: its latest size.
    """

    pid: int
    serves_since: float | None
    ended_by_us: set[int] = field(default_factory=set)
    warm: Sample | None = None
    last: Sample | None = None


@dataclass(frozen=True)
class Suspension:
    """A period for which a process was stopped, long enough that its peers dropped it."""

    member: str
    since: float
    until: float


class Processes:
    """Coordinator, workers, gateway and client processes; `faults` lists unexpected exits."""

    def __init__(
        self,
        cluster: Cluster,
        workers: tuple[str, ...],
        clients: tuple[str, ...],
        client: dict[str, Any],
        together: bool = False,
    ) -> None:
        """Create the records; `begin` adds running processes.

        Args:
            cluster: coordinator and workers.
            workers: names of the worker processes.
            clients: names of the client processes.
            client: options of each client process, see `client`.
            together: the workers are ranks of one worker; when one is struck, the others exit too.
        """
        self._together, self._struck = together, float("-inf")
        self.cluster, self.workers, self.clients = cluster, workers, clients
        self._client = client
        self._popen: dict[str, subprocess.Popen[bytes]] = {}
        self._incarnations = dict.fromkeys(clients, 0)
        self.lives: dict[str, list[ProcessRun]] = {}
        self.stopped: dict[str, tuple[float, float]] = {}  # since, until
        self.absences: list[Suspension] = []
        self.drains: list[Suspension] = []  # of gateways that were asked to end
        self.killed_clients: set[str] = set()  # process names
        self.faults: list[str] = []
        self.disks_killed = 0
        self._again: dict[str, float] = {}
        self._down_until: dict[str, float] = {}
        self._kill_at: list[tuple[float, str]] = []
        self._gone_s: float = client["gone_s"]
        # The socket outlives each gateway: connections made while none runs wait for the next one.
        self._listener = socket.create_server(("127.0.0.1", 0), backlog=128)

    # ------------------------------------------------------------------------------------------------- life cycle

    def begin(self, member: str) -> None:
        """Record the process that the cluster has started for this member."""
        self.lives.setdefault(member, []).append(ProcessRun(self._pid(member), None))

    async def gateway_serves(self) -> int | None:
        """Return the gateway's process id once it serves a model, that is, has loaded a tokenizer; else None."""
        pid = self.lives[GATEWAY][-1].pid
        reader, writer = await asyncio.open_connection(*self._listener.getsockname()[:2])
        try:
            writer.write(b"GET /health HTTP/1.0\r\n\r\n")
            answer = await reader.readline()
        finally:
            writer.close()
        return pid if b" 200 " in answer else None

    def start_gateway(self) -> None:
        """Start the gateway, or its replacement."""
        config, listener = self.cluster.folder / "gateway.toml", self._listener.fileno()
        config.write_text(f'runtime_dir = "{self.cluster.runtime}"\n{GATEWAY_CONFIG}')
        command = [sys.executable, "-m", "kvforge.gateway", "--config", str(config), "--listen", str(listener)]
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
        """Start the next process of a client; it resumes the unfinished intents of the previous one."""
        before = self._left_behind(member)
        if member in self._popen:
            _close(self._popen[member])
        module = "http_client" if member.startswith("h") else "client"
        self._incarnations[member] += 1
        name = self.process_name(member)
        folder = self.cluster.folder
        options = {**self._client, "name": name, "notes": str(self.notes(name)), "before": before}
        options["url"] = f"http://127.0.0.1:{self._listener.getsockname()[1]}"
        file = folder / f"{name}.json"
        file.write_text(json.dumps(options))
        with (folder / f"{member}.log").open("ab") as log:
            self._popen[member] = subprocess.Popen(
                [sys.executable, "-m", f"tools.chaos.{module}", str(file)],
                stdin=subprocess.PIPE,
                stdout=log,
                stderr=log,
            )
        self.lives.setdefault(member, []).append(ProcessRun(self._popen[member].pid, None))

    def process_name(self, member: str) -> str:
        """Return the name of the member's current client process."""
        return f"{member}.{self._incarnations[member]}"

    def notes(self, name: str) -> Path:
        """Return the path of a client process's notes."""
        return self.cluster.folder / f"{name}.notes"

    def stories(self) -> list[ClientNotes]:
        """Return the notes of all client processes, killed ones included."""
        names = [f"{member}.{i}" for member in self.clients for i in range(1, self._incarnations[member] + 1)]
        return [ClientNotes.of(name, self.notes(name)) for name in names]

    def _left_behind(self, member: str) -> list[dict[str, Any]]:
        """Return the intents that the previous process did not finish, and the latest ones that it left detached.

        The coordinator may have evicted earlier detached requests.
        """
        if not self._incarnations[member]:
            return []
        name = self.process_name(member)
        story = ClientNotes.of(name, self.notes(name))
        alone = set(sorted(story.left)[:-LEFT_TAKEN_UP_MAX])
        left = []
        for intent in story.intents.values():
            over = intent.settled and all(request_id in story.ended or request_id in alone for request_id in intent.ids)
            if not over and (intent.how == "key" or (intent.how == "detached" and intent.ids)):
                left.append({"name": intent.name, "case": intent.case, "how": intent.how, "ids": intent.ids})
        return left

    # -------------------------------------------------------------------------------------------------- interruptions

    def strike(self, interruption: Interruption) -> None:
        """Apply a fault; `tend` later resumes stopped processes and restarts dead ones."""
        now = monotonic()
        if any(member in self.workers for member in interruption.members):
            self._struck = now
        for member in interruption.members:
            if member.endswith(DISK):
                self._kill_disk(member.removesuffix(DISK))
                continue
            if interruption.kind == STOP:
                if member not in self.stopped and self._poll(member) is None:
                    self._signal(member, signal.SIGSTOP)
                    self.stopped[member] = (now, now + interruption.for_s)
                continue
            number = signal.SIGKILL if interruption.kind == KILL else signal.SIGTERM
            if self._end(member, number):
                if interruption.again_s is not None:
                    self._again[member] = interruption.again_s
                if interruption.down_s and member != COORDINATOR:
                    self._down_until[member] = now + interruption.down_s

    def _end(self, member: str, number: signal.Signals) -> bool:
        if self._poll(member) is not None:
            return False
        self.lives[member][-1].ended_by_us.add(number)
        if member == GATEWAY and number == signal.SIGTERM:  # what still runs after its drain is cut off
            self.drains.append(Suspension(member, monotonic(), monotonic() + GATEWAY_END_S))
        if number == signal.SIGKILL and member in self.clients:
            self.killed_clients.add(self.process_name(member))
        self._signal(member, number)
        return True

    def _kill_disk(self, worker: str) -> None:
        """Kill the process that copies for a worker's disk tier: the worker goes on without the tier."""
        if self._poll(worker) is not None:
            return
        for pid in copying_processes(self.lives[worker][-1].pid):
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
                self.disks_killed += 1

    def tend(self) -> None:
        """Resume stopped processes in time, make the scheduled kills, and restart ended processes."""
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
        """Resume a stopped process."""
        del self.stopped[member]
        self._signal(member, signal.SIGCONT)
        now = monotonic()
        if now - since > self._gone_s:
            self.absences.append(Suspension(self._process_of(member), since, now))

    def _revive(self, member: str, status: int) -> None:
        life = self.lives[member][-1]
        self._down_until.pop(member, None)
        since, _ = self.stopped.pop(member, (None, None))
        asked = {-number for number in life.ended_by_us} | ({0} if signal.SIGTERM in life.ended_by_us else set())
        if since is not None or any(absence.member == member for absence in self.absences[-3:]):
            asked.add(-signal.SIGKILL)  # an unresponsive process is killed and replaced
        with_others = self._together and member in self.workers and monotonic() - self._struck < ENDS_WITH_S
        if status not in asked and not with_others:
            self.faults.append(f"{member} (process {life.pid}) exited unexpectedly with status {status}")
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

    def _process_of(self, member: str) -> str:
        return self.process_name(member) if member in self.clients else member

    def _pid(self, member: str) -> int:
        return self._popen[member].pid if member in self._popen else self.cluster.pid(member)

    def _poll(self, member: str) -> int | None:
        return self._popen[member].poll() if member in self._popen else self.cluster.status(member)

    def _signal(self, member: str, number: signal.Signals) -> None:
        with suppress(ProcessLookupError):
            os.kill(self.lives[member][-1].pid, number)

    # -------------------------------------------------------------------------------------------------------- measuring

    def measure(self) -> None:
        """Sample the size of each running process."""
        now = monotonic()
        for member, lives in self.lives.items():
            life = lives[-1]
            if (size := sample(life.pid)) is None:
                continue
            life.last = size
            if life.warm is None and life.serves_since is not None and now - life.serves_since > WARM_S[member[0]]:
                life.warm = size

    def spans(self, member: str) -> list[Span]:
        """Return the sizes of the member's processes that lived long enough to be warm."""
        lives = self.lives[member]
        return [Span(life.warm, life.last) for life in lives if life.warm is not None and life.last is not None]

    def serving(self, pids: Collection[int]) -> None:
        """Record that these processes serve; a client process serves once it has submitted a request."""
        now = monotonic()
        for member, lives in self.lives.items():
            asks = member in self.clients and self._has_notes(member)
            if (asks or lives[-1].pid in pids) and lives[-1].serves_since is None:
                lives[-1].serves_since = now

    def _has_notes(self, member: str) -> bool:
        notes = self.notes(self.process_name(member))
        return notes.exists() and notes.stat().st_size > 0

    # --------------------------------------------------------------------------------------------------------- the end

    def calm(self) -> None:
        """Cancel all scheduled kills and delayed restarts."""
        self._kill_at.clear()
        self._again.clear()
        self._down_until.clear()
        for member, (since, _) in list(self.stopped.items()):
            self.resume(member, since)

    def end_clients(self) -> None:
        """Close the clients' input, which ends them; a client that misses its deadline logs where it hangs."""
        for member in self.clients:
            _close(self._popen[member])

    def end_gateway(self) -> int:
        """Terminate the gateway after the last client and return its exit status."""
        self._popen[GATEWAY].terminate()
        return self._popen[GATEWAY].wait(GATEWAY_END_S)

    def clients_ended(self, late: bool) -> bool:
        """Return whether all clients have ended; with `late`, kill the others."""
        running = {member: self._popen[member] for member in self.clients if self._popen[member].poll() is None}
        if late:
            for member, process in running.items():
                process.send_signal(signal.SIGUSR1)
                self.faults.append(f"{member} hangs: its log shows the stack")
        return not running

    def close(self) -> None:
        """Kill the remaining client processes; the cluster ends the others."""
        for process in self._popen.values():
            process.kill()
            process.wait()
            _close(process)
        self._listener.close()


def copying_processes(worker: int) -> list[int]:
    """Return the processes that copy for the disk tier of a worker process: its children of that name."""
    found = []
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            with suppress(OSError, IndexError, ValueError):
                parent = int((entry / "stat").read_text().rpartition(") ")[2].split()[1])
                if parent == worker and b"kvforge.worker.disk.copying" in (entry / "cmdline").read_bytes():
                    found.append(int(entry.name))
    return found


def _close(process: subprocess.Popen[bytes]) -> None:
    """Close the process's input."""
    if process.stdin is not None:
        process.stdin.close()
