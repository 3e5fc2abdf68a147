"""`kvforge up`: runs a coordinator and its workers in the foreground, and restarts them when they die.

A single loop without threads polls the children's output and the signals' descriptor. No child outlives it: children
are stopped, then killed, and leashed (`leash.py`) in case this process is killed. Their configuration files live in a
folder of the runtime folder that is locked while it runs and removed at the end.
"""

from __future__ import annotations

import signal
import socket
import urllib.request
from collections.abc import Callable
from functools import partial
from pathlib import Path
from types import TracebackType
from typing import Self

from kvforge.client.blocking import Client
from kvforge.process.ending import Interrupted, Stopped
from kvforge.process.signals import Signals
from kvforge.protocol import transport
from kvforge.protocol.errors import DeadlineExceeded, InvalidConfiguration, KvforgeError, Unavailable
from kvforge.protocol.exits import FAILED, UNAVAILABLE, USAGE
from kvforge.protocol.messages import Health
from kvforge.protocol.readiness import readable
from kvforge.protocol.steady_clock import monotonic

from .child import Child
from .console import ConsoleReporter
from .listener import listening, url_of
from .private_folder import KEY_HASHES, PrivateFolder
from .settings import Http, Settings
from .watchdog import ChildWatchdog

ENTRY = Path(__file__).parent / "entry.py"
ASK_TIMEOUT_S = 0.5
ASK_CONNECT_S = 0.1
TURN_S = 1.0
STARTING_TURN_S = 0.1
KILL_S = 5.0
WATCHDOG_S = 20.0  # as in deploy/
UNSERVED_STOP_S = 3.0
OK_STATUS = 200


