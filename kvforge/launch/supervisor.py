"""`kvforge up`: a coordinator and its workers in the foreground, restarted when they die, gone when it ends.

One loop, no threads: it polls the children's output and the signals' descriptor. Nothing outlives it: children are
stopped, then killed; they hang on a leash (`leash.py`) should this process itself be killed; the configuration files
live in a folder of the runtime folder that is locked while it runs and removed at the end.
"""

from __future__ import annotations

import fcntl
import os
import re
import select
import shutil
import signal
import stat
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from pathlib import Path
from time import monotonic
from types import TracebackType
from typing import Self

from kvforge.client.blocking import Client
from kvforge.process.ending import Interrupted, Stopped
from kvforge.process.signals import Signals
from kvforge.protocol import transport
from kvforge.protocol.errors import CoordinatorInUse, DeadlineExceeded, InvalidConfiguration, KvforgeError, Unavailable
from kvforge.protocol.exits import FAILED, UNAVAILABLE, USAGE
from kvforge.protocol.messages import Health

from .child import Child
from .settings import Settings
from .voice import Voice

PRIVATE_FOLDER = "up"
ENTRY = Path(__file__).parent / "entry.py"
ASK_TIMEOUT_S = 0.5
ASK_CONNECT_S = 0.1
TURN_S = 1.0
STARTING_TURN_S = 0.1
KILL_S = 5.0
UNSERVED_STOP_S = 3.0
MARK = "made-by-kvforge-up"
# What we put into our folder, and what a coordinator that was killed leaves in its runtime folder.
OURS = re.compile(r"(coordinator|worker-\d+)\.toml")
LEFT_BY_KILLED = (transport.CLIENT_SOCKET, transport.WORKER_SOCKET, "coordinator.lock", transport.TABLES_FILE)


