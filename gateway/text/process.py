"""The helper processes: the first loads the tokenizer and forks the others, which do one job after another.

Invariant: a helper has a single thread and no state except the tokenizer, so killing it at any moment loses only one
job. It exits when its socket closes, and dies with its parent.
"""

from __future__ import annotations

import ctypes
import os
import resource
import signal
import socket
import sys
from contextlib import suppress
from pathlib import Path
from types import FrameType, ModuleType

from kvforge.process.collector import keep_all
from kvforge.process.leash import PR_SET_PDEATHSIG
from kvforge.protocol.errors import InternalError, InvalidRequest, KvforgeError
from kvforge.text.token_table import NotTabularError
from kvforge.text.tokenizer import Tokenizer

from .jobs import (
    FIRST,
    FIRST_BYTES_MAX,
    HEAD_BYTES,
    JOB,
    Check,
    Failed,
    Hello,
    Job,
    Load,
    Loaded,
    Render,
    Result,
    TextLimits,
    framed,
)
from .work import TextWork, token_bytes_max

# Messages after the first: a letter, and a process id.
FORK, END = b"f", b"e"
# Past its CPU time limit a template is interrupted repeatedly, in case it catches exceptions.
AGAIN_S = 0.05
# The kernel kills a process that cannot be interrupted after this many additional seconds.
GRACE_S = 2
# A helper that has grown by more than this is replaced.
GROWN_BYTES = 256 << 20
PAGE_BYTES = resource.getpagesize()


class _CpuTimeExceeded(Exception):
    """The template has exceeded its CPU time."""


def main(descriptor: int) -> None:
    """Run the first helper until its socket closes.

    Args:
        descriptor: The descriptor of a socket of whole messages (SOCK_SEQPACKET) to the gateway.
    """
    os.environ["TOKENIZERS_PARALLELISM"] = "false"  # threads do not survive a fork
    _hide_torch()
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)  # the gateway closes the socket after its streams have ended
    # A killed gateway has closed its end of the socket.
    with suppress(BrokenPipeError, ConnectionResetError):
        _serve(descriptor)


def _hide_torch() -> None:
    """Let transformers find no torch: tokenizers need none, and its import takes seconds and 200 MB."""
    hidden: dict[str, ModuleType | None] = {"torch": None}
    sys.modules.update(hidden)  # type: ignore[arg-type]  # None is how the import system marks an absent module


def _serve(descriptor: int) -> None:
    with socket.socket(fileno=descriptor) as control:
        load = FIRST.decode(control.recv(FIRST_BYTES_MAX))
        try:
            tokenizer = Tokenizer.load(load.source) if load.source is not None else None
            if tokenizer is not None and load.template_file:
                tokenizer.use_chat_template(Path(load.template_file).read_text(encoding="utf-8"))
            longest = token_bytes_max(tokenizer) if tokenizer is not None else 1
        except KvforgeError as error:
            control.send(_body(Failed(error.code, error.message, error.fields)))
            return
        except (OSError, UnicodeDecodeError) as error:
            reason = error.strerror if isinstance(error, OSError) else error
            problem = f"{load.template_file}: {reason}"
            control.send(
                _body(Failed("invalid_configuration", f"chat_template: {problem}", {"field": "chat_template"}))
            )
            return
        _send_loaded(control, longest, tokenizer if load.table else None)
        keep_all()  # helpers share this memory until they write to it, and collections write to all of it
        _Forking(control, TextWork(tokenizer, load.limits, longest), load).run()


def _send_loaded(control: socket.socket, longest: int, tokenizer: Tokenizer | None) -> None:
    """Answer the first message, with the table of a tokenizer."""
    table, reason = b"", ""
    if tokenizer is not None:
        try:
            table = tokenizer.table().to_bytes()
        except NotTabularError as error:
            reason = str(error)
    control.send(_body(Loaded(longest, len(table), reason)))
    for start in range(0, len(table), FIRST_BYTES_MAX):
        control.send(table[start : start + FIRST_BYTES_MAX])


class _Forking:
    def __init__(self, control: socket.socket, work: TextWork, load: Load) -> None:
        self._control, self._work, self._load = control, work, load
        self._children: set[int] = set()

    def run(self) -> None:
        """Fork and end helpers, as the gateway asks."""
        while True:
            message, descriptors, _, _ = socket.recv_fds(self._control, 64, 1)
            if not message:
                break
            if message == FORK:
                self._fork(socket.socket(fileno=descriptors[0]))
            elif message[:1] == END:
                self._end(int(message[1:]))
        for child in tuple(self._children):
            self._end(child)

    def _fork(self, theirs: socket.socket) -> None:
        parent = os.getpid()
        child = os.fork()
        if child:
            self._children.add(child)
            theirs.close()
            return
        status = 1
        try:
            ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
            self._control.close()
            if os.getppid() == parent:
                _Helper(theirs, self._work, self._load.limits).run()
            status = 0
        finally:
            os._exit(status)

    def _end(self, child: int) -> None:
        """Kill and reap a child. Its process id cannot be reused before that."""
        if child in self._children:
            self._children.discard(child)
            os.kill(child, signal.SIGKILL)
            os.waitpid(child, 0)


