"""Inputs and results of a step arrive complete and in order on both sides of the device."""

from __future__ import annotations

import numpy as np
import pytest

from kvforge.worker.device.device import KERNEL_COPY_MAX, open_device
from kvforge.worker.device.queue import STAGING_RING, DeviceEvent, HostBuffer, Staging


@pytest.mark.parametrize("kind", ["cpu", pytest.param("auto", marks=pytest.mark.gpu)])
@pytest.mark.parametrize("size", [1, 1023, 5000, KERNEL_COPY_MAX, KERNEL_COPY_MAX + 3])
def test_there_and_back(kind: str, size: int) -> None:
    device = open_device(kind)
    if kind == "auto" and not device.runs_kernels:
        pytest.skip("no GPU here")
    staging, landing = Staging(device, size + 2), HostBuffer(device, size)
    sent = np.random.default_rng(0).integers(-(1 << 31), 1 << 31, (2 * STAGING_RING, size + 2), dtype=np.int32)
    for number, numbers in enumerate(sent):
        staging.host()[:] = numbers
        staging.send(size)
        fetched = landing.fetch(staging.on_device[:size])
        end = DeviceEvent(device)
        end.wait()
        assert np.array_equal(fetched.array(), numbers[:size]), f"copy {number}"
    assert staging.on_device[size:].tolist() == [0, 0], "more was copied than was sent"
