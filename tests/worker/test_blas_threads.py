"""Numpy's products in test processes use one thread: a second one spins behind each product of the interpreter."""

from __future__ import annotations

import pytest
import torch

from tests import blas_threads


@pytest.mark.skipif(not blas_threads.counts(), reason="numpy multiplies with another library")
def test_numpy_multiplies_in_one_thread() -> None:
    assert set(blas_threads.counts()) == {1}
    assert torch.get_num_threads() == 1
