"""One driver process: `python -m kvforge.loadtest.drive.child RESULT_FD`, started by `processes`.

It is told what to do on its standard input, in lines of JSON: `{"spec": ..., "index": ..., "processes": ...}`, then,
after it has said that it is ready, `{"start": SECONDS}` on CLOCK_MONOTONIC; the end of the input is the wish to stop.
It answers on its standard output, in lines of JSON too: `{"ready": true}`, `{"progress": ...}`, `{"done": true}`, or
`{"error": ...}`. What it has measured goes to the file descriptor RESULT_FD as one MessagePack value.
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


def say(line: dict[str, Any]) -> None:
    """One line to who started us. One that is gone ends us anyway."""
    with suppress(BrokenPipeError):
        sys.stdout.write(json.dumps(line) + "\n")
        sys.stdout.flush()


async def drive(result_fd: int) -> None:
    """The whole life. Raises KvforgeError."""
    reader = asyncio.StreamReader(LINE_BYTES_MAX)
    await asyncio.get_running_loop().connect_read_pipe(lambda: asyncio.StreamReaderProtocol(reader), sys.stdin)
    told = json.loads(await reader.readline())
    spec = RunSpec(**told["spec"])
    workload = spec.workload()
    plan = spec.plan(told["index"], told["processes"], len(workload))
    target = spec.make_target(plan)
    engine = Engine(workload, target, plan)
    await target.open()
    try:
        say({"ready": True})
        if not (line := await reader.readline()):
            return
        stop = asyncio.Event()
        waiting = asyncio.create_task(_hear_stop(reader, stop))
        telling = asyncio.create_task(_tell(engine))
        try:
            found = await engine.run(json.loads(line)["start"], stop)
        finally:
            for task in (waiting, telling):
                task.cancel()
    finally:
        await target.close()
    with os.fdopen(result_fd, "wb") as file:
        pack(file, *found)
    say({"done": True})


async def _hear_stop(reader: asyncio.StreamReader, stop: asyncio.Event) -> None:
    await reader.read()
    stop.set()


async def _tell(engine: Engine) -> None:
    while True:
        await asyncio.sleep(PROGRESS_S)
        say({"progress": asdict(engine.progress)})


def main() -> int:
    """The program."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # who started us says when to stop
    try:
        run: Callable[[Coroutine[Any, Any, None]], None] = asyncio.run
        with suppress(ImportError):
            import uvloop

            run = uvloop.run
        run(drive(int(sys.argv[1])))
    except KvforgeError as error:
        say({"error": msgspec.to_builtins(ErrorInfo.of(error))})
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
