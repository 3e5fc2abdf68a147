"""Counts the kernels that Triton compiles and loads, to see what a start spends on them."""

from __future__ import annotations

import threading
from typing import Any


class CompilationMeter:
    """Kernels of this process from `listen` on, from all threads.

    Attributes:
        compiled: Kernels that were compiled.
        loaded: Kernels that came from Triton's cache folder.
        seconds: Time of both, summed over threads.
    """

    def __init__(self) -> None:
        self.compiled = self.loaded = 0
        self.seconds = 0.0
        self._lock = threading.Lock()

    def listen(self) -> None:
        """Begin to count. A version of Triton that reports nothing leaves the numbers at zero."""
        try:
            from triton import knobs

            knobs.compilation.listener = self.note
        except (ImportError, AttributeError):
            return

    def note(self, *, times: Any = None, cache_hit: bool = False, **_: Any) -> None:
        """Count one kernel; Triton's `CompilationListener`."""
        with self._lock:
            self.loaded += cache_hit
            self.compiled += not cache_hit
            self.seconds += getattr(times, "total", 0) / 1e6

    def line(self) -> str:
        """Return the numbers for the log."""
        return f"{self.compiled} kernels compiled, {self.loaded} loaded, {self.seconds:.1f} s of compilation"
