"""One driver process: `python -m kvforge.loadtest.drive.child RESULT_FD`, started by `processes`.

It reads lines of JSON from standard input: `{"spec": ..., "index": ..., "processes": ...}`, then, once it has reported
ready, `{"start": SECONDS}` on CLOCK_MONOTONIC. The end of the input asks it to stop.

It writes lines of JSON to standard output: `{"ready": true}`, `{"progress": ...}`, `{"done": true}` or `{"error":
...}`. The measurements go to the file descriptor RESULT_FD as one MessagePack value.
"""

from __future__ import annotations

import asyncio
import json
import os
import signal
import sys
from collections.abc import Callable, Coroutine
from contextlib import suppress
from dataclasses import asdict
from typing import Any

import msgspec

from kvforge.protocol.errors import KvforgeError
from kvforge.protocol.messages import ErrorInfo

from .engine import Engine
from .result import pack
from .spec import RunSpec

PROGRESS_S = 0.25
LINE_BYTES_MAX = 1 << 26


def print_line(line: dict[str, Any]) -> None:
    """Write one line to the parent. If the parent is gone, this process ends anyway."""
    with suppress(BrokenPipeError):
        sys.stdout.write(json.dumps(line) + "\n")
        sys.stdout.flush()


async def drive(result_fd: int) -> None:
    """Run the driver from its first line of input to its result.

    Raises:
        KvforgeError: The target is unavailable, or the specification is invalid.
    """
    reader = asyncio.StreamReader(LINE_BYTES_MAX)
    await asyncio.get_running_loop().connect_read_pipe(lambda: asyncio.StreamReaderProtocol(reader), sys.stdin)
    request = json.loads(await reader.readline())
    spec = RunSpec(**request["spec"])
    workload = spec.workload()
    plan = spec.plan(request["index"], request["processes"], len(workload))
    target = spec.make_target(plan)
    engine = Engine(workload, target, plan)
    await target.open()
    try:
        print_line({"ready": True})
        if not (line := await reader.readline()):
            return
        stop = asyncio.Event()
        waiting = asyncio.create_task(_wait_for_stop(reader, stop))
        printing = asyncio.create_task(_print_progress(engine))
        try:
            found = await engine.run(json.loads(line)["start"], stop)
        finally:
            for task in (waiting, printing):
                task.cancel()
    finally:
        await target.close()
    with os.fdopen(result_fd, "wb") as file:
        pack(file, *found)
    print_line({"done": True})


async def _wait_for_stop(reader: asyncio.StreamReader, stop: asyncio.Event) -> None:
    await reader.read()
    stop.set()


async def _print_progress(engine: Engine) -> None:
    while True:
        await asyncio.sleep(PROGRESS_S)
        print_line({"progress": asdict(engine.progress)})


def main() -> int:
    """Run the program and return its exit status."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent decides when to stop
    try:
        run: Callable[[Coroutine[Any, Any, None]], None] = asyncio.run
        with suppress(ImportError):
            import uvloop

            run = uvloop.run
        run(drive(int(sys.argv[1])))
    except KvforgeError as error:
        print_line({"error": msgspec.to_builtins(ErrorInfo.of(error))})
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
