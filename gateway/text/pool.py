"""The gateway's side of its text helpers: a bounded number of processes behind a bounded queue."""

from __future__ import annotations

import asyncio
import os
import socket
import subprocess
import sys
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import msgspec
import numpy as np

import kvforge
from kvforge.process.leash import leashed
from kvforge.protocol.errors import (
    DeadlineExceeded,
    InternalError,
    InvalidRequest,
    KvforgeError,
    QueueFull,
    Unavailable,
    restore,
)
from kvforge.protocol.messages import Grammar, Int32Array
from kvforge.protocol.steady_clock import monotonic
from kvforge.protocol.steady_timeout import steady_timeout
from kvforge.text.grammar import known, note
from kvforge.text.token_table import TABLE_BYTES_MAX, TokenTable

from .inline import ids_of
from .jobs import (
    ANSWER,
    FIRST_BYTES_MAX,
    HEAD_BYTES,
    HELLO,
    LOADED,
    Check,
    Decode,
    Encode,
    Failed,
    Job,
    Load,
    Render,
    Result,
    TextLimits,
    framed,
)
from .process import END, FORK, memory, template_time
from .work import SizeCheck

ENTRY = Path(kvforge.__file__ or "").parent / "launch" / "entry.py"
# The time limit for loading a tokenizer, generous enough for a busy machine.
LOAD_S = 120.0
FORK_S = 30.0
CLOSE_S = 5.0
RETRY_MS = 1000


class TextPool:
    """Helper processes of one model. Used with `async with`, or closed by `close`.

    Args:
        source: The tokenizer, as `Tokenizer.load` takes it; None: there is none, and shapes alone are checked.
        limits: Bounds of each job.
        template_file: A Jinja file in place of the model's own chat template.
        processes: How many jobs are done at once.
        waiting_max: How many more may wait.
    """

    def __init__(
        self,
        source: str | None,
        limits: TextLimits,
        *,
        template_file: str = "",
        processes: int = 2,
        waiting_max: int = 256,
    ) -> None:
        self._load = Load(source=source, template_file=template_file, limits=limits, table=True)
        self._limits, self._waiting_max = limits, waiting_max
        self._places, self._waiting = asyncio.Semaphore(processes), 0
        self._idle: list[_Helper] = []
        self._first: _ForkServer | None = None
        self._table: TokenTable | str = ""
        self._starting = asyncio.Lock()
        self._jobs: set[asyncio.Task[Result]] = set()
        self._size = SizeCheck(limits, 1 << 62)  # until the vocabulary is known

    async def start(self) -> TokenTable | str:
        """Start the first helper, and return when its tokenizer is loaded.

        Returns:
            The table of its tokens, or why it has none.

        Raises:
            KvforgeError: The tokenizer cannot be loaded.
        """
        first = await self._forking()
        self._size = SizeCheck(self._limits, first.token_bytes_max)
        return self._table

    async def encode(self, text: str, *, special: bool = True, field: str = "prompt") -> Int32Array:
        """See `Texts.encode`."""
        self._size.check(text, field)
        return ids_of(await self._do(Encode(text=text, special=special, field=field)))

    async def render(
        self, messages: Sequence[Mapping[str, Any]], options: Mapping[str, Any], *, whole: bool = False
    ) -> tuple[Int32Array, str]:
        """See `Texts.render`."""
        for at, message in enumerate(messages):
            for text in _texts(message.get("content")):
                self._size.check(text, f"messages[{at}].content")
        result = await self._do(Render(messages=[*messages], options={**options}, tokens=not whole, whole=whole))
        return ids_of(result), result.text

    async def decode(self, ids: Int32Array) -> str:
        """See `Texts.decode`."""
        return (await self._do(Decode(ids=np.ascontiguousarray(ids, "<i4").tobytes()))).text

    async def check(self, grammar: Grammar, field: str) -> None:
        """See `Texts.check`."""
        if not known(grammar):
            note(grammar, (await self._do(Check(grammar=grammar, field=field))).text)

    async def close(self) -> None:
        """End all helpers; jobs that still run fail."""
        for job in self._jobs:
            job.cancel()
        if self._jobs:
            await asyncio.wait(self._jobs)
        for helper in self._idle:
            helper.close()
        self._idle.clear()
        if self._first is not None:
            await self._first.close()
            self._first = None

    # ------------------------------------------------------------------------------------------------------- inside

    async def _do(self, job: Job) -> Result:
        if self._waiting >= self._waiting_max:
            raise QueueFull(self._waiting_max, RETRY_MS, "the gateway's queue of texts (text_waiting_max)")
        self._waiting += 1
        # The job completes even if the caller disconnects, because a helper handles one job at a time.
        task = asyncio.ensure_future(self._served(job))
        self._jobs.add(task)
        task.add_done_callback(self._over)
        return await asyncio.shield(task)

    def _over(self, task: asyncio.Task[Result]) -> None:
        self._jobs.discard(task)
        if not task.cancelled():
            task.exception()  # mark it as retrieved, also if the caller disconnected

    async def _served(self, job: Job) -> Result:
        seconds, waiting = self._limits.text_s, True
        try:
            async with steady_timeout(seconds), self._places:
                self._waiting -= 1
                waiting = False
                return await self._helped(job)
        except TimeoutError:
            work = f"{job.field}: checking the shape" if isinstance(job, Check) else "rendering and tokenising"
            problem = f"{work} took longer than {seconds:g} s"
            raise DeadlineExceeded(f"{problem} (text_s in gateway.toml)") from None
        finally:
            self._waiting -= waiting

    async def _helped(self, job: Job, *, fresh: bool = False) -> Result:
        fresh = fresh or not self._idle
        helper = await self._fork() if fresh else self._idle.pop()
        answer: Result | Failed | None = None
        try:
            answer = await helper.ask(job)
        except (EOFError, OSError):
            if fresh:
                raise _ended(job, self._limits) from None
            # It may have exited between two jobs: retry with a fresh helper.
        finally:
            if answer is not None:
                self._idle.append(helper)
            else:
                helper.close()
                if self._first is not None:
                    self._first.end(helper.pid)
        if answer is None:
            return await self._helped(job, fresh=True)
        if isinstance(answer, Failed):
            raise restore(answer.code, answer.message, answer.fields)
        return answer

    async def _fork(self) -> _Helper:
        for again in (True, False):
            first = await self._forking()
            try:
                async with steady_timeout(FORK_S):
                    return await first.fork()
            except (EOFError, OSError, TimeoutError) as error:
                await first.close()
                self._first = None
                if not again:
                    raise Unavailable(f"cannot start a text helper: {error or type(error).__name__}") from None
        raise AssertionError("returned or raised")

    async def _forking(self) -> _ForkServer:
        async with self._starting:
            if self._first is None or self._first.ended:
                if self._first is not None:
                    await self._first.close()
                self._first = await _ForkServer.start(self._load)
                if self._load.table:  # those that replace it have the same
                    self._table, self._first.table = self._first.table, ""
                    self._load = msgspec.structs.replace(self._load, table=False)
            return self._first


