"""The paged KV cache, and attention over it: an interface, a plain-torch reference, kernels, and their choice.

interface.py    the interface of every implementation; batch.py: the structure of a step's rows; sinks.py: sinks
mixed_batch.py  the structure of a captured step with prompt tokens
geometry.py     the layout and the bytes of a block; pool.py: the tensors of a KV pool
windows.py      layers that keep a window, and their rows in a step; states.py: recurrent states in pages
hidden_states.py      hidden states of tokens, for heads that draft
reference.py    plain torch; quantised.py: int8 and fp8 with their scales
triton_attention.py   Triton's kernels: decode (decode*.py), prefill (prefill*.py), KV write (write.py);
                      shared_decode*.py: parts that decodes have in common, planned by shared_plan.py
cpu_attention.py      the CPU's kernels (see `kvforge.worker.cpu`); cpu_decode.py: prepared calls
                      for a few decodes in all layers; shared_prefixes.py: rows that begin alike
selftest.py     compares the kernels with plain torch, at a worker's start

Law: no kernel reads a slot that was not written or that the row cannot reach, and a row's result does not depend on
other rows. Code outside uses the exports of this module, `pool`, and `selftest.AttentionShape`; only
`kvforge.worker.kernels.registry` names the kernels' modules.
"""

from __future__ import annotations

import importlib.util

from kvforge.protocol.errors import InvalidConfiguration
from kvforge.worker.device.device import Device

from .batch import PagedBatch
from .interface import AttentionOptions, KvLayer, PagedAttention
from .reference import PLAIN, ReferenceAttention

__all__ = [
    "PLAIN",
    "AttentionOptions",
    "KvLayer",
    "PagedAttention",
    "PagedBatch",
    "ReferenceAttention",
    "choose_attention",
]
KINDS = ("auto", "triton", "reference")


def choose_attention(device: Device, kind: str = "auto") -> PagedAttention:
    """Return an attention implementation for a device.

    The reference runs everywhere, Numba's kernels on supported CPUs, Triton's kernels on GPUs, and on the CPU under
    Triton's interpreter, for tests.

    Args:
        device: The device.
        kind: "triton", "reference", or "auto" (the fastest that runs there).

    Returns:
        The implementation.

    Raises:
        InvalidConfiguration: Names `attention` if the requested implementation cannot run.
    """
    if kind not in KINDS:
        raise InvalidConfiguration("attention", f"{kind!r} is not one of {', '.join(KINDS)}")
    if kind == "reference":
        return ReferenceAttention()
    if kind == "auto" and not device.runs_kernels:
        if device.cpu_kernels_problem:
            return ReferenceAttention()
        from .cpu_attention import CpuAttention  # imports numba

        return CpuAttention()
    if not device.kernels:
        raise InvalidConfiguration("attention", "kernels = 'reference' disables Triton; use attention = 'auto'")
    if importlib.util.find_spec("triton") is None:
        raise InvalidConfiguration("attention", "triton is not installed; use attention = 'auto' or 'reference'")
    from .triton_attention import TritonAttention, is_interpreted  # imported here: a CPU worker needs no triton

    if not device.runs_kernels and not is_interpreted():
        problem = f"Triton's kernels need a GPU, but this is {device.name}; use attention = 'auto' or 'reference'"
        raise InvalidConfiguration("attention", problem)
    return TritonAttention(device)
