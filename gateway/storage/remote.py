"""The gateway's side of its storage process, which is started with the first call."""

from __future__ import annotations

import asyncio
import os
import socket
import subprocess
import sys
from contextlib import suppress
from pathlib import Path

import msgspec

import kvforge
from kvforge.process.leash import leashed
from kvforge.protocol.errors import InternalError, KvforgeError, QueueFull, StorageFailed, restore
from kvforge.protocol.steady_clock import monotonic
from kvforge.protocol.steady_timeout import steady_timeout

from .frames import ANSWER, HEAD_BYTES, Call, Done, Failed, Opened, framed
from .operations import READING, RESULTS, Operation, Result

ENTRY = Path(kvforge.__file__ or "").parent / "launch" / "entry.py"
WAITING_MAX, WAITING_BYTES_MAX = 4096, 256 << 20
RETRY_MS = 1000
CLOSE_S = 10.0


class RemoteStorage:
    """A `Storage` in a process of its own.

    Args:
        url: `sqlite:PATH` or `postgresql://...`.
        tenant_bytes_max: The limit of a tenant in bytes.
        answer_s: How long a call may take; a storage process that takes longer is replaced.
    """

    def __init__(self, url: str, *, tenant_bytes_max: int, answer_s: float) -> None:
        self._opened, self._answer_s = Opened(url=url, tenant_bytes_max=tenant_bytes_max), answer_s
        self._link: _Link | None = None
        self._starting = asyncio.Lock()
        self._closed = False
        self.reason = ""

    @property
    def exists(self) -> bool:
        """Whether there may be stored documents; see `Storage`."""
        file = self._opened.url.removeprefix("sqlite:")
        return file == self._opened.url or Path(file).exists()

    async def apply(self, *operations: Operation) -> list[Result]:
        """Do operations as one transaction; see `Storage`."""
        try:
            answer = await self._answered(operations)
        except StorageFailed as error:
            self.reason = error.message
            raise
        if isinstance(answer, Failed):
            failed = restore(answer.code, answer.message, answer.fields)
            self.reason = failed.message if isinstance(failed, StorageFailed) else ""
            raise failed
        self.reason = ""
        return [
            msgspec.convert(result, RESULTS[type(operation)])
            for operation, result in zip(operations, answer.results, strict=True)
        ]

    async def close(self) -> None:
        """Finish the calls that were made, and end the process; see `Storage`."""
        self._closed = True
        async with self._starting:
            if self._link is not None:
                await self._link.close()
                self._link = None

    async def _answered(self, operations: tuple[Operation, ...], *, again: bool = True) -> Done | Failed:
        link = await self._connected()
        try:
            async with steady_timeout(self._answer_s):
                return await link.ask(list(operations))
        except TimeoutError:
            link.kill()
            problem = f"did not answer within {self._answer_s:g} s ([storage] answer_s in gateway.toml)"
            raise StorageFailed("process", problem, "try again: it is not known whether the call was done") from None
        except (EOFError, OSError):
            if again and all(isinstance(operation, READING) for operation in operations):
                return await self._answered(operations, again=False)
            raise StorageFailed("process", "ended", "try again: it is not known whether the call was done") from None

    async def _connected(self) -> _Link:
        async with self._starting:
            if self._closed:
                raise StorageFailed("process", "is closed", "the gateway is stopping")
            if self._link is not None and self._link.ended:
                await self._link.close()
                self._link = None
            if self._link is None:
                try:
                    self._link = await _Link.start(self._opened)
                except OSError as error:
                    raise StorageFailed("process", f"cannot be started: {error.strerror}", "try again") from None
            return self._link


class _Link:
    """The process and the connection to it."""

    def __init__(
        self, process: subprocess.Popen[bytes], reader: asyncio.StreamReader, writer: asyncio.StreamWriter
    ) -> None:
        self._process, self._reader, self._writer = process, reader, writer
        self._waiting: dict[int, asyncio.Future[Done | Failed]] = {}
        self._waiting_bytes = 0
        self._number = 0
        self._reading = asyncio.ensure_future(self._read())

    @classmethod
    async def start(cls, opened: Opened) -> _Link:
        ours, theirs = socket.socketpair()
        with theirs:
            command = [sys.executable, "-P", str(ENTRY), "kvforge.gateway.storage", str(theirs.fileno())]
            process = subprocess.Popen(
                leashed(command),
                pass_fds=[theirs.fileno()],
                stdin=subprocess.DEVNULL,
                process_group=0,
                env={**os.environ, "OMP_NUM_THREADS": "1"},
            )
        ours.setblocking(False)
        reader, writer = await asyncio.open_unix_connection(sock=ours)
        writer.write(framed(opened))
        return cls(process, reader, writer)

    @property
    def ended(self) -> bool:
        return self._reading.done() or self._writer.is_closing() or self._process.poll() is not None

    async def ask(self, operations: list[Operation]) -> Done | Failed:
        if self.ended:
            raise EOFError
        if len(self._waiting) >= WAITING_MAX or self._waiting_bytes >= WAITING_BYTES_MAX:
            raise QueueFull(WAITING_MAX, RETRY_MS, "the storage process of the gateway")
        self._number += 1
        number = self._number
        frame = framed(Call(number, operations))
        answer: asyncio.Future[Done | Failed] = asyncio.get_running_loop().create_future()
        self._waiting[number] = answer
        self._waiting_bytes += len(frame)
        try:
            try:
                self._writer.write(frame)
            except RuntimeError as error:  # uvloop's: the process has closed its end
                raise EOFError from error
            return await answer
        finally:
            self._waiting_bytes -= len(frame)
            self._waiting.pop(number, None)

    async def _read(self) -> None:
        try:
            while True:
                head = await self._reader.readexactly(HEAD_BYTES)
                answer = ANSWER.decode(await self._reader.readexactly(int.from_bytes(head, "little")))
                waiting = self._waiting.get(answer.number)
                if waiting is not None and not waiting.done():  # the caller may have given up
                    waiting.set_result(answer)
        except (EOFError, OSError) as error:
            self._fail(EOFError(str(error)))
        except KvforgeError as error:
            self._fail(InternalError(error.message))

    def _fail(self, error: Exception) -> None:
        for waiting in self._waiting.values():
            if not waiting.done():
                waiting.set_exception(error)

    def kill(self) -> None:
        self._process.kill()

    async def close(self) -> None:
        """Let the process finish what it has received."""
        with suppress(OSError, RuntimeError):  # uvloop's RuntimeError: the process has closed its end
            self._writer.write_eof()
        deadline = monotonic() + CLOSE_S
        while self._process.poll() is None:
            if monotonic() > deadline:
                self._process.kill()
            await asyncio.sleep(0.005)
        self._reading.cancel()
        with suppress(asyncio.CancelledError):
            await self._reading
        self._writer.close()
        self._fail(EOFError())
