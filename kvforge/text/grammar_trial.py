"""Tries grammars in a separate process, each within limits of time and memory.

Usage: `python grammar_trial.py DESCRIPTOR`. llguidance bounds most of the cost of a grammar, but not all (`multipleOf`
in a conjunction, long forced text). A worker has one thread, so a grammar is tried here first: it is compiled, its
first masks are computed, and it generates a short answer. Each trial is a fork of this process, so that exceeding a
limit ends only that trial.

The descriptor refers to a file with the settings as JSON. Messages on stdin and answers on stdout are 4 bytes of
length, little-endian, then JSON. Each message is a grammar in llguidance's form; its answer is the reason for a
refusal, or "".
"""

from __future__ import annotations

import contextlib
import json
import os
import random
import resource
import select
import signal
import sys
import time
from typing import IO, Any

STEPS = 24  # tokens of the short answer
WALL_FACTOR = 10.0  # a loaded machine may slow a trial down by this factor
TOO_LONG = "takes longer than {cpu_s:g} s of a core to compile and to start an answer: make it smaller"
TOO_LARGE = "takes more than {memory_bytes} bytes of memory: make it smaller"
REASON_BYTES_MAX = 4096
ANSWER_BYTES_MAX = 8 * REASON_BYTES_MAX  # JSON escapes a character in at most six bytes


def main() -> int:
    """Serve trials until stdin ends."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the worker handles a terminal's Ctrl-C
    source, target = sys.stdin.buffer, sys.stdout.buffer
    with open(int(sys.argv[1]), "rb") as file:  # noqa: PTH123 - a descriptor
        settings = json.load(file)
    from llguidance import LLParserLimits, LLTokenizer

    tokens = LLTokenizer(settings["tokenizer"], n_vocab=settings["vocab_size"], eos_token=settings["eos_tokens"])
    limits = LLParserLimits(**settings["limits"])
    while (grammar := receive(source)) is not None:
        send(target, _judged(grammar, tokens, limits, settings["cpu_s"], settings["memory_bytes"]))
    return 0


def message(value: Any) -> bytes:
    """Encode a message."""
    body = json.dumps(value).encode()
    return len(body).to_bytes(4, "little") + body


def answer(received: bytes | bytearray) -> Any:
    """Decode a message from the bytes received so far; return None while it is incomplete."""
    size = int.from_bytes(received[:4], "little")
    return json.loads(received[4 : 4 + size]) if len(received) >= 4 + size > 4 else None


def send(target: IO[bytes], value: Any) -> None:
    """Write one message."""
    target.write(message(value))
    target.flush()


def receive(source: IO[bytes]) -> Any:
    """Read one message; return None at the end of the input."""
    head = source.read(4)
    body = source.read(int.from_bytes(head, "little")) if len(head) == 4 else b""
    return json.loads(body) if body else None


def _judged(grammar: str, tokens: Any, limits: Any, cpu_s: float, memory_bytes: int) -> str:
    """Return the reason for a refusal of the grammar, or ""."""
    reader, writer = os.pipe()
    child = os.fork()
    if not child:
        os.close(reader)
        _try(grammar, tokens, limits, cpu_s, memory_bytes, writer)
    os.close(writer)
    try:
        reason = _read(reader, time.monotonic() + WALL_FACTOR * cpu_s)
    finally:
        os.close(reader)
        with contextlib.suppress(ProcessLookupError):
            os.kill(child, signal.SIGKILL)
        status = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    if reason is not None:
        return reason
    if status in (-signal.SIGPROF, -signal.SIGKILL):
        return TOO_LONG.format(cpu_s=cpu_s)
    return TOO_LARGE.format(memory_bytes=memory_bytes)  # Rust aborts without memory


def _try(grammar: str, tokens: Any, limits: Any, cpu_s: float, memory_bytes: int, writer: int) -> None:
    """Run a trial in the fork. Never returns."""
    try:
        signal.signal(signal.SIGPROF, signal.SIG_DFL)
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
        with open("/proc/self/statm", encoding="ascii") as statm:  # noqa: PTH123 - before any import
            used = int(statm.read().split()[0]) * resource.getpagesize()
        resource.setrlimit(resource.RLIMIT_AS, (used + memory_bytes, used + memory_bytes))
        signal.setitimer(signal.ITIMER_PROF, cpu_s)
        os.dup2(os.open(os.devnull, os.O_WRONLY), 2)  # hides Rust's panic messages
        os.write(writer, b"=" + _walk(grammar, tokens, limits).encode()[:REASON_BYTES_MAX])
    except MemoryError:
        os._exit(2)
    except BaseException as error:  # noqa: BLE001 - a panic of Rust is not an Exception
        os.write(writer, b"=" + f"cannot be compiled: {type(error).__name__}: {error}".encode()[:REASON_BYTES_MAX])
    os._exit(0)


def _walk(grammar: str, tokens: Any, limits: Any) -> str:
    """Compile the grammar and generate a short answer from forced or random allowed tokens."""
    from llguidance import LLMatcher

    matcher = LLMatcher(tokens, grammar, log_level=0, limits=limits)
    if matcher.is_error():
        return ""  # the worker reports it, in its own words
    chance = random.Random(0)
    for _ in range(STEPS):
        mask = matcher.compute_bitmask()
        if matcher.is_error() or matcher.is_stopped():
            break
        places = [index for index, octet in enumerate(mask) if octet]
        if not places:
            break
        place = chance.choice(places)
        bit = chance.choice([bit for bit in range(8) if mask[place] >> bit & 1])
        if not matcher.consume_token(8 * place + bit):
            break
    return ""


def _read(reader: int, deadline: float) -> str | None:
    """Return the output without its first byte; None if there is none before the deadline or the end."""
    parts = b""
    while (left := deadline - time.monotonic()) > 0 and _is_readable(reader, left):
        part = os.read(reader, 1 << 16)
        if not part:
            return parts[1:].decode(errors="replace") if parts else None
        parts += part
    return None


def _is_readable(reader: int, seconds: float) -> bool:
    """Wait for output. `select.select` takes no descriptor above 1,023."""
    poll = select.poll()
    poll.register(reader, select.POLLIN)
    return bool(poll.poll(1000 * seconds))


if __name__ == "__main__":
    sys.exit(main())
