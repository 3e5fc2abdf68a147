"""Compiling kernels for devices that are not here, and what launches of a kernel would have compiled."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import torch

from worker.attention.aot import DTYPE_NAMES, Configuration

# A fifth less to do for the compiler, whose code stays the same: glibc keeps what it frees at hand, and no instruction
# is traced back to its line.
QUICKER = {
    "GLIBC_TUNABLES": "glibc.malloc.tcache_count=65535:glibc.malloc.tcache_max=4096",
    "TRITON_DISABLE_LINE_INFO": "1",
}


def compiler_environment(cache: Path) -> dict[str, str]:
    """The environment of a process that compiles: not interpreting, and with a cache of its own."""
    inherited = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    return inherited | QUICKER | {"TRITON_CACHE_DIR": str(cache)}


class Launches:
    """Stands for a kernel: launched, it notes what would be compiled."""

    def __init__(self, kernel: Any) -> None:
        self.kernel, self.made = kernel, list[Configuration]()

    def __getitem__(self, grid: tuple[int, ...]) -> Any:
        return self._launch

    def _launch(self, *arguments: Any, num_warps: int, num_stages: int = 1, **constants: Any) -> None:
        named = dict(zip(self.kernel.arg_names, arguments, strict=False))
        pointers = {name: DTYPE_NAMES[it.dtype] for name, it in named.items() if isinstance(it, torch.Tensor)}
        constants |= dict.fromkeys(name for name, it in named.items() if it is None)
        self.made.append(Configuration("", self.kernel, pointers, constants, num_warps, num_stages, False))
