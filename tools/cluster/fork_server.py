"""Processes of kvforge for tests, without the seconds that each needs for its imports.

A test process starts up to two fork servers. One imports the modules of `python -m kvforge.worker` and loads a tiny
model, the other imports the coordinator and the gateway, which are smaller. Then they only fork: a child runs a module
as `__main__`, with the given arguments, environment and outputs. The child is an ordinary process of that module, with
its own process id, command line, signals and exit status. A gateway forks its text helpers too (`forked_text.py`).
A fork server ends when the pipe from its test process closes, and the kernel kills its children with it: pytest-xdist
kills a test process that does not finish its fixtures in time, and no code of that process runs then.
Tests with systemd or an explicit start, and some with `kvforge up`, cover the start in a fresh interpreter;
`forked_up.py` has the others. `tests/integration/test_forked_worker.py` compares both.

Several test processes share the imports: `SharedForkServers` starts a process for each kind of imports, which forks a
fork server for each test process that connects.
"""

from __future__ import annotations

import atexit
import ctypes
import importlib
import json
import os
import runpy
import select
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
from contextlib import suppress
from functools import cache
from pathlib import Path
from time import monotonic
from typing import IO, NoReturn, Protocol

from kvforge.process.collector import collector_paused, keep_all
from kvforge.process.leash import PR_SET_PDEATHSIG

from .leaving import leave

FORK_S = 300.0  # the first fork includes the import of torch, on a machine that others may use too
# An argument of the process, whose memory is that of its children's command lines.
ROOM = " " * 2048
WORKER, SERVICES = "worker", "services"
GATEWAY = "kvforge.gateway"
# An environment variable: the folder of the sockets of `SharedForkServers`, named like the imports.
SHARED = "KVFORGE_FORK_SERVERS"
# Modules of the CPU kernels that most tiny models of tests run.
KERNELS = (
    "attention_kernel",
    "convolution_kernel",
    "delta_kernel",
    "kv_write",
    "layer_kernels",
    "sampling_kernels",
    "state_space_kernel",
    "tile_kernel",
)


class Child:
    """The part of subprocess.Popen that tests of a process need."""

    def __init__(self, fork_server: ForkServer, pid: int) -> None:
        self._fork_server = fork_server
        self.pid = pid
        self.returncode: int | None = None

    def poll(self) -> int | None:
        """Return the exit status (minus the signal's number if killed), None while it runs."""
        self._fork_server.listen(0.0)
        return self.returncode

    def wait(self, timeout: float) -> int:
        """Wait for the exit status. timeout: seconds."""
        deadline = monotonic() + timeout
        while self.returncode is None:
            left_s = deadline - monotonic()
            if left_s <= 0:
                raise subprocess.TimeoutExpired("worker", timeout)
            self._fork_server.listen(left_s)
        return self.returncode

    def send_signal(self, number: signal.Signals) -> None:
        """Sends a signal, if it runs."""
        if self.poll() is None:
            with suppress(ProcessLookupError):
                os.kill(self.pid, number)

    def terminate(self) -> None:
        """Send SIGTERM."""
        self.send_signal(signal.SIGTERM)

    def kill(self) -> None:
        """Send SIGKILL."""
        self.send_signal(signal.SIGKILL)


class Server(Protocol):
    """The part of subprocess.Popen that a fork server needs: unbuffered pipes to and from the process."""

    stdin: IO[bytes] | None
    stdout: IO[bytes] | None

    def wait(self) -> int:
        """Wait for the exit status."""
        ...