class Supervisor:
    """Runs one installation while entered. Call `turn` often; it never waits longer than it is told."""

    def __init__(self, settings: Settings, signals: Signals, voice: Voice) -> None:
        """voice: says what happens (the children's output too, unless `settings.log_dir`)."""
        self.settings = settings
        self.endpoint = transport.client_endpoint(settings.runtime_dir)
        self._signals = signals
        self._voice, self._say = voice, voice.say
        self._folder = PrivateFolder(settings.runtime_dir)
        self._client: Client | None = None
        self.coordinator: Child | None = None
        self.workers: list[Child] = []

    def __enter__(self) -> Self:
        self._folder.take()
        try:
            settings = self.settings
            if settings.log_dir is not None:
                _make_log_dir(settings.log_dir)
            self.coordinator = self._child("coordinator", "coordinator", settings.coordinator_file())
            for index in range(settings.workers):
                self.workers.append(self._child(f"worker-{index}", "worker", settings.worker_file(index)))
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
        """The coordinator first, then the workers."""
        return [*([self.coordinator] if self.coordinator is not None else []), *self.workers]

    @property
    def client(self) -> Client:
        """For short questions."""
        if self._client is None:
            self._client = Client(self.endpoint, timeout_s=ASK_TIMEOUT_S, connect_timeout_s=ASK_CONNECT_S)
        return self._client

    def turn(self, wait_s: float, *, restart: bool = True) -> None:
        """Waits for output, an end or a signal, at most `wait_s`; then does what is due.

        Raises Stopped when what is left cannot serve.
        """
        due = [child.restart_at for child in self.children if child.restart_at is not None]
        wait_s = max(0.0, min([wait_s, *(at - monotonic() for at in due)]))
        outputs = {child.output: child for child in self.children if child.output >= 0}
        for ready in select.select([self._signals.fileno(), *outputs], [], [], wait_s)[0]:
            if ready == self._signals.fileno():
                self._signals.clear()
            else:
                outputs[ready].read()
        for child in self.children:
            if (status := child.ended()) is not None and restart:
                self._on_end(child, status)
            elif restart and child.restart_at is not None and child.restart_at <= monotonic():
                self._say(f"restarting {child.name}")
                child.start()

    def health(self) -> Health | None:
        """The coordinator's answer; None while there is none."""
        try:
            health = self.client.health()
        except (Unavailable, DeadlineExceeded):
            return None
        ready = {worker.name for worker in health.workers if worker.state == "ready"}
        for child in self.children:
            child.served |= child is self.coordinator or child.name in ready
        return health

    def is_ready(self, health: Health | None) -> bool:
        """True if every worker that is not given up is ready to serve."""
        if health is None or not health.ready:
            return False
        ready = {worker.name for worker in health.workers if worker.state == "ready"}
        return all(child.given_up or child.name in ready for child in self.workers)

    def wait_ready(self, progress: Callable[[Health], None]) -> int:
        """Turns until all workers serve; returns their number. Raises Stopped, Interrupted."""
        while True:
            self.turn(STARTING_TURN_S)
            self._signals.check()
            health = self.health()
            if health is not None:
                progress(health)
            if self.is_ready(health):
                return sum(not child.given_up for child in self.workers)

    def drain(self) -> None:
        """Stops admission and waits until what runs has ended: at most `drain_s`, or until one more signal."""
        before, deadline = self._signals.count, monotonic() + self.settings.drain_s
        try:
            self.client.drain()
            while self._signals.count == before:
                stats = self.client.stats()
                left = stats.requests.pending + stats.requests.running
                if not left:
                    return
                if monotonic() >= deadline:
                    self._say(f"{left} requests still run after {self.settings.drain_s:g} s: they are ended")
                    return
                self.turn(STARTING_TURN_S, restart=False)
        except KvforgeError as error:
            self._say(f"not drained: {error}")

    # ------------------------------------------------------------------------------------------------------- inside

    def _child(self, name: str, module: str, config: str) -> Child:
        file = self._folder.path / f"{name}.toml"
        file.write_text(config, encoding="utf-8")
        log = self.settings.log_dir / f"{name}.log" if self.settings.log_dir is not None else None
        command = [str(ENTRY), module, "--config", str(file)]
        return Child(name, command, self._folder.temporary, partial(self._voice.child, name), log)

    def _on_end(self, child: Child, status: int) -> None:
        how = f"exit status {status}" if status >= 0 else f"killed by {signal.Signals(-status).name}"
        words = child.last_words()
        if status in (USAGE, UNAVAILABLE):
            child.given_up = True
        else:
            child.plan_restart()
        if not child.given_up:
            assert child.restart_at is not None, "an end is followed by a restart or by giving up"
            self._say(f"{child.name} ended ({how}); it is started again in {child.restart_at - monotonic():.1f} s")
            return
        problem = f"{child.name} cannot serve ({how})" + (f": {words}" if words else "")
        if child is self.coordinator or all(worker.given_up for worker in self.workers):
            raise Stopped(status if status in (USAGE, UNAVAILABLE) else FAILED, problem)
        self._say(problem)

    def _end(self, *, at_once: bool) -> None:
        """Stops every child and removes what is ours. Asked to end a second time, it kills."""
        at_once = at_once or self._signals.count > 1
        before = self._signals.count
        if self._client is not None:
            self._client.close()
        killed = False
        # Workers first: they say goodbye to a coordinator that is still there.
        for group in (self.workers, [self.coordinator] if self.coordinator is not None else []):
            if not at_once:
                for child in group:
                    child.send(signal.SIGTERM)
                # One that has not served yet has nothing to put in order, and may be deep in loading.
                grace_s = self.settings.stop_s if any(child.served for child in group) else UNSERVED_STOP_S
                self._wait_end(group, monotonic() + min(grace_s, self.settings.stop_s), before)
            for child in group:
                killed |= child.running
                child.send(signal.SIGKILL)
            for child in group:
                if not child.wait(monotonic() + KILL_S):
                    self._say(f"{child.name} does not end even when killed: it hangs in the kernel")
        self._folder.give_back(clean=killed or at_once)

    def _wait_end(self, group: list[Child], deadline: float, signals_before: int) -> None:
        while any(child.running for child in group):
            # `turn` notes the ends; nothing is started any more.
            self.turn(max(0.0, min(TURN_S, deadline - monotonic())), restart=False)
            if monotonic() >= deadline or self._signals.count > signals_before:
                return