class Supervisor:
    """Runs one installation while entered. Call `turn` often; it waits no longer than its argument."""

    def __init__(self, settings: Settings, signals: Signals, console: ConsoleReporter) -> None:
        """Prepare the installation.

        Args:
            settings: The settings.
            signals: The signals of this process.
            console: Reports events, and the children's output unless `settings.log_dir` is set.
        """
        self.settings = settings
        self.endpoint = transport.client_endpoint(settings.runtime_dir)
        self._signals = signals
        self._console, self._print_line = console, console.print_line
        self._folder = PrivateFolder(settings.runtime_dir)
        self._client: Client | None = None
        self.coordinator: Child | None = None
        self.workers: list[Child] = []  # every rank of every worker
        self._worker_of: dict[str, str] = {}
        self.gateway: Child | None = None
        self._listener: socket.socket | None = None

    def __enter__(self) -> Self:
        self._folder.claim()
        try:
            settings = self.settings
            if settings.log_dir is not None:
                _make_log_dir(settings.log_dir)
            once = ("--fresh",) if settings.fresh else ()
            config = settings.coordinator_file()
            self.coordinator = self._child("coordinator", "kvforge.coordinator", config, WATCHDOG_S, once)
            for process in range(settings.processes):
                name = settings.process_name(process)
                self._worker_of[name] = settings.worker_of(process)
                config, watchdog_s = settings.worker_file(process), settings.worker_watchdog_s
                self.workers.append(self._child(name, settings.worker_module, config, watchdog_s))
            if settings.http is not None:
                self.gateway = self._make_gateway(settings.http)
            for child in self.children:
                child.start()
        except BaseException:
            self._end(at_once=True)
            raise
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self._end(at_once=False)

    @property
    def children(self) -> list[Child]:
        """Return the coordinator, then the workers, then the gateway."""
        return [*_there(self.coordinator), *self.workers, *_there(self.gateway)]

    @property
    def url(self) -> str:
        """Return the gateway's URL, "" without a gateway."""
        http = self.settings.http
        return "" if http is None or self._listener is None else url_of(http.host, self._listener)

    @property
    def client(self) -> Client:
        """Return a client for short queries."""
        if self._client is None:
            self._client = Client(self.endpoint, timeout_s=ASK_TIMEOUT_S, connect_timeout_s=ASK_CONNECT_S)
        return self._client

    def turn(self, wait_s: float, *, restart: bool = True, also: tuple[int, ...] = ()) -> None:
        """Wait for output, an end or a signal, then perform what is due.

        Args:
            wait_s: The limit in seconds.
            restart: Restart children that end.
            also: Descriptors that end the wait when they become readable.

        Raises:
            Stopped: The remaining children cannot serve.
        """
        due = [child.restart_at for child in self.children if child.restart_at is not None]
        wait_s = max(0.0, min([wait_s, *(at - monotonic() for at in due)]))
        outputs = {child.output: child for child in self.children if child.output >= 0}
        for ready in readable([self._signals.fileno(), *outputs, *also], wait_s):
            if ready == self._signals.fileno():
                self._signals.clear()
            elif ready in outputs:
                outputs[ready].read()
        for child in self.children:
            if restart and (waited_s := child.end_if_it_hangs()):
                self._print_line(f"{child.name} hangs: no report for {waited_s:g} s; ending it")
            if (status := child.ended()) is not None and restart:
                self._on_end(child, status)
            elif restart and child.restart_at is not None and child.restart_at <= monotonic():
                self._print_line(f"restarting {child.name}")
                child.start()

    def health(self) -> Health | None:
        """Return the coordinator's health; None while it does not answer."""
        try:
            health = self.client.health()
        except (Unavailable, DeadlineExceeded):
            return None
        serving = [*_there(self.coordinator), *self._serving(health)]
        for child in self.children:
            child.served |= child in serving
        return health

    def look(self) -> None:
        """Note which restarted children serve again."""
        if self.health() is not None:
            self._gateway_serves()

    def is_ready(self, health: Health | None) -> bool:
        """Return whether every worker that is not given up is ready to serve."""
        if health is None or not health.ready:
            return False
        serving = self._serving(health)
        return all(child.given_up or child in serving for child in self.workers)

    def serves(self, health: Health | None) -> bool:
        """Return whether any worker is ready to serve."""
        return health is not None and health.ready and bool(self._serving(health))

    def _serving(self, health: Health) -> list[Child]:
        """Return the workers' processes that are ready.

        A coordinator that has just recovered still reports the processes of before as ready, for as long as they
        may come back. They are not the children of this supervisor if it was started anew.
        """
        ready = {(worker.name, worker.pid) for worker in health.workers if worker.state == "ready"}
        return [child for child in self.workers if (self._worker_of[child.name], child.pid) in ready]

    def wait_ready(self, progress: Callable[[Health], None]) -> int:
        """Run turns until all workers serve.

        Args:
            progress: Called with each health.

        Returns:
            The number of workers.

        Raises:
            Stopped: The children cannot serve.
            Interrupted: A signal asked to end.
        """
        ranks = self.settings.tensor_parallel
        while True:
            self.turn(STARTING_TURN_S)
            self._signals.check()
            health = self.health()
            if health is not None:
                progress(health)
            if self.is_ready(health) and self._gateway_serves():
                return sum(not child.given_up for child in self.workers) // ranks

    def drain(self) -> None:
        """Stop admission and wait for running requests: at most `drain_s`, or until one more signal."""
        before, deadline = self._signals.count, monotonic() + self.settings.drain_s
        try:
            self.client.drain()
            while self._signals.count == before:
                stats = self.client.stats()
                left = stats.requests.pending + stats.requests.running
                if not left:
                    return
                if monotonic() >= deadline:
                    self._print_line(f"{left} requests still run after {self.settings.drain_s:g} s: stopping them")
                    return
                self.turn(STARTING_TURN_S, restart=False)
        except KvforgeError as error:
            self._print_line(f"draining failed: {error}")

    # ------------------------------------------------------------------------------------------------------- inside

    def _child(self, name: str, module: str, config: str, watchdog_s: float, once: tuple[str, ...] = ()) -> Child:
        file = self._folder.path / f"{name}.toml"
        file.write_text(config, encoding="utf-8")
        log = self.settings.log_dir / f"{name}.log" if self.settings.log_dir is not None else None
        command = [str(ENTRY), module, "--config", str(file)]
        line, watchdog = partial(self._console.child, name), self._watchdog(name, watchdog_s)
        return Child(name, command, self._folder.temporary, line, log, once=once, watchdog=watchdog)

    def _watchdog(self, name: str, period_s: float) -> ChildWatchdog:
        return ChildWatchdog(self._folder.path / f"{name}.notify", period_s)

    def _make_gateway(self, http: Http) -> Child:
        self._listener = listening(http.host, http.port, "--http")
        settings, folder = self.settings, self._folder
        command = [
            str(ENTRY),
            "kvforge.gateway",
            "--runtime-dir",
            str(settings.runtime_dir.absolute()),
            "--host",
            http.host,
        ]
        command += ["--processes", str(http.processes), "--listen", str(self._listener.fileno())]
        # At its stop, requests have already been drained: remaining streams are cut off with an error event.
        command += ["--drain-max-s", str(max(settings.stop_s / 2, 0.1))]
        command += ["--config", str(http.config)] if http.config is not None else []
        if state := settings.state.get("state_dir"):
            command += ["--default-state-dir", str(Path(str(state)).absolute() / "gateway")]
        for name in http.names:
            command += ["--name" if http.named else "--default-name", name]
        if http.key_hashes:
            hashes = folder.path / KEY_HASHES
            hashes.write_text("\n".join(http.key_hashes), encoding="utf-8")
            command += ["--key-hashes", str(hashes)]
        log = settings.log_dir / "gateway.log" if settings.log_dir is not None else None
        line = partial(self._console.child, "gateway")
        descriptors, watchdog = (self._listener.fileno(),), self._watchdog("gateway", WATCHDOG_S)
        return Child("gateway", command, folder.temporary, line, log, descriptors=descriptors, watchdog=watchdog)

    def _gateway_serves(self) -> bool:
        """Return whether the gateway answers, or there is none."""
        if self.gateway is None:
            return True
        try:
            with urllib.request.urlopen(f"{self.url}/health", timeout=ASK_TIMEOUT_S) as answer:  # noqa: S310 - the gateway's own URL
                self.gateway.served = answer.status == OK_STATUS
        except OSError:
            return False
        return self.gateway.served

    def _on_end(self, child: Child, status: int) -> None:
        how = f"exit status {status}" if status >= 0 else f"killed by {signal.Signals(-status).name}"
        words = child.last_words()
        if status in (USAGE, UNAVAILABLE):
            child.given_up = True
        else:
            child.plan_restart()
        if child.given_up:
            self._give_up_with(child)
        if not child.given_up:
            assert child.restart_at is not None, "a child that ended is restarted or given up"
            self._print_line(f"{child.name} ended ({how}); restarting in {child.restart_at - monotonic():.1f} s")
            return
        problem = f"{child.name} cannot serve ({how})" + (f": {words}" if words else "")
        if child in (self.coordinator, self.gateway) or all(worker.given_up for worker in self.workers):
            raise Stopped(status if status in (USAGE, UNAVAILABLE) else FAILED, problem)
        self._print_line(problem)

    def _give_up_with(self, child: Child) -> None:
        """Give up all ranks of a worker when one cannot serve: the others would wait for it."""
        worker = self._worker_of.get(child.name)
        for other in self.workers:
            if other is not child and worker is not None and self._worker_of[other.name] == worker:
                other.given_up, other.restart_at = True, None
                other.send(signal.SIGTERM)

    def _end(self, *, at_once: bool) -> None:
        """Stop every child and remove the files. A second signal kills the children."""
        at_once = at_once or self._signals.count > 1
        before = self._signals.count
        if self._client is not None:
            self._client.close()
        killed = False
        # In this order: the gateway's streams need the workers, and workers say goodbye to a running coordinator.
        for group in (_there(self.gateway), self.workers, _there(self.coordinator)):
            if not at_once:
                for child in group:
                    child.send(signal.SIGTERM)
                # A child that has not served yet has nothing to clean up, and may be busy with loading.
                grace_s = self.settings.stop_s if any(child.served for child in group) else UNSERVED_STOP_S
                self._wait_end(group, monotonic() + min(grace_s, self.settings.stop_s), before)
            for child in group:
                killed |= child.running
                child.send(signal.SIGKILL)
            for child in group:
                if not child.wait(monotonic() + KILL_S):
                    self._print_line(f"{child.name} does not end after SIGKILL: it hangs in the kernel")
        if self._listener is not None:
            self._listener.close()
        self._folder.release(clean=killed or at_once)

    def _wait_end(self, group: list[Child], deadline: float, signals_before: int) -> None:
        while any(child.running for child in group):
            # `turn` records which children end; it starts none.
            self.turn(max(0.0, min(TURN_S, deadline - monotonic())), restart=False)
            if monotonic() >= deadline or self._signals.count > signals_before:
                return