class ForkServer:
    """The process that forks.

    Args:
        process: One that runs `serve` already, by default a new one.
        imports: The modules that a new one imports: those of a `WORKER`, or of the `SERVICES`.
    """

    def __init__(self, process: Server | None = None, imports: str = WORKER) -> None:
        self._process = process or subprocess.Popen(
            [sys.executable, "-m", __name__, imports, ROOM],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            env={**os.environ, "OMP_NUM_THREADS": "1"},
            bufsize=0,
        )
        self._answers = b""
        self._born: list[Child] = []
        self._abandoned = 0  # children that come after their deadline
        self._children: dict[int, Child] = {}

    def start(
        self,
        arguments: list[str],
        log: Path,
        environment: dict[str, str],
        module: str = "kvforge.worker",
        own_group: bool = False,
        output: Path | None = None,
    ) -> Child:
        """Run a module as a process of its own.

        Args:
            arguments: those of the module.
            log: the file, or the pipe, for both outputs; a file is appended to.
            output: the file, or the pipe, for its standard output in place of `log`.
            environment: the whole environment.
            module: a package with a `__main__`, or a module.
            own_group: the process leads a group of its own.
        """
        assert self._process.stdin is not None
        request = {
            "module": module,
            "arguments": arguments,
            "outputs": [str(output or log), str(log)],
            "environment": environment,
            "own_group": own_group,
        }
        self._process.stdin.write(json.dumps(request).encode() + b"\n")
        deadline = monotonic() + FORK_S
        while not self._born:
            if monotonic() >= deadline:
                self._abandoned += 1
                raise AssertionError(f"no process within {FORK_S} s")
            self.listen(deadline - monotonic())
        return self._born.pop()

    def start_piped(
        self, arguments: list[str], log: Path, environment: dict[str, str], module: str
    ) -> tuple[Child, IO[bytes]]:
        """Run a module like `start`, and return the other end of a pipe that is its standard output."""
        reading, writing = os.pipe()
        try:
            output = Path(f"/proc/{os.getpid()}/fd/{writing}")
            child = self.start(arguments, log, environment, module, output=output)
        except BaseException:
            os.close(reading)
            raise
        finally:
            os.close(writing)
        return child, os.fdopen(reading, "rb")

    def listen(self, wait_s: float) -> None:
        """Read the fork server's messages, waiting up to `timeout` seconds."""
        assert self._process.stdout is not None
        if not select.select([self._process.stdout], [], [], max(0.0, wait_s))[0]:
            return
        answers = self._process.stdout.read(1 << 16)
        assert answers, "the fork server has ended"
        *lines, self._answers = (self._answers + answers).split(b"\n")
        for line in lines:
            pid, status = json.loads(line)
            if status is None:
                self._children[pid] = child = Child(self, pid)
                if self._abandoned:
                    self._abandoned -= 1
                    with suppress(ProcessLookupError):
                        os.kill(pid, signal.SIGKILL)
                else:
                    self._born.append(child)  # its end may be among these lines
            else:
                self._children.pop(pid).returncode = status

    def close(self) -> None:
        """Stop it. Children that still run are killed."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.close()
        self._process.wait()
        self._process.stdout.close()


class Connected:
    """A fork server that a shared process forks for this one, at the other end of a socket."""

    def __init__(self, path: Path) -> None:
        self._socket = socket.socket(socket.AF_UNIX)
        self._socket.connect(str(path))
        descriptors = os.dup(self._socket.fileno()), os.dup(self._socket.fileno())
        self.stdin: IO[bytes] | None = open(descriptors[0], "wb", buffering=0)  # noqa: PTH123, SIM115 - closed by ForkServer
        self.stdout: IO[bytes] | None = open(descriptors[1], "rb", buffering=0)  # noqa: PTH123, SIM115

    def wait(self) -> int:
        """Wait for the end of the fork server."""
        self._socket.shutdown(socket.SHUT_WR)
        while self._socket.recv(1 << 16):
            pass
        self._socket.close()
        return 0


class SharedForkServers:
    """Two processes that import for all test processes that this one starts, until `close`."""

    def __init__(self) -> None:
        self._folder = tempfile.mkdtemp(prefix="kvf-", dir="/tmp")
        os.environ[SHARED] = self._folder
        self._processes = [self._started(imports) for imports in (WORKER, SERVICES)]

    def _started(self, imports: str) -> subprocess.Popen[bytes]:
        with socket.socket(socket.AF_UNIX) as listener:
            listener.bind(str(Path(self._folder, imports)))
            listener.listen()
            return subprocess.Popen(
                [sys.executable, "-m", __name__, imports, ROOM, str(listener.fileno())],
                stdin=subprocess.PIPE,
                pass_fds=[listener.fileno()],
                env={**os.environ, "OMP_NUM_THREADS": "1"},
            )

    def close(self) -> None:
        """End both, and remove their folder. Fork servers that are connected go on."""
        del os.environ[SHARED]
        for process in self._processes:
            assert process.stdin is not None
            process.stdin.close()
            process.kill()
            process.wait()
        shutil.rmtree(self._folder)


@cache
def fork_server(imports: str = WORKER) -> ForkServer:
    """Return a fork server of this process, started or connected on first use. imports: WORKER or SERVICES."""
    folder = os.environ.get(SHARED)
    made = ForkServer(Connected(Path(folder, imports)) if folder else None, imports)
    atexit.register(made.close)
    return made


def _import_all(imports: str) -> None:
    with collector_paused():
        if imports == WORKER:
            import kvforge.coordinator.server  # for `forked_up`
            import kvforge.worker.step.loop  # noqa: F401 - the slow import

            _import_what_any_model_needs()
            if folder := os.environ.get(SHARED):
                from .passed_checks import remember_comparisons, remember_rehearsals, remember_trials, try_few_rows

                passed = Path(folder, "passed")
                passed.mkdir()
                remember_trials(passed)
                remember_comparisons(passed)
                remember_rehearsals(passed)
                try_few_rows()
            _load_a_model()
            _keep_library_pages()
        else:
            _import_services()
    keep_all()  # no child walks, and so copies, the memory of the imported modules


def share(listener: socket.socket) -> bool:
    """Fork for each connection. Return True in a child, which serves the connection, and False at the end of input."""
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # the kernel reaps
    listening = listener.fileno()
    while 0 not in (ready := select.select([0, listening], [], [])[0]) or listening in ready:
        connection, _ = listener.accept()
        with connection:
            if os.fork() == 0:
                listener.close()
                os.dup2(connection.fileno(), 0)
                os.dup2(connection.fileno(), 1)
                return True
    return False


def serve() -> None:
    """Read requests, fork, and report each child's id and exit status. Children do not return from here."""
    threads = os.listdir("/proc/self/task")  # noqa: PTH208
    assert len(threads) == 1, "a process of several threads cannot be forked"
    wake, awake = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
    signal.set_wakeup_fd(awake)
    signal.signal(signal.SIGCHLD, lambda *_: None)
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for the tests
    requests, own_pid = b"", os.getpid()
    while True:
        ready = select.select([0, wake], [], [])[0]
        if wake in ready:
            os.read(wake, 1 << 16)
            _report_ended()
        if 0 in ready:
            read = os.read(0, 1 << 16)
            if not read:
                return
            *lines, requests = (requests + read).split(b"\n")
            for line in lines:
                request = json.loads(line)
                if _forks_text(request["module"]):
                    _import_text()
                outputs = [*map(_appended, request.pop("outputs"))]  # before the client learns that it may close a pipe
                pid = os.fork()
                if pid == 0:
                    signal.set_wakeup_fd(-1)
                    os.close(wake)
                    os.close(awake)
                    _become(parent=own_pid, outputs=outputs, **request)
                for output in outputs:
                    os.close(output)
                _report(pid, None)