class _Helper:
    def __init__(self, peer: socket.socket, work: TextWork, limits: TextLimits) -> None:
        self._peer, self._work, self._limits = peer, work, limits

    def run(self) -> None:
        """Do jobs until the gateway closes the socket."""
        signal.signal(signal.SIGPROF, _interrupt)
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))  # memory holds prompts
        _, most = resource.getrlimit(resource.RLIMIT_AS)
        size, began = _pages(0), _pages(1)
        bound = size * PAGE_BYTES + self._limits.memory_bytes_max
        resource.setrlimit(resource.RLIMIT_AS, (bound if most == resource.RLIM_INFINITY else min(bound, most), most))
        self._peer.sendall(framed(Hello(os.getpid())))
        while (body := self._receive()) is not None:
            self._peer.sendall(framed(self._done(body)))
            del body
            if (_pages(1) - began) * PAGE_BYTES > GROWN_BYTES:
                return

    def _receive(self) -> bytes | None:
        head = self._exactly(HEAD_BYTES)
        return None if head is None else self._exactly(int.from_bytes(head, "little"))

    def _exactly(self, size: int) -> bytes | None:
        parts = bytearray()
        while len(parts) < size:
            piece = self._peer.recv(min(size - len(parts), 1 << 20))
            if not piece:
                return None
            parts += piece
        return bytes(parts)

    def _done(self, body: bytes) -> Result | Failed:
        limits = self._limits
        _, most = resource.getrlimit(resource.RLIMIT_CPU)
        spent = resource.getrusage(resource.RUSAGE_SELF)
        until = int(spent.ru_utime + spent.ru_stime + limits.text_s) + GRACE_S
        job: Job | None = None
        try:
            job = JOB.decode(body)
            renders = isinstance(job, Render)
            seconds = limits.template_s if renders else limits.text_s
            soft = int(spent.ru_utime + spent.ru_stime + seconds) + GRACE_S
            resource.setrlimit(resource.RLIMIT_CPU, (soft, most))

            def rendered() -> None:
                signal.setitimer(signal.ITIMER_PROF, 0)
                resource.setrlimit(resource.RLIMIT_CPU, (until, most))

            try:
                if renders:
                    signal.setitimer(signal.ITIMER_PROF, limits.template_s, AGAIN_S)
                return self._work.do(job, rendered)
            finally:
                with suppress(_CpuTimeExceeded):
                    signal.setitimer(signal.ITIMER_PROF, 0)
        except KvforgeError as error:
            if _out_of(error, _CpuTimeExceeded):
                return _failed(template_time(limits))
            if _out_of(error, MemoryError):
                return _failed(memory(limits, job))
            return _failed(error)
        except _CpuTimeExceeded:
            return _failed(template_time(limits))
        except MemoryError:
            return _failed(memory(limits, job))
        except Exception as error:  # noqa: BLE001 - reported to the gateway as an internal error
            return _failed(InternalError(f"a text helper failed: {type(error).__name__}: {error}"))


def template_time(limits: TextLimits) -> InvalidRequest:
    """Return the error for a template that does not end."""
    problem = f"the model's chat template took more than {limits.template_s:g} s of processor time"
    return InvalidRequest("messages", f"{problem}; see template_s in gateway.toml")


def memory(limits: TextLimits, job: Job | None) -> InvalidRequest:
    """Return the error of a job that needs too much memory."""
    if isinstance(job, Check):
        problem = f"checking it needs more than {limits.memory_bytes_max} bytes of memory"
        return InvalidRequest(job.field, f"{problem}; make it simpler, or see text_memory_bytes_max in gateway.toml")
    problem = f"rendering and tokenising needs more than {limits.memory_bytes_max} bytes of memory"
    return InvalidRequest("messages", f"{problem}; see text_memory_bytes_max in gateway.toml")


def _out_of(error: BaseException, kind: type[BaseException]) -> bool:
    """Return whether an error or one of its causes is of this kind."""
    cause: BaseException | None = error
    while cause is not None:
        if isinstance(cause, kind):
            return True
        cause = cause.__cause__ or cause.__context__
    return False


def _interrupt(number: int, frame: FrameType | None) -> None:  # noqa: ARG001
    raise _CpuTimeExceeded


def _pages(column: int) -> int:
    """Return a size in pages. `column` is 0 for the address space, 1 for resident memory."""
    return int(Path("/proc/self/statm").read_text().split()[column])


def _failed(error: KvforgeError) -> Failed:
    return Failed(error.code, error.message, error.fields)


def _body(message: Loaded | Failed) -> bytes:
    return framed(message)[HEAD_BYTES:]
