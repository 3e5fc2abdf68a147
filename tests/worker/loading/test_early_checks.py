"""Kernels are checked while weights are read: once, after the model is built, and without any say in the load."""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from kvforge.worker.attention.interface import AttentionOptions
from kvforge.worker.attention.selftest import AttentionShape
from kvforge.worker.device.device import Device, open_device
from kvforge.worker.loading import early_checks
from kvforge.worker.loading.early_checks import EarlyChecks
from kvforge.worker.loading.load import load_model
from tests.worker.loading.random_models import save

SHAPE = AttentionShape(4, 2, 64, AttentionOptions(0.125))


@pytest.fixture
def compiles(cpu: Device, monkeypatch: pytest.MonkeyPatch) -> Device:
    """A device for which several threads compile kernels."""
    monkeypatch.setattr(Device, "compile_threads", 4)
    return cpu


@pytest.fixture
def checked(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """What was checked, in order."""
    found: list[Any] = []
    monkeypatch.setattr(early_checks, "copies_test", lambda _device: found.append("copies"))
    monkeypatch.setattr(
        early_checks, "attention_test", lambda _attention, _device, kinds, **given: found.append((kinds, given))
    )
    monkeypatch.setattr(early_checks, "sampling_test", lambda _device, size: found.append(size))
    return found


def checks(device: Device) -> EarlyChecks:
    return EarlyChecks(device, "auto", torch.bfloat16, torch.int8, 16)


def test_they_begin_once_when_the_shapes_are_known(compiles: Device, checked: list[Any]) -> None:
    early = checks(compiles)
    early.begin()
    early.end()
    assert checked == []
    early._kinds, early._vocab_size = (SHAPE,), 97
    early.begin()
    early.begin()
    early.end()
    given = {"dtype": torch.bfloat16, "kv_dtype": torch.int8, "block_size": 16}
    assert checked[0] == "copies", "it loads Triton for the others"
    assert sorted(checked[1:], key=str) == [((SHAPE,), given), 97]


def test_nothing_is_checked_early_where_nothing_is_compiled(cpu: Device, checked: list[Any]) -> None:
    early = checks(cpu)
    early._kinds = (SHAPE,)
    early.begin()
    early.end()
    assert checked == []


def test_a_failure_is_left_to_the_check_at_start(
    compiles: Device, checked: list[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: Any, **__: Any) -> None:
        raise RuntimeError("planted")

    monkeypatch.setattr(early_checks, "attention_test", fail)
    early = checks(compiles)
    early._kinds = (SHAPE,)
    early.begin()
    early.end()
    assert checked == ["copies", 0], "the others run all the same"


def test_a_load_checks_the_models_shapes_after_it_is_built(
    compiles: Device, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """While transformers builds a model, torch's default dtype is the model's, in every thread."""
    folder = save(tmp_path / "model", "llama", {})
    for module in ("build", "streamed_files"):
        monkeypatch.setattr(sys.modules[f"kvforge.worker.loading.{module}"], "reads_in_parallel", lambda _device: True)
    seen: list[Any] = []
    over = threading.Event()

    def note(self: EarlyChecks) -> None:
        seen.extend((torch.get_default_dtype(), self._kinds, self._vocab_size))
        over.set()

    monkeypatch.setattr(EarlyChecks, "_run", note)
    ended: list[bool] = []
    end: Callable[[EarlyChecks], None] = EarlyChecks.end
    monkeypatch.setattr(EarlyChecks, "end", lambda self: (end(self), ended.append(over.is_set())))
    model = load_model(folder, dtype="bfloat16", block_size=4, device=open_device("cpu", kernels=False))
    default, kinds, vocab_size = seen
    assert default == torch.float32
    assert len(kinds) == len(model.geometry.layers)
    assert {(each.kv_heads, each.head_size) for each in kinds} == {
        (each.kv_heads, each.head_size) for each in model.geometry.layers
    }
    assert vocab_size == model.vocab_size
    assert ended == [True], "the check at start waits for them"