def _import_what_any_model_needs() -> None:
    """Import the rest, which takes most of a second in each child: modules of most models, numba, compiled kernels."""
    import torch.utils._device  # noqa: F401
    import transformers.models.llama.modeling_llama  # noqa: F401

    with suppress(ImportError):
        import llguidance  # noqa: F401

    from kvforge.worker.cpu.kernel import CpuKernel, cpu_kernels_problem

    if cpu_kernels_problem():
        return
    from numba.core.registry import cpu_target

    cpu_target.typing_context.refresh()
    cpu_target.target_context.refresh()
    import kvforge.worker.attention.cpu_attention
    import kvforge.worker.cpu.sampling
    import kvforge.worker.kernels.cpu_operations  # noqa: F401

    for name in KERNELS:
        for kernel in vars(importlib.import_module(f"kvforge.worker.cpu.{name}")).values():
            if isinstance(kernel, CpuKernel):
                kernel.load()


def _load_a_model() -> None:
    """Load a tiny model: torch and oneDNN prepare much at their first use, a third of the time of such a load."""
    from kvforge.worker.device.device import open_device
    from kvforge.worker.loading.load import load_model

    from .running import tiny_model

    with tempfile.TemporaryDirectory(prefix="kvf-") as folder:
        model = tiny_model(Path(folder))
        load_model(model, load_format="dummy", dtype="float32", device=open_device("cpu"), block_size=16)


