"""Checks of kernels that run side by side: all run, only lasting failures count, and the first one is named."""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Callable

import pytest
import torch

from kvforge.protocol.errors import KernelError
from kvforge.worker.device.check import require_all_right
from kvforge.worker.device.compilation import CompilationMeter
from kvforge.worker.device.device import Device


@pytest.fixture
def beside(cpu: Device, monkeypatch: pytest.MonkeyPatch) -> Device:
    """A device whose kernels four threads may compile."""
    monkeypatch.setattr(Device, "compile_threads", 4)
    return cpu


def test_where_nothing_is_compiled_checks_run_in_turn(cpu: Device) -> None:
    seen: list[tuple[int, str]] = []
    require_all_right(cpu, [lambda at=at: seen.append((at, threading.current_thread().name)) for at in range(5)])  # type: ignore[misc]
    here = threading.current_thread().name
    assert seen == [(at, here) for at in range(5)]
    require_all_right(cpu, [])


def test_kernels_that_are_interpreted_run_in_one_thread(cpu: Device, monkeypatch: pytest.MonkeyPatch) -> None:
    """In several, Triton's interpreter corrupts memory."""
    monkeypatch.setattr(Device, "runs_kernels", True)
    monkeypatch.setattr("os.sched_getaffinity", lambda _: set(range(16)))
    assert cpu.compile_threads == 1


def test_the_first_check_runs_alone_and_the_others_side_by_side(beside: Device) -> None:
    """Three checks meet: in turn, the first of them would wait forever."""
    barrier, ended = threading.Barrier(3, timeout=30), list[str]()

    def meet() -> None:
        assert ended == ["first"]
        assert torch.is_inference_mode_enabled()
        barrier.wait()

    with torch.inference_mode():
        require_all_right(beside, [lambda: ended.append("first"), meet, meet, meet])


def fails(times: int, name: str, calls: Counter[str]) -> Callable[[], None]:
    def check() -> None:
        calls[name] += 1
        if calls[name] <= times:
            raise KernelError(f"{name} is wrong")

    return check


def test_a_failure_counts_if_it_happens_again_alone(beside: Device, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO")
    calls: Counter[str] = Counter()
    checks = [fails(0, "a", calls), fails(1, "b", calls), fails(0, "c", calls)]
    require_all_right(beside, checks)
    assert calls == {"a": 1, "b": 2, "c": 1}
    assert "repeated alone: b is wrong" in caplog.text


def test_the_first_wrong_kernel_is_named_and_all_checks_end_before(beside: Device) -> None:
    calls: Counter[str] = Counter()
    checks = [fails(0, "a", calls), fails(0, "b", calls), fails(9, "c", calls), fails(9, "d", calls)]
    with pytest.raises(KernelError, match=r"^c is wrong"):
        require_all_right(beside, checks)
    assert calls == {"a": 1, "b": 1, "c": 2, "d": 1}
    with pytest.raises(KernelError, match=r"^x is wrong"):
        require_all_right(beside, [fails(9, "x", calls), fails(9, "y", calls), fails(9, "z", calls)])
    assert calls["y"] == 0, "nothing else runs if the first one fails"


def test_compilations_are_counted() -> None:
    class Times:
        total = 1_500_000

    meter = CompilationMeter()
    meter.note(src=None, times=Times(), cache_hit=False)
    meter.note(src=None, times=Times(), cache_hit=True)
    assert meter.line() == "1 kernels compiled, 1 loaded, 3.0 s of compilation"
