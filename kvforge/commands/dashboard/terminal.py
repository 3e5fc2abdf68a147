"""The terminal as a full screen: alternate page, keys without Enter, restored in any case."""

from __future__ import annotations

import asyncio
import os
import sys
import termios
import tty
from types import TracebackType
from typing import Self

ENTER, LEAVE = "\x1b[?1049h\x1b[?25l\x1b[2J", "\x1b[?25h\x1b[?1049l"
HOME, TO_END_OF_LINE, TO_END = "\x1b[H", "\x1b[K", "\x1b[J"
KEYS = {"\x1b[A": "up", "\x1b[B": "down", "\x1bOA": "up", "\x1bOB": "down", "k": "up", "j": "down"}


class Terminal:
    """Takes over the terminal of standard input and output while entered. Ctrl-C stays a signal."""

    def __enter__(self) -> Self:
        self._input = sys.stdin.fileno()
        self._before = termios.tcgetattr(self._input)
        try:
            tty.setcbreak(self._input)
            self._write(ENTER)
        except BaseException:
            self._restore()
            raise
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self._restore()

    def _restore(self) -> None:
        termios.tcsetattr(self._input, termios.TCSADRAIN, self._before)
        self._write(LEAVE)

    def size(self) -> tuple[int, int]:
        """Return the current number of columns and lines."""
        found = os.get_terminal_size(sys.stdout.fileno())
        return max(1, found.columns), max(1, found.lines)

    async def keys(self, wait_s: float) -> list[str]:
        """Wait for keys, and return those pressed.

        Args:
            wait_s: The limit for the first key, in seconds.

        Returns:
            The keys; `up` and `down` are arrows, "q" stands for a closed input.
        """
        loop, pressed = asyncio.get_running_loop(), asyncio.Event()
        loop.add_reader(self._input, pressed.set)
        try:
            async with asyncio.timeout(wait_s):
                await pressed.wait()
        except TimeoutError:
            return []
        finally:
            loop.remove_reader(self._input)
        try:
            text = os.read(self._input, 1024).decode(errors="replace")
        except OSError:
            return ["q"]
        if not text:
            return ["q"]
        found = []
        while text:
            sequence = next((known for known in KEYS if text.startswith(known)), text[0])
            found.append(KEYS.get(sequence, sequence))
            text = text[len(sequence) :]
        return found

    def show(self, lines: list[str]) -> None:
        """Draw lines over the previous ones. Nothing is cleared first, so that nothing flickers."""
        self._write(HOME + f"{TO_END_OF_LINE}\n".join(lines) + TO_END_OF_LINE + TO_END)

    def _write(self, text: str) -> None:
        sys.stdout.write(text)
        sys.stdout.flush()