def _keep_library_pages() -> None:
    """Let the children release no pages of libraries: this process maps them too, so that no memory would be freed."""
    from kvforge.worker.device.device import Device

    def keep(self: Device) -> int:
        return 0

    Device.release_libraries = keep  # type: ignore[method-assign]


def _import_services() -> None:
    """Import what a coordinator, a gateway and a client import at their start."""
    import uvicorn.lifespan.on
    import uvicorn.loops.auto  # noqa: F401

    import kvforge.client.blocking.client
    import kvforge.coordinator.server
    import kvforge.gateway.serve.main
    import kvforge.gateway.serve.process  # noqa: F401


def _forks_text(module: str) -> bool:
    """Return whether a module is a gateway that forks its text helpers. They run without torch."""
    return module == GATEWAY and "torch" not in sys.modules


@cache
def _import_text() -> None:
    """Import transformers for the text helpers of gateways, before the first of these."""
    from .forked_text import import_transformers

    with collector_paused():
        import_transformers()
    keep_all()


def _report_ended() -> None:
    with suppress(ChildProcessError):
        while (ended := os.waitpid(-1, os.WNOHANG))[0]:
            _report(ended[0], os.waitstatus_to_exitcode(ended[1]))


def _report(pid: int, status: int | None) -> None:
    os.write(1, json.dumps([pid, status]).encode() + b"\n")


def _become(
    parent: int, module: str, arguments: list[str], outputs: list[int], environment: dict[str, str], own_group: bool
) -> NoReturn:
    """Run like `python -m MODULE ARGUMENTS` in a shell, with its outputs in `outputs`, and end the process."""
    die_with_parent(parent)
    if own_group:
        os.setpgid(0, 0)
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    for target, descriptor in enumerate((os.open(os.devnull, os.O_RDONLY), *outputs)):
        os.dup2(descriptor, target)
        os.close(descriptor)
    set_command_line([sys.executable, "-m", module, *arguments])
    os.environ.clear()
    os.environ.update(environment)
    tempfile.tempdir = None  # the imports may have asked for it: TMPDIR of the environment decides
    sys.argv = [module, *arguments]
    _customise(environment.get("PYTHONPATH", ""), [sys.executable, "-m", *sys.argv])
    if _forks_text(module):
        from .forked_text import fork_helpers

        fork_helpers()
    try:
        runpy.run_module(module, run_name="__main__", alter_sys=True)
    except SystemExit as ended:
        leave(ended.code)
    leave(None)


def _customise(path: str, command: list[str]) -> None:
    """Run the `sitecustomize.py` of the path's first folder, as a fresh interpreter does, though after the imports."""
    file = Path(path.split(os.pathsep)[0]) / "sitecustomize.py"
    if path and file.exists():
        sys.orig_argv = command
        runpy.run_path(str(file))


def die_with_parent(parent: int) -> None:
    """Let the kernel kill this process when its parent ends, as `kvforge.process.leash` does.

    Args:
        parent: The parent's process id, as the parent knew it before the fork: it may have ended since.
    """
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:
        os._exit(1)


def set_command_line(arguments: list[str]) -> None:
    """Replace the command line that others see in /proc. It may be as long as that of the fork server."""
    begin, end = map(int, Path("/proc/self/stat").read_text().rpartition(")")[2].split()[45:47])
    line = b"\0".join(map(os.fsencode, arguments))
    if end - begin > len(ROOM):  # not in a process that was started without room
        ctypes.memset(begin, 0, end - begin)
        ctypes.memmove(begin, line, min(len(line), end - begin - 1))


def _appended(log: str) -> int:
    return os.open(log, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o644)


if __name__ == "__main__":
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for the tests
    _import_all(sys.argv[1])
    if len(sys.argv) > 3:
        if sys.argv[1] == SERVICES:
            _import_text()
        if not share(socket.socket(fileno=int(sys.argv[3]))):
            leave(None)
    serve()
    leave(None)
