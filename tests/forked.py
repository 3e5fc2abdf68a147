"""Python scripts in processes of their own, which share slow imports.

`Scripts(module, ...)` starts one process that imports the modules and then only forks. Each script runs in a child as
`python -c` runs it: as `__main__`, with its own arguments, environment, outputs and exit status. Use it where many
scripts need the same packages of other projects. The first modules of ours are imported by the script itself.
"""

from __future__ import annotations

import atexit
import gc
import importlib
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from pathlib import Path
from types import TracebackType
from typing import Any, NoReturn, Self

from tools.cluster.leaving import leave

END_S = 120


class Scripts:
    """Runs scripts. The end of the `with` block ends the process that forks."""

    def __init__(self, *modules: str) -> None:
        """modules: those that are imported once."""
        command = [sys.executable, "-m", __name__, *modules]
        self._process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self.close()

    def close(self) -> None:
        """End the process that forks."""
        self._process.communicate()

    def run(
        self, script: str, *arguments: str, environment: Mapping[str, str] = os.environ
    ) -> subprocess.CompletedProcess[str]:
        """Run a script to its end. It is killed after `END_S` seconds."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        with tempfile.TemporaryDirectory(prefix="kvf-") as folder:
            outputs = [Path(folder) / name for name in ("stdout", "stderr")]
            asked = {"script": script, "arguments": arguments, "environment": {**environment}}
            self._process.stdin.write(json.dumps({**asked, "outputs": [*map(str, outputs)]}).encode() + b"\n")
            self._process.stdin.flush()
            status = json.loads(self._process.stdout.readline())
            texts = [path.read_text() for path in outputs]
        return subprocess.CompletedProcess(["-c", *arguments], status, *texts)


def _child() -> dict[str, Any] | None:
    """Fork for each line of the input. Return in a child with what it has to run, and in the parent at the end."""
    for line in sys.stdin.buffer:
        pid = os.fork()
        if pid == 0:
            return json.loads(line)  # type: ignore[no-any-return]
        status = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
        os.write(1, json.dumps(status).encode() + b"\n")
    return None


def _run(script: str, arguments: list[str], environment: dict[str, str], outputs: list[str]) -> NoReturn:
    """Become the script. An exception or SystemExit ends the process, as in any other."""
    import signal

    for descriptor, target in (
        (os.open(os.devnull, os.O_RDONLY), 0),
        *zip(map(_created, outputs), (1, 2), strict=True),
    ):
        os.dup2(descriptor, target)
        os.close(descriptor)
    signal.alarm(END_S)
    os.environ.clear()
    os.environ.update(environment)
    sys.argv = ["-c", *arguments]
    module = type(sys)("__main__")
    sys.modules["__main__"] = module
    try:
        exec(compile(script, "<string>", "exec"), vars(module))  # noqa: S102 - of the tests alone
    except SystemExit as ended:
        leave(ended.code)
    leave(None)


def _created(path: str) -> int:
    return os.open(path, os.O_WRONLY | os.O_CREAT, 0o600)


if __name__ == "__main__":
    # The collector would walk all modules again and again while they are imported, and at the exit.
    gc.disable()
    atexit.register(gc.freeze)
    for name in sys.argv[1:]:
        importlib.import_module(name)
    if (asked := _child()) is not None:
        _run(**asked)
