"""Work that is captured once and replayed in one call: graphs on a GPU, and the memory that they share."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import torch


@dataclass(frozen=True)
class GraphMemory:
    """What graphs share: the memory of their intermediate results, and the stream on which they are captured (torch's
    libraries keep a workspace for each stream)."""

    pool: Any
    stream: torch.cuda.Stream

    @classmethod
    def of(cls, device: torch.device) -> GraphMemory:
        """New memory on a GPU, and its one stream."""
        return cls(torch.cuda.graph_pool_handle(), _capture_stream(device))


class Place:
    """Memory on a GPU, as the protocol that torch and others share describes it (`__cuda_array_interface__`)."""

    def __init__(self, tensor: torch.Tensor) -> None:
        assert tensor.dtype == torch.float32 and tensor.is_contiguous()
        self.__cuda_array_interface__ = {
            "shape": tuple(tensor.shape),
            "typestr": "<f4",
            "data": (tensor.data_ptr(), False),
            "version": 2,
        }


class Captured:
    """Work that was queued once and can be queued again in one call, reading and writing the same places.

    A captured graph on a GPU; on a CPU the function itself.
    """

    def __init__(self, run: Callable[[], None], graph: torch.cuda.CUDAGraph | None) -> None:
        self._run, self._graph = run, graph

    def replay(self) -> None:
        """Queues the work."""
        if self._graph is None:
            self._run()
        else:
            self._graph.replay()


def captured_on(device: torch.device, run: Callable[[], None], memory: GraphMemory) -> Captured:
    """See `Device.capture`."""
    current, side = torch.cuda.current_stream(device), memory.stream
    side.wait_stream(current)
    graph = torch.cuda.CUDAGraph()
    try:
        with torch.cuda.stream(side):
            run()  # compiles, tunes and allocates what stays
            torch.cuda.synchronize(device)
            graph.capture_begin(pool=memory.pool, capture_error_mode="thread_local")
            try:
                run()
            except BaseException:
                with contextlib.suppress(RuntimeError):  # a capture that was broken says so again when it ends
                    graph.capture_end()
                raise
            graph.capture_end()
    finally:
        current.wait_stream(side)
    return Captured(run, graph)


@lru_cache
def _capture_stream(device: torch.device) -> torch.cuda.Stream:
    """One for all captures of a process: a GPU on which more streams have ever worked is slower between two kernels of
    any graph (H200: 70 us a decode step of 290 kernels; see benchmarks/NOTES.md)."""
    return torch.cuda.Stream(device)
