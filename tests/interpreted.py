"""Triton's interpreter in place of a GPU. Importing this changes the whole test process, before a kernel is imported.

A kernel's module decides when it is imported whether it is interpreted. So every conftest that leads to kernels imports
this first: test modules of several folders are imported into one process, in the order of their names. Nothing that the
process starts inherits it: a `kvforge up` that a test starts is to find what a user's environment says.
"""

from __future__ import annotations

import contextlib

import pytest
import torch

if not torch.cuda.is_available():
    with contextlib.suppress(ImportError), pytest.MonkeyPatch.context() as environment:
        environment.setenv("TRITON_INTERPRET", "1")  # read when Triton is imported
        from triton import knobs

        environment.setattr(knobs, "propagate_env", False)
        knobs.runtime.interpret = True  # read when a kernel's module is imported
        from tests.worker import interpreting

        interpreting.prepare()
