"""What launches of a kernel would have compiled, without a device to launch it on."""

from __future__ import annotations

from typing import Any

import torch

from worker.attention.aot import DTYPE_NAMES, Configuration


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
