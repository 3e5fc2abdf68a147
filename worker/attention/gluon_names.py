"""Gluon functions of `prefill_hopper`, under the names of the installed Triton.

Gluon is experimental: from Triton 3.6 to 3.9 three of these names changed, without a change of behaviour. Older
versions lack required features. Newer versions are unknown: the portable kernel serves instead, and the worker's log
gives the reason.
"""

# No `from __future__ import annotations`, as in `prefill_hopper_work`.
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import tma
from triton.language.core import builtin

# Barrier of the threads of a group of warps; until 3.6 under the longer name.
thread_barrier = gl.barrier if hasattr(gl, "barrier") else gl.thread_barrier
# (descriptor, coordinates, barrier, target): a box, by the tensor copy engine; from 3.8 on under the shorter name.
copy_box = tma.async_load if hasattr(tma, "async_load") else tma.async_copy_global_to_shared


@builtin
def as_boxes(buffer, shape, layout, _semantic=None):
    """View shared memory in another shape and layout; from 3.9 on the method has no underscore."""
    reinterpret = getattr(buffer, "reinterpret", None) or buffer._reinterpret
    return reinterpret(buffer.dtype, shape, layout, _semantic=_semantic)
