"""A CUDA runtime that copies on the host."""

from __future__ import annotations

import ctypes
from types import SimpleNamespace
from typing import Any


class FakeRuntime:
    """The part of `cuda.bindings.runtime` that `CopyBatches` calls.

    Args:
        version: Of the runtime and of the driver.
        result: What a call for a batch returns; nothing is copied unless it is 0.

    Attributes:
        calls: (targets, sources, sizes) of each call.
        queues: The queue of each call.
    """

    cudaMemcpyAttributes = SimpleNamespace  # noqa: N815 - CUDA's name
    cudaMemcpySrcAccessOrder = SimpleNamespace(cudaMemcpySrcAccessOrderStream=1)  # noqa: N815 - CUDA's name

    def __init__(self, version: int = 12080, result: int = 0) -> None:
        self._version, self._result = version, result
        self.calls: list[tuple[list[int], list[int], list[int]]] = []
        self.queues: list[int] = []

    def cudaRuntimeGetVersion(self) -> tuple[int, int]:  # noqa: N802 - CUDA's name
        """Return an error and the version."""
        return 0, self._version

    cudaDriverGetVersion = cudaRuntimeGetVersion  # noqa: N815 - CUDA's name

    def cudaMemcpyBatchAsync(self, *given: Any) -> tuple[int]:  # noqa: N802 - CUDA's name
        """Copy, last pair first: a batch has no order."""
        targets, sources, sizes, count, attributes, begins, kinds, queue = given
        assert len(targets) == len(sources) == len(sizes) == count > 0
        assert len(attributes) == kinds == 1 and begins == [0] and attributes[0].srcAccessOrder == 1
        self.calls.append((targets, sources, sizes))
        self.queues.append(queue)
        if not self._result:
            for target, source, size in zip(*map(reversed, (targets, sources, sizes)), strict=True):  # type: ignore[call-overload]
                ctypes.memmove(target, source, size)
        return (self._result,)