class _ForkServer:
    """The process that has loaded the tokenizer and forks the helpers."""

    def __init__(self, process: subprocess.Popen[bytes], control: socket.socket) -> None:
        self._process, self._control = process, control
        self.token_bytes_max = 1
        self.table: TokenTable | str = ""

    @classmethod
    async def start(cls, load: Load) -> _ForkServer:
        control, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with theirs:
            command = [sys.executable, "-P", str(ENTRY), "kvforge.gateway.text", str(theirs.fileno())]
            process = subprocess.Popen(
                leashed(command),
                pass_fds=[theirs.fileno()],
                stdin=subprocess.DEVNULL,
                process_group=0,
                env={**os.environ, "OMP_NUM_THREADS": "1"},
            )
        control.setblocking(False)
        first = cls(process, control)
        try:
            control.send(framed(load)[HEAD_BYTES:])
            async with steady_timeout(LOAD_S):
                loaded = LOADED.decode(await first._receive())
                if isinstance(loaded, Failed):
                    raise restore(loaded.code, loaded.message, loaded.fields)
                first.table = await first._receive_table(loaded.table_bytes) if loaded.table_bytes else loaded.no_table
        except TimeoutError:
            await first.close()
            raise Unavailable(f"the text helper did not load its tokenizer within {LOAD_S:g} s") from None
        except BaseException:
            await first.close()
            raise
        first.token_bytes_max = loaded.token_bytes_max
        return first

    async def _receive(self) -> bytes:
        answer = await asyncio.get_running_loop().sock_recv(self._control, FIRST_BYTES_MAX)
        if not answer:
            raise Unavailable(f"the text helper ended as it started, with exit status {self._process.wait()}")
        return answer

    async def _receive_table(self, size: int) -> TokenTable:
        if size > TABLE_BYTES_MAX:
            raise InternalError(f"the text helper announces a token table of {size} bytes")
        body = bytearray()
        while len(body) < size:
            body += await self._receive()
        return TokenTable.from_bytes(bytes(body))

    @property
    def ended(self) -> bool:
        return self._process.poll() is not None

    async def fork(self) -> _Helper:
        ours, theirs = socket.socketpair()
        with theirs:
            socket.send_fds(self._control, [FORK], [theirs.fileno()])
        ours.setblocking(False)
        reader, writer = await asyncio.open_unix_connection(sock=ours)
        helper = _Helper(reader, writer)
        try:
            helper.pid = HELLO.decode(await helper.receive()).pid
        except BaseException:
            helper.close()
            raise
        return helper

    def end(self, pid: int) -> None:
        """End a helper that hangs, or has ended and is waited for."""
        with suppress(OSError):
            self._control.send(END + str(pid).encode())

    async def close(self) -> None:
        """End it and all helpers."""
        self._control.close()
        deadline = monotonic() + CLOSE_S
        while self._process.poll() is None:
            if monotonic() > deadline:
                self._process.kill()
            await asyncio.sleep(0.01)


class _Helper:
    """The connection to one helper."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._reader, self._writer = reader, writer
        self.pid = 0

    async def ask(self, job: Job) -> Result | Failed:
        if self._reader.at_eof() or self._writer.is_closing():
            raise EOFError
        self._writer.write(framed(job))
        await self._writer.drain()
        return ANSWER.decode(await self.receive())

    async def receive(self) -> bytes:
        head = await self._reader.readexactly(HEAD_BYTES)
        return await self._reader.readexactly(int.from_bytes(head, "little"))

    def close(self) -> None:
        self._writer.close()


def _texts(content: object) -> list[str]:
    if isinstance(content, str):
        return [content]
    return [str(part.get("text", "")) for part in content] if isinstance(content, list) else []


def _ended(job: Job, limits: TextLimits) -> KvforgeError:
    """Return the error of a job whose helper was killed by the kernel's limits of time or memory."""
    if isinstance(job, Render):
        problem = memory(limits, job).message.removeprefix("messages: ")
        found = template_time(limits)
        return restore(found.code, f"{found.message}; or {problem}", found.fields)
    if isinstance(job, Check):
        problem = f"checking it takes more than {limits.text_s:g} s or {limits.memory_bytes_max} bytes of memory"
        remedy = "make it simpler, or see text_s and text_memory_bytes_max in gateway.toml"
        return InvalidRequest(job.field, f"{problem}; {remedy}")
    return memory(limits, job)
