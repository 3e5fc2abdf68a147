"""Elementwise functions on a CPU: bits for every size of the tensor, number of threads and instruction set."""

from __future__ import annotations

import os
import subprocess
import sys
from typing import Any

import pytest
import torch

from kvforge.worker.kernels.partition import GELU_SERIAL_MAX, GRAIN, VECTOR_STEP, aligned_count, apply_aligned

from . import steady_functions

THREADS = (1, 2, 3, 5, 7, 12, 31, 48)
ONES = (1, 63, 64, 65, 16384, 16385, GRAIN, GRAIN + 1, 3 * GRAIN - 1, 100_000, 7 * GRAIN + 5, 10_000_000)


@pytest.mark.parametrize("threads", range(1, 49))
def test_every_thread_gets_whole_vectors(threads: int) -> None:
    for count in ONES:
        length = aligned_count(count, threads)
        elementwise = min(threads, -(-length // GRAIN))
        gelu = min(threads, -(-length // max(1, length // threads))) if length > GELU_SERIAL_MAX else 1
        for parts in (elementwise, gelu):  # as ATen/ParallelOpenMP.h cuts a range
            assert length % VECTOR_STEP == 0 and -(-length // parts) % VECTOR_STEP == 0
        assert count <= length and aligned_count(length, threads) == length
        assert length < 1.25 * count + VECTOR_STEP * threads * threads


def cases() -> list[Any]:
    """Return vector instructions and shares of the pairs: where torch has AVX-512, those of AVX2 are soak tests."""
    older = [pytest.mark.soak] if torch.backends.cpu.get_cpu_capability() == "AVX512" else []
    few = [pytest.param("avx2", 7, marks=older), ("avx512", 7)]
    return few + [pytest.param(each, 1, marks=pytest.mark.soak) for each in ("avx2", "avx512")]


@pytest.mark.parametrize(("capability", "share"), cases())
def test_bits_do_not_depend_on_place_size_or_threads(capability: str, share: int) -> None:
    """With every number of threads and every size for each function, and in the soak test with every pair of both."""
    if not getattr(torch.cpu, f"_is_{capability}_supported")():
        pytest.skip(f"this CPU has no {capability}")
    # Waiting threads must not spin: 48 threads may share two cores.
    environment = {**os.environ, "ATEN_CPU_CAPABILITY": capability, "OMP_WAIT_POLICY": "passive"}
    command = [sys.executable, "-m", "tests.worker.kernels.steady_functions", str(share), *map(str, THREADS)]
    run = subprocess.run(command, capture_output=True, text=True, env=environment, timeout=300)
    assert run.stdout == f"{capability.upper()}\n" and run.returncode == 0, run.stdout + run.stderr


def test_the_comparison_finds_an_unaligned_function() -> None:
    """The same functions without alignment differ, so the comparison above can fail."""
    if torch.backends.cpu.get_cpu_capability() not in ("AVX2", "AVX512"):
        pytest.skip("torch has no vector loops for this CPU")
    found = {name for name, *_ in steady_functions.unsteady(steady_functions.ALIGNED, [3])}
    assert {"silu", "gelu by tanh", "sigmoid", "mish"} <= found


@pytest.mark.parametrize("shape", [(0,), (3, 0, 5), (7, 9), (1, 300, 100)])
def test_the_shape_stays(shape: tuple[int, ...]) -> None:
    x = torch.randn(shape)
    torch.testing.assert_close(apply_aligned(torch.nn.functional.silu, x), torch.nn.functional.silu(x))
    wide = torch.randn(*shape[:-1], 2 * shape[-1])[..., : shape[-1]]  # half of a fused product
    torch.testing.assert_close(apply_aligned(torch.nn.functional.silu, wide), torch.nn.functional.silu(wide))