def run_up(settings: Settings, signals: Signals, progress: Callable[[Health], None], hint: str) -> int:
    """Serve until a signal; the first one drains.

    Raises:
        Stopped: The children cannot serve.
        Interrupted: A signal arrived before the service was ready, or a second one while draining.
        KvforgeError: A call failed.
    """
    console = ConsoleReporter(settings.log_format)
    with Supervisor(settings, signals, console) as supervisor:
        count = supervisor.wait_ready(progress)
        workers = "1 worker" if count == 1 else f"{count} workers"
        served = f", {supervisor.url}/v1" if supervisor.url else ", no HTTP (--port 8000 adds it)"
        print(f"ready: {workers}, endpoint {supervisor.endpoint}{served}, try: {hint}", flush=True)
        while not signals.count:
            supervisor.turn(TURN_S)
            if not all(child.served for child in supervisor.children):
                supervisor.look()
        first = signals.last
        console.print_line("stopping: waiting for running requests; press again to stop at once")
        before = signals.count
        supervisor.drain()
        if signals.count > before:
            raise Interrupted(first)
    return 0


def _there(child: Child | None) -> list[Child]:
    return [child] if child is not None else []


def _make_log_dir(path: Path) -> None:
    try:
        path.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise InvalidConfiguration("log_dir", f"{path} cannot be used: {error.strerror}") from None
