"""`kvforge up` with forked processes: `python -m tools.cluster.forked_up ARGUMENTS`, in a child of a fork server.

For tests of what the supervisor does with its processes, not of how they start. The coordinator and the workers are
forked by a process that has imported torch and is a child of the supervisor. They get the arguments, environment,
output, process group and leash that `kvforge.launch` gives a fresh interpreter. The gateway, which inherits a socket,
is a fresh interpreter.
"""

from __future__ import annotations

import os
import runpy
import sys
from pathlib import Path
from typing import IO, Any

from kvforge.launch.child import Child as Supervised

from .fork_server import Child, ForkServer, die_with_parent, serve, set_command_line
from .leaving import leave

FORKED = "kvforge.coordinator", "kvforge.worker"


class ForkedServer:
    """A fork server that is forked from this process, which needs a single thread for that."""

    def __init__(self) -> None:
        requests, asking = os.pipe()
        answers, answering = os.pipe()
        parent = os.getpid()
        self.pid = os.fork()
        if self.pid == 0:
            os.close(asking)
            os.close(answers)
            die_with_parent(parent)
            set_command_line([sys.executable, "-m", serve.__module__])
            for descriptor, target in ((requests, 0), (answering, 1)):
                os.dup2(descriptor, target)
                os.close(descriptor)
            serve()
            leave(None)
        os.close(requests)
        os.close(answering)
        self.stdin: IO[bytes] | None = open(asking, "wb", buffering=0)  # noqa: PTH123, SIM115 - closed by ForkServer
        self.stdout: IO[bytes] | None = open(answers, "rb", buffering=0)  # noqa: PTH123, SIM115

    def wait(self) -> int:
        """Wait for the exit status."""
        return os.waitstatus_to_exitcode(os.waitpid(self.pid, 0)[1])


def main() -> None:
    """Run `kvforge` with the arguments of this process."""
    server = ForkServer(ForkedServer())
    start = Supervised._popen

    def started(self: Any, command: list[str], output: int) -> Any:
        module = next((module for module in FORKED if module in command), None)
        if module is None:
            return start(self, command, output)
        return forked(server, module, command, output, self._environment)

    Supervised._popen = started  # type: ignore[method-assign]
    try:
        runpy.run_module("kvforge", run_name="__main__", alter_sys=True)
    finally:
        server.close()


def forked(server: ForkServer, module: str, command: list[str], output: int, environment: dict[str, str]) -> Child:
    """Start a module by the command that the supervisor would execute."""
    arguments = command[command.index(module) + 1 :]
    return server.start(arguments, Path(f"/proc/{os.getpid()}/fd/{output}"), environment, module, own_group=True)


if __name__ == "__main__":
    main()
