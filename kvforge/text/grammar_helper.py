"""The process that tries grammars (`grammar_trial`), started when the first one comes and ended with its starter."""

from __future__ import annotations

import contextlib
import json
import logging
import os
import select
import subprocess
import sys
import tempfile
import time
import weakref
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from kvforge.process.leash import leashed

from . import grammar_trial
from .grammar import ITEMS_LIMITS

START_S_MAX = 60.0  # a tokenizer of 260 thousand tokens takes 3 s on a slow core
log = logging.getLogger("worker")


@dataclass(frozen=True)
class TrialLimits:
    """The limits of trials: of one, seconds of a core and bytes of memory. waiting_max: grammars in the queue."""

    cpu_s: float = 1.0
    memory_bytes: int = 512 << 20
    waiting_max: int = 32


class GrammarHelper:
    """Tries grammars in another process, one after another. Only `problem` waits for it."""

    def __init__(
        self, tokenizer: str, vocab_size: int, eos_tokens: tuple[int, ...], limits: TrialLimits | None = None
    ) -> None:
        """Starts nothing yet.

        Args:
            tokenizer: The tokenizer, as JSON of the tokenizers library.
            vocab_size: The size of the model's vocabulary.
            eos_tokens: The tokens that end an answer.
            limits: The limits of each grammar.
        """
        self.limits = limits or TrialLimits()
        self._settings = {
            "tokenizer": tokenizer,
            "vocab_size": vocab_size,
            "eos_tokens": list(eos_tokens),
            "limits": ITEMS_LIMITS,
            "cpu_s": self.limits.cpu_s,
            "memory_bytes": self.limits.memory_bytes,
        }
        self._process: subprocess.Popen[bytes] | None = None
        self._end: weakref.finalize[..., GrammarHelper] | None = None
        self._tried = False  # by this process: the tokenizer is there
        self._unsent = memoryview(b"")
        self._received = bytearray()
        self._deadline = 0.0
        self._refusal = ""  # of a trial for which no process could be started

    def start(self) -> None:
        """Start the process, if it does not run; it makes its tokenizer meanwhile."""
        if self._process is not None and self._process.poll() is None:
            return
        self.close()
        # A file: a pipe has no room for a tokenizer, and writing into it would wait for the reader.
        with tempfile.TemporaryFile() as settings:
            settings.write(json.dumps(self._settings).encode())
            settings.flush()
            settings.seek(0)
            command = [sys.executable, "-P", str(Path(grammar_trial.__file__)), str(settings.fileno())]
            self._process = subprocess.Popen(
                leashed(command) if sys.platform == "linux" else command,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                bufsize=0,
                pass_fds=[settings.fileno()],
            )
        assert self._process.stdin is not None and self._process.stdout is not None
        os.set_blocking(self._process.stdin.fileno(), False)
        os.set_blocking(self._process.stdout.fileno(), False)
        self._end = weakref.finalize(self, _end, self._process)  # one that is dropped leaves no process
        self._tried = False

    def begin(self, grammar: str) -> None:
        """Begin a trial. The one before must have had its verdict.

        Args:
            grammar: As llguidance takes it.
        """
        self._refusal = ""
        try:
            self.start()
        except OSError as error:
            self._refusal = f"could not be tried: no process can be started for it ({error.strerror}); send it again"
            return
        wait_s = grammar_trial.WALL_FACTOR * self.limits.cpu_s + 1.0 + (0.0 if self._tried else START_S_MAX)
        self._deadline = time.monotonic() + wait_s
        self._unsent = memoryview(grammar_trial.message(grammar))
        self._received.clear()

    def poll(self, seconds: float = 0.0) -> tuple[str, bool] | None:
        """Return the verdict on the grammar that was begun last, None where it is not known yet.

        Args:
            seconds: Wait for it no longer than this.

        Returns:
            Why it is refused, "" where it may be compiled here; and whether that is true of the grammar: False where
            the process failed.
        """
        if self._refusal:
            return self._refusal, False
        until = min(time.monotonic() + seconds, self._deadline)
        while True:
            try:
                answer = self._advance(max(0.0, until - time.monotonic()))
            except OSError:
                return self._failed()
            if answer is not None:
                self._tried = True
                return str(answer), True
            if time.monotonic() >= self._deadline:
                return self._failed()
            if time.monotonic() >= until:
                return None

    def problem(self, grammar: str) -> str:
        """Return why a grammar is refused; "" where it may be compiled here. Waits for the verdict.

        Args:
            grammar: As llguidance takes it.
        """
        self.begin(grammar)
        while (verdict := self.poll(START_S_MAX)) is None:
            pass
        return verdict[0]

    def close(self) -> None:
        """End the process."""
        self._process = None
        if self._end is not None:
            self._end()

    def _failed(self) -> tuple[str, bool]:
        self.close()
        problem = "could not be tried: the process for trials of grammars ended or does not answer; send it again"
        return problem, False

    def _advance(self, seconds: float) -> Any:
        """Write and read what is possible now, or within the time. None where the answer is not whole yet.

        Raises:
            OSError: The process has ended.
        """
        assert self._process is not None and self._process.stdin is not None and self._process.stdout is not None
        target, source = self._process.stdin.fileno(), self._process.stdout.fileno()
        readable, writable, _ = select.select([source], [target] if self._unsent else [], [], seconds)
        if writable:
            self._unsent = self._unsent[os.write(target, self._unsent) :]
        if readable:
            if not (found := os.read(source, grammar_trial.ANSWER_BYTES_MAX)):
                raise BrokenPipeError
            self._received += found
        return grammar_trial.answer(self._received)


def _end(process: subprocess.Popen[bytes]) -> None:
    process.kill()
    process.wait()
    for stream in (process.stdin, process.stdout):
        if stream is not None:
            with contextlib.suppress(OSError):
                stream.close()
