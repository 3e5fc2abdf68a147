"""Batches of copies: what is asked of the driver, and what it must have."""

from __future__ import annotations

import logging
import sys
from dataclasses import replace
from types import ModuleType, SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from kvforge.worker.device.copy_batches import FIRST_RUNTIME, CopyBatches, copy_batches_of
from kvforge.worker.device.device import Device, open_device
from tests.worker.device.batches import FakeRuntime


def test_a_batch_is_one_call() -> None:
    runtime, octets = FakeRuntime(), np.arange(64, dtype=np.uint8)
    at = octets.ctypes.data
    batches = CopyBatches(runtime, lambda: 77)
    batches.queue(at + np.array([40, 50]), at + np.array([1, 9]), np.array([8, 3]))
    assert octets[40:48].tolist() == list(range(1, 9))
    assert octets[50:53].tolist() == [9, 10, 11]
    assert len(runtime.calls) == 1 and runtime.queues == [77]


# behaviour: a refused batch is an error that names it, not a block with old bytes
def test_a_refused_batch_is_an_error() -> None:
    octets = np.zeros(16, np.uint8)
    at = np.array([octets.ctypes.data])
    batches = CopyBatches(FakeRuntime(result=801), lambda: 0)
    with pytest.raises(RuntimeError, match="cudaMemcpyBatchAsync of 1 copies failed: 801"):
        batches.queue(at, at + 8, np.array([8]))


class OnTheHost(FakeRuntime):
    """A runtime whose device is the host; it may copy wrong bytes, or fail."""

    def __init__(self, wrong: int = 0, **given: Any) -> None:
        super().__init__(**given)
        self._wrong = wrong

    def cudaMemcpyBatchAsync(self, *given: Any) -> tuple[int]:  # noqa: N802 - CUDA's name
        """Copy, from so many bytes further."""
        targets, sources, *others = given
        return super().cudaMemcpyBatchAsync(targets, [source + self._wrong for source in sources], *others)


class OfAnotherVersion(FakeRuntime):
    """Bindings without a name that batches need."""

    cudaMemcpySrcAccessOrder = SimpleNamespace()  # noqa: N815 - CUDA's name


@pytest.mark.parametrize(
    ("runtime", "problem"),
    [
        (OnTheHost(), ""),
        (OnTheHost(version=FIRST_RUNTIME - 10), None),
        (OnTheHost(result=801), "failed: 801"),
        (OnTheHost(wrong=1), "gave other bytes"),
        (OfAnotherVersion(), "cudaMemcpySrcAccessOrderStream"),
        (None, None),
    ],
)
def test_a_device_without_working_batches_has_none(
    runtime: FakeRuntime | None, problem: str | None, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """problem: None: no word about it."""
    bindings = None if runtime is None else ModuleType("cuda.bindings")
    if bindings is not None:
        bindings.runtime = runtime  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "cuda", ModuleType("cuda"))
    monkeypatch.setitem(sys.modules, "cuda.bindings", bindings)
    monkeypatch.setattr(torch.cuda, "Stream", lambda _: SimpleNamespace(cuda_stream=5))
    monkeypatch.setattr(torch.cuda, "current_stream", lambda _: SimpleNamespace(cuda_stream=5))
    monkeypatch.setattr(torch.cuda, "stream", lambda _: np.errstate())  # a context that does nothing here
    monkeypatch.setattr(Device, "host_buffer", lambda _, size, dtype: torch.zeros(size, dtype=dtype))
    monkeypatch.setattr(Device, "synchronize", lambda _: None)
    device = replace(open_device("cpu"), kind="cuda")
    with caplog.at_level(logging.WARNING):
        batches = copy_batches_of(device)
    assert (batches is not None) == (problem == "")
    assert (problem or "") in caplog.text
    assert bool(caplog.text) == bool(problem)


def test_other_devices_have_none(cpu: Device) -> None:
    assert copy_batches_of(cpu) is None
    assert copy_batches_of(replace(cpu, kind="hip")) is None


@pytest.mark.gpu
def test_a_gpu_copies_a_batch() -> None:
    device = open_device("auto")
    if device.kind != "cuda":
        pytest.skip("no NVIDIA GPU here")
    batches = copy_batches_of(device)
    assert batches is not None, "the CUDA build of torch brings cuda-bindings"
    ours = device.host_buffer(1 << 20, torch.uint8).random_(0, 256)
    there = torch.zeros(1 << 20, dtype=torch.uint8, device=device.torch_device)
    places = np.random.default_rng(0).permutation(256) << 12
    device.synchronize()
    with torch.cuda.stream(torch.cuda.Stream(device.torch_device)):
        batches.queue(there.data_ptr() + places, ours.data_ptr() + places[::-1], np.full(256, 1 << 12))
    device.synchronize()
    found = there.cpu().view(256, -1)
    assert all(
        torch.equal(found[to >> 12], ours.view(256, -1)[at >> 12]) for to, at in zip(places, places[::-1], strict=True)
    )
