"""Runs the process that tries grammars (`grammar_trial`), from the first grammar to the end of this process."""

from __future__ import annotations

import contextlib
import json
import logging
import os
import selectors
import subprocess
import sys
import tempfile
import time
import weakref
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from kvforge.process.leash import leashed
from kvforge.protocol.readiness import Selector

from . import grammar_trial
from .grammar import ITEMS_LIMITS

START_S_MAX = 60.0  # a tokenizer of 260 thousand tokens takes 3 s on a slow core
log = logging.getLogger("worker")


@dataclass(frozen=True)
class TrialLimits:
    """The limits of trials.

    Attributes:
        cpu_s: Seconds of a core for one trial.
        memory_bytes: Memory for one trial, in bytes.
        waiting_max: Grammars in the queue.
    """

    cpu_s: float = 1.0
    memory_bytes: int = 512 << 20
    waiting_max: int = 32


class GrammarHelper:
    """Tries grammars in another process, one after another. Only `problem` waits for it."""

    def __init__(
        self, tokenizer: str, vocab_size: int, eos_tokens: tuple[int, ...], limits: TrialLimits | None = None
    ) -> None:
        """Prepare the settings without starting the process.

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
        self._tried = False  # whether this process has finished a trial, so that its tokenizer is loaded
        self._unsent = memoryview(b"")
        self._received = bytearray()
        self._deadline = 0.0
        self._refusal = ""  # the error if no process could be started for the trial

    def start(self) -> None:
        """Start the process, if it does not run. It loads its tokenizer meanwhile."""
        if self._process is not None and self._process.poll() is None:
            return
        self.close()
        # A file: a tokenizer exceeds a pipe's buffer, so writing it into a pipe would block.
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
        self._end = weakref.finalize(self, _end, self._process)  # a dropped helper leaves no process
        self._tried = False

    def begin(self, grammar: str) -> None:
        """Begin a trial. The previous one must have ended.

        Args:
            grammar: The grammar in llguidance's form.
        """
        self._refusal = ""
        try:
            self.start()
        except OSError as error:
            self._refusal = f"could not be checked: cannot start a process for it ({error.strerror}); send it again"
            return
        wait_s = grammar_trial.WALL_FACTOR * self.limits.cpu_s + 1.0 + (0.0 if self._tried else START_S_MAX)
        self._deadline = time.monotonic() + wait_s
        self._unsent = memoryview(grammar_trial.message(grammar))
        self._received.clear()

    def poll(self, seconds: float = 0.0) -> tuple[str, bool] | None:
        """Return the verdict on the last begun grammar, None while it is unknown.

        Args:
            seconds: How long to wait for it.

        Returns:
            The reason for a refusal, or "" if it may be compiled here; and whether the verdict is about the grammar
            (False: the process failed).
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
        """Wait for the verdict on a grammar; return the reason for a refusal, or "".

        Args:
            grammar: The grammar in llguidance's form.
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
        problem = "could not be checked: the process for grammars ended or does not answer; send it again"
        return problem, False

    def _advance(self, seconds: float) -> Any:
        """Write and read as much as possible, for at most `seconds`. Return None while the answer is incomplete.

        Raises:
            OSError: The process has ended.
        """
        assert self._process is not None and self._process.stdin is not None and self._process.stdout is not None
        target, source = self._process.stdin.fileno(), self._process.stdout.fileno()
        with Selector() as selector:
            selector.register(source, selectors.EVENT_READ)
            if self._unsent:
                selector.register(target, selectors.EVENT_WRITE)
            ready = {key.fd for key, _ in selector.select(seconds)}
        if target in ready:
            self._unsent = self._unsent[os.write(target, self._unsent) :]
        if source in ready:
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
