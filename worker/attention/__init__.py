"""The paged KV cache, and attention over it: one interface, the plain-torch reference, kernels, the choice.

interface.py    what every implementation keeps; batch.py: the structure of a step's rows
pool.py         the KV pool: geometry, byte counts, tensors
reference.py    plain torch; quantised.py: int8 and fp8 with their scales
triton_attention.py   Triton's: decode (decode*.py), prefill (prefill*.py), KV write (write.py)
host_attention.py     the CPU's, compiled by Numba (host_kernels.py, host_write.py); host_decode.py: of all layers of a
                      few decodes, laid out beforehand
selftest.py     the kernels against plain torch, at a worker's start

Law: a slot that was not written, or that a row cannot reach, is never read; what a row gets does not depend on the
others. Outside, use what this module exports, `pool`, and `selftest.AttentionShape`; the kernels' modules are named by
`kvforge.worker.kernels.registry` alone.
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
    """The implementation for `device`: "triton", "reference", or "auto", the fastest that runs there.

    The reference runs everywhere, Numba's kernels on a CPU that they are written for. Triton's run on GPUs, and on the
    CPU under Triton's interpreter, which is for tests. Errors: InvalidConfiguration names
    `attention` where the wanted one cannot run.
    """
    if kind not in KINDS:
        raise InvalidConfiguration("attention", f"{kind!r} is not one of {', '.join(KINDS)}")
    if kind == "reference":
        return ReferenceAttention()
    if kind == "auto" and not device.runs_kernels:
        if device.host_kernels_problem:
            return ReferenceAttention()
        from .host_attention import HostAttention  # imports numba

        return HostAttention()
    if not device.kernels:
        raise InvalidConfiguration("attention", "kernels = 'reference' leaves out Triton's; use attention = 'auto'")
    if importlib.util.find_spec("triton") is None:
        raise InvalidConfiguration("attention", "triton is not installed; use attention = 'auto' or 'reference'")
    from .triton_attention import TritonAttention, is_interpreted  # only here: a CPU worker needs no triton

    if not device.runs_kernels and not is_interpreted():
        problem = f"Triton's kernels need a GPU, and {device.name} is none; use attention = 'auto' or 'reference'"
        raise InvalidConfiguration("attention", problem)
    return TritonAttention(device)
