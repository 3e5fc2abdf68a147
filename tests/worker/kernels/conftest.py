"""Fixtures for tests of kernels."""

from __future__ import annotations

import pytest

from kvforge.worker.device.device import Device
from kvforge.worker.kernels import LayerOperations
from tests import emulated


@pytest.fixture(params=["Numba", "Triton"])
def operations(request: pytest.FixtureRequest, cpu: Device) -> LayerOperations:
    """Return the operations of a CPU, and those of a GPU under Triton's interpreter."""
    if request.param == "Triton":
        pytest.importorskip("triton")
        from kvforge.worker.attention.triton_attention import is_interpreted

        if not is_interpreted() and not emulated.TARGET:
            pytest.skip("needs Triton's interpreter")
        from kvforge.worker.kernels.fused import FusedOperations

        return FusedOperations(cpu)
    if cpu.cpu_kernels_problem:
        pytest.skip(cpu.cpu_kernels_problem)
    from kvforge.worker.kernels.cpu_operations import CpuOperations

    return CpuOperations(cpu)
