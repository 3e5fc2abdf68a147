"""Triton's interpreter in place of a GPU. Import this before any kernel; it changes the whole test process.

A kernel's module decides at its import whether the kernel is interpreted. Every conftest of tests with kernels
therefore imports this first, because one process imports the test modules of several folders in the order of their
names. With KVFORGE_EMULATED, an emulated GPU takes the interpreter's place (see `tests/emulated.py`). Child processes
do not inherit the setting: a `kvforge up` in a test gets a user's environment.
"""

from __future__ import annotations

import contextlib
import sys

import pytest
import torch

from tests import blas_threads, emulated

# The interpreter multiplies with numpy. Each further thread of OpenBLAS spins for a while behind every product.
blas_threads.set_count(1)

# filelock, which transformers imports, registers an audit hook that refuses a fork while a lock changes hands. It makes
# each `id()` take 1.1 us in place of 0.1, and the interpreter calls that for every operation.
with pytest.MonkeyPatch.context() as without_hook:
    without_hook.setattr(sys, "addaudithook", lambda _hook: None)
    import filelock  # noqa: F401

if emulated.TARGET:
    emulated.enter()
elif not torch.cuda.is_available():
    with contextlib.suppress(ImportError), pytest.MonkeyPatch.context() as environment:
        environment.setenv("TRITON_INTERPRET", "1")  # read when Triton is imported
        from triton import knobs

        environment.setattr(knobs, "propagate_env", False)
        knobs.runtime.interpret = True  # read when a kernel's module is imported
        from tests.worker import interpreting

        interpreting.prepare()

# Now, before another test imports transformers with all of torch's compiler, which takes seconds of each process.
import kvforge.worker.loading.lazy_compiler  # noqa: E402, F401