class PrivateFolder:
    """A folder of ours in the runtime folder, locked while we run: one supervisor to a runtime folder.

    Nothing is removed from it that was not put there by us, or by one before us that was killed: a folder that is there
    is taken only if it carries our mark, or nothing.
    """

    def __init__(self, runtime: Path) -> None:
        self.path = runtime / PRIVATE_FOLDER
        self.temporary = self.path / "tmp"
        self._runtime = runtime
        self._made_runtime = False
        self._descriptor = -1

    def take(self) -> None:
        """Makes and locks it. Raises CoordinatorInUse, InvalidConfiguration."""
        self._made_runtime = not self._runtime.exists()
        transport.prepare_runtime_dir(self._runtime)
        try:
            while self._descriptor < 0:
                with suppress(FileExistsError):
                    self.path.mkdir(mode=0o700)
                self._check()
                self._descriptor = self._lock()
        except BlockingIOError:
            raise CoordinatorInUse(
                f"another `kvforge up` runs in {self._runtime}: stop it, or choose another --runtime-dir"
            ) from None
        except OSError as error:
            raise InvalidConfiguration("runtime_dir", f"{self._runtime} cannot be used: {error.strerror}") from None
        (self.path / MARK).touch()
        self._empty()  # of what one that was killed left
        self.temporary.mkdir()  # torch makes folders in TMPDIR when it is imported; nobody else would remove them

    def give_back(self, *, clean: bool) -> None:
        """Removes it, and the runtime folder if we made it. clean: also what a killed coordinator leaves there."""
        if self._descriptor < 0:
            return
        if clean:
            for name in LEFT_BY_KILLED:
                (self._runtime / name).unlink(missing_ok=True)
        self._empty()
        with suppress(OSError):  # not empty: not only ours
            if all(left.name == MARK for left in self.path.iterdir()):
                (self.path / MARK).unlink()
                self.path.rmdir()
        if self._made_runtime:
            with suppress(OSError):  # not empty: not only ours
                self._runtime.rmdir()
        os.close(self._descriptor)
        self._descriptor = -1

    def _check(self) -> None:
        """Raises InvalidConfiguration where the folder that is there is not ours to use."""
        try:
            status = self.path.lstat()
            names = {entry.name for entry in self.path.iterdir()} if stat.S_ISDIR(status.st_mode) else set()
        except FileNotFoundError:
            return  # removed meanwhile by the one that had it: made again
        what = f"{self.path}, where `kvforge up` keeps its files,"
        remedy = "move it away, or choose another --runtime-dir"
        if not stat.S_ISDIR(status.st_mode):
            raise InvalidConfiguration("runtime_dir", f"{what} is not a folder: {remedy}")
        if status.st_uid != os.geteuid():
            raise InvalidConfiguration("runtime_dir", f"{what} belongs to another user (uid {status.st_uid}): {remedy}")
        if names and MARK not in names:
            raise InvalidConfiguration("runtime_dir", f"{what} holds what it did not make ({min(names)}): {remedy}")

    def _empty(self) -> None:
        """Removes what is ours."""
        with suppress(OSError):
            for entry in list(self.path.iterdir()):
                if OURS.fullmatch(entry.name):
                    entry.unlink(missing_ok=True)
        if not self.temporary.is_symlink():
            shutil.rmtree(self.temporary, ignore_errors=True)

    def _lock(self) -> int:
        """The locked descriptor; -1 if the folder was removed meanwhile by the one that had it."""
        descriptor = -1
        try:
            descriptor = os.open(self.path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            if os.fstat(descriptor).st_ino == self.path.stat().st_ino:
                return descriptor
        except FileNotFoundError:
            pass
        except OSError:
            if descriptor >= 0:
                os.close(descriptor)
            raise
        if descriptor >= 0:
            os.close(descriptor)
        return -1


def run_up(settings: Settings, signals: Signals, progress: Callable[[Health], None], hint: str) -> int:
    """Serves until a signal; the first one drains. Raises Stopped, Interrupted (before it was ready), KvforgeError."""
    voice = Voice(settings.log_format)
    with Supervisor(settings, signals, voice) as supervisor:
        count = supervisor.wait_ready(progress)
        workers = "1 worker" if count == 1 else f"{count} workers"
        print(f"ready: {workers}, endpoint {supervisor.endpoint}, try: {hint}", flush=True)
        while not signals.count:
            supervisor.turn(TURN_S)
            if not all(child.served for child in supervisor.children):
                supervisor.health()  # one that was restarted has served again once it is ready
        first = signals.last
        voice.say("stopping: running requests may end first; once more to stop at once")
        before = signals.count
        supervisor.drain()
        if signals.count > before:
            raise Interrupted(first)
    return 0


def _make_log_dir(path: Path) -> None:
    try:
        path.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise InvalidConfiguration("log_dir", f"{path} cannot be used: {error.strerror}") from None
