"""The process that tries grammars (`grammar_trial`), started when the first one comes and ended with its starter."""

from __future__ import annotations

import contextlib
import logging
import select
import subprocess
import sys
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
    """Tries grammars in another process. Not thread-safe."""

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
        self._first = {
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

    def start(self) -> None:
        """Start the process, if it does not run; it makes its tokenizer meanwhile."""
        if self._process is not None and self._process.poll() is None:
            return
        self.close()
        command = [sys.executable, "-P", str(Path(grammar_trial.__file__))]
        self._process = subprocess.Popen(
            leashed(command) if sys.platform == "linux" else command, stdin=subprocess.PIPE, stdout=subprocess.PIPE
        )
        self._end = weakref.finalize(self, _end, self._process)  # one that is dropped leaves no process
        self._tried = False
        self._send(self._first)

    def problem(self, grammar: str) -> str:
        """Return why a grammar is refused; "" where it may be compiled here. See `tried`."""
        return self.tried(grammar)[0]

    def tried(self, grammar: str) -> tuple[str, bool]:
        """Try a grammar. Waits no longer than its limits, and for the process to start.

        Args:
            grammar: As llguidance takes it.

        Returns:
            Why it is refused, "" where it may be compiled here; and whether that is true of the grammar: False where
            the process failed.
        """
        started = time.monotonic()
        try:
            self.start()
        except OSError as error:
            return f"could not be tried: no process can be started for it ({error.strerror}); send it again", False
        wait_s = grammar_trial.WALL_FACTOR * self.limits.cpu_s + 1.0 + (0.0 if self._tried else START_S_MAX)
        answer = self._receive(started + wait_s) if self._send(grammar) else None
        if answer is None:
            self.close()
            problem = "could not be tried: the process for trials of grammars ended or does not answer; send it again"
            return problem, False
        self._tried = True
        return str(answer), True

    def close(self) -> None:
        """End the process."""
        self._process = None
        if self._end is not None:
            self._end()

    def _send(self, value: Any) -> bool:
        assert self._process is not None and self._process.stdin is not None
        try:
            grammar_trial.send(self._process.stdin, value)
        except OSError:
            return False
        return True

    def _receive(self, deadline: float) -> Any:
        assert self._process is not None and self._process.stdout is not None
        stream = self._process.stdout
        if not select.select([stream], [], [], max(0.0, deadline - time.monotonic()))[0]:
            return None
        return grammar_trial.receive(stream)


def _end(process: subprocess.Popen[bytes]) -> None:
    process.kill()
    process.wait()
    for stream in (process.stdin, process.stdout):
        if stream is not None:
            with contextlib.suppress(OSError):
                stream.close()
