"""Captured work that is replayed with one call: graphs on a GPU, and the memory that they share."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import torch


@dataclass(frozen=True)
class GraphMemory:
    """Resources that graphs share.

    Attributes:
        pool: Memory of their intermediate results.
        stream: The stream of their capture (torch's libraries keep a workspace for each stream).
    """

    pool: Any
    stream: torch.cuda.Stream

    @classmethod
    def of(cls, device: torch.device) -> GraphMemory:
        """Return new memory on a GPU, with the process's one capture stream."""
        return cls(torch.cuda.graph_pool_handle(), _capture_stream(device))


class CudaArray:
    """GPU memory described by `__cuda_array_interface__`, the protocol that torch and other libraries share."""

    def __init__(self, tensor: torch.Tensor) -> None:
        assert tensor.dtype == torch.float32 and tensor.is_contiguous()
        self.__cuda_array_interface__ = {
            "shape": tuple(tensor.shape),
            "typestr": "<f4",
            "data": (tensor.data_ptr(), False),
            "version": 2,
        }


class Captured:
    """Work that was queued once and can be queued again with one call, reading and writing the same memory.

    On a GPU this is a captured graph, on a CPU the function itself.
    """

    def __init__(self, run: Callable[[], None], graph: torch.cuda.CUDAGraph | None) -> None:
        self._run, self._graph = run, graph

    def replay(self) -> None:
        """Queue the work."""
        if self._graph is None:
            self._run()
        else:
            self._graph.replay()


def captured_on(device: torch.device, run: Callable[[], None], memory: GraphMemory) -> Captured:
    """Capture on a GPU; see `Device.capture`."""
    current, side = torch.cuda.current_stream(device), memory.stream
    side.wait_stream(current)
    graph = torch.cuda.CUDAGraph()
    try:
        with torch.cuda.stream(side):
            run()  # compiles, tunes and allocates lasting memory
            torch.cuda.synchronize(device)
            graph.capture_begin(pool=memory.pool, capture_error_mode="thread_local")
            try:
                run()
            except BaseException:
                with contextlib.suppress(RuntimeError):  # ending a broken capture raises once more
                    graph.capture_end()
                raise
            graph.capture_end()
    finally:
        current.wait_stream(side)
    return Captured(run, graph)


@lru_cache
def _capture_stream(device: torch.device) -> torch.cuda.Stream:
    """Return the one stream for all captures of the process.

    Every stream that has ever worked on a GPU slows the gap between kernels of any graph (H200: 70 us for a decode
    step of 290 kernels; see benchmarks/NOTES.md).
    """
    return torch.cuda.Stream(device)
