"""The helper processes: one loads the tokenizer and forks the others, which do one job after another.

Law: a helper has one thread and no state but the tokenizer, so that ending it at any moment loses one job. It ends when
its socket closes, and with its parent.
"""

from __future__ import annotations

import ctypes
import os
import resource
import signal
import socket
from contextlib import suppress
from pathlib import Path
from types import FrameType

from kvforge.process.leash import PR_SET_PDEATHSIG
from kvforge.protocol.errors import InternalError, InvalidRequest, KvforgeError
from kvforge.text.tokenizer import Tokenizer

from .jobs import FIRST, HEAD_BYTES, JOB, Check, Failed, Hello, Job, Load, Loaded, Render, Result, TextLimits, framed
from .work import TextWork, token_bytes_max

# The first message; later ones are a letter, and a process id.
FIRST_BYTES_MAX = 1 << 16
FORK, END = b"f", b"e"
# Behind its limit of processor time a template is interrupted again and again, in case that it catches exceptions.
AGAIN_S = 0.05
# Whole seconds after which the kernel ends a process that cannot be interrupted.
GRACE_S = 2
# A helper that a job made larger than this is replaced by a fresh one.
GROWN_BYTES = 256 << 20
PAGE_BYTES = resource.getpagesize()


class _OutOfTime(Exception):
    """The template's processor time is over."""


def main(descriptor: int) -> None:
    """Run the first helper until its socket closes.

    Args:
        descriptor: The descriptor of a socket of whole messages (SOCK_SEQPACKET) to the gateway.
    """
    os.environ["TOKENIZERS_PARALLELISM"] = "false"  # a fork does not take threads along
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)  # the gateway ends when its streams have, and closes the socket then
    # A gateway that was killed has closed its end: there is nothing left to answer.
    with suppress(BrokenPipeError, ConnectionResetError):
        _serve(descriptor)


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
        except OSError as error:
            problem = f"{load.template_file}: {error.strerror}"
            control.send(
                _body(Failed("invalid_configuration", f"chat_template: {problem}", {"field": "chat_template"}))
            )
            return
        control.send(_body(Loaded(longest)))
        _Forking(control, TextWork(tokenizer, load.limits, longest), load).run()


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
        """A process id of ours is not another's before it was waited for."""
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
                with suppress(_OutOfTime):
                    signal.setitimer(signal.ITIMER_PROF, 0)
        except KvforgeError as error:
            if _out_of(error, _OutOfTime):
                return _failed(template_time(limits))
            if _out_of(error, MemoryError):
                return _failed(memory(limits, job))
            return _failed(error)
        except _OutOfTime:
            return _failed(template_time(limits))
        except MemoryError:
            return _failed(memory(limits, job))
        except Exception as error:  # noqa: BLE001 - the gateway gets it as a fault of its own
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
    """Whether an error is of this kind underneath."""
    cause: BaseException | None = error
    while cause is not None:
        if isinstance(cause, kind):
            return True
        cause = cause.__cause__ or cause.__context__
    return False


def _interrupt(number: int, frame: FrameType | None) -> None:  # noqa: ARG001
    raise _OutOfTime


def _pages(column: int) -> int:
    """0: of the address space; 1: in memory."""
    return int(Path("/proc/self/statm").read_text().split()[column])


def _failed(error: KvforgeError) -> Failed:
    return Failed(error.code, error.message, error.fields)


def _body(message: Loaded | Failed) -> bytes:
    return framed(message)[HEAD_BYTES:]
