"""The self-test at a worker's start: correct kernels pass and are remembered, a wrong one is refused by name."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("triton")

from kvforge.protocol.errors import WorkerError
from kvforge.worker.attention import AttentionOptions, ReferenceAttention, selftest, triton_attention
from kvforge.worker.attention.plan_items import DECODE_PART, FIELDS, named
from kvforge.worker.attention.selftest import AttentionShape, self_test
from kvforge.worker.attention.triton_attention import TritonAttention, is_interpreted
from kvforge.worker.device.device import open_device

DEVICE = open_device("auto")
pytestmark = [
    pytest.mark.skipif(not DEVICE.runs_kernels and not is_interpreted(), reason="needs a GPU or the interpreter"),
    pytest.mark.filterwarnings("ignore:.*encountered in:RuntimeWarning:triton.*"),
]
SHAPE = AttentionShape(4, 2, 64, AttentionOptions(0.125, window=20, softcap=9.0), sinks=True)
F32, F16, BF16, I8, FP8 = torch.float32, torch.float16, torch.bfloat16, torch.int8, torch.float8_e4m3fn


@pytest.fixture(autouse=True)
def _short(monkeypatch: pytest.MonkeyPatch) -> None:
    if not DEVICE.runs_kernels:
        monkeypatch.setattr(selftest, "_PREFILLS", ((0, 0, 3), (1, -1, 2), (1, 3, 9)))
        monkeypatch.setattr(selftest, "_DECODES", ((0, 0), (0, 1), (1, -1), (1, 0), (6, 2)))


def run(folder: Path, attention: Any = None, dtype: torch.dtype = F32, kv_dtype: torch.dtype = F32) -> None:
    attention = attention or TritonAttention(DEVICE)
    self_test(attention, DEVICE, [SHAPE, SHAPE], dtype=dtype, kv_dtype=kv_dtype, block_size=8, remembered_in=folder)


@pytest.mark.parametrize(("dtype", "kv_dtype"), [(F32, F32), (BF16, BF16), (F16, I8), (BF16, FP8), (F32, BF16)])
def test_right_kernels_pass_and_are_remembered(
    dtype: torch.dtype, kv_dtype: torch.dtype, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run(tmp_path / "new", None, dtype, kv_dtype)
    (kept,) = (tmp_path / "new").iterdir()
    assert "4 query heads, 2 KV heads of 64, window 20, soft cap 9, sinks" in kept.read_text()
    monkeypatch.setattr(selftest, "_checks", lambda *_: pytest.fail("a passed check ran again"))
    run(tmp_path / "new", None, dtype, kv_dtype)


def test_the_reference_has_nothing_to_prove(tmp_path: Path) -> None:
    run(tmp_path, ReferenceAttention())
    assert not list(tmp_path.iterdir())


class Scaled(TritonAttention):
    """Attention with a slightly wrong scaling."""

    def attend(self, query: torch.Tensor, *arguments: Any) -> torch.Tensor:
        return super().attend(query * 1.01, *arguments)


class Sinkless(TritonAttention):
    """Attention without sinks."""

    def attend(self, query: Any, layer: Any, batch: Any, options: AttentionOptions) -> torch.Tensor:
        return super().attend(query, layer, batch, replace(options, sinks=None))


class Leaking(TritonAttention):
    """Attention to one token too many, in decodes."""

    def _decode_plan(self, shape: Any, number: int, batch: Any) -> Any:
        plan = super()._decode_plan(shape, number, batch)
        parts = named(plan[FIELDS:], DECODE_PART)
        parts["end"] += parts["end"] > 0
        return plan


class Careless(TritonAttention):
    """Assigns slot 0 to padding."""

    def write(self, key: Any, value: Any, layer: Any, batch: Any) -> None:
        if batch.is_static:
            batch.kv_slots_on_device.clamp_(min=0)
        super().write(key, value, layer, batch)


@pytest.mark.parametrize(
    ("wrong", "kernel"),
    [(Scaled, "decode"), (Sinkless, "decode"), (Leaking, "decode"), (Careless, "padded decode")],
)
def test_a_wrong_kernel_is_refused_by_name(wrong: type[TritonAttention], kernel: str, tmp_path: Path) -> None:
    with pytest.raises(WorkerError) as caught:
        run(tmp_path, wrong(DEVICE))
    assert f"the {kernel} kernel is wrong for 4 query heads, 2 KV heads of 64" in str(caught.value)
    assert "use attention = 'reference'" in str(caught.value)
    assert not list(tmp_path.iterdir())


def test_a_wrong_rotation_and_a_wrong_rounding_are_refused_by_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    right = triton_attention.write_kv

    def swapped(query: Any, key: Any, value: Any, cos: Any, sin: Any, *others: Any) -> None:
        right(query, key, value, sin, cos, *others)

    monkeypatch.setattr(triton_attention, "write_kv", swapped)
    with pytest.raises(WorkerError, match=r"the rotary write kernel is wrong .* rotated query differs"):
        run(tmp_path)

    def shrunk(query: Any, key: Any, value: Any, *others: Any) -> None:
        right(query, key, value * 0.9, *others)

    monkeypatch.setattr(triton_attention, "write_kv", shrunk)
    with pytest.raises(WorkerError, match=r"the write kernel is wrong .* stored V differs"):
        run(tmp_path, None, F16, I8)


def test_a_folder_that_cannot_be_written_does_no_harm(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("in the way")
    run(tmp_path / "file")


def test_checks_that_run_side_by_side_share_no_workspace(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each gets an instance of its own; here they run in turn, as Triton's interpreter has one thread."""
    monkeypatch.setattr(type(DEVICE), "compile_threads", 8)
    monkeypatch.setattr(selftest, "require_all_right", lambda _device, checks: [check() for check in checks])
    used: list[int] = []
    attend = TritonAttention.attend

    def noting(self: TritonAttention, *arguments: Any) -> torch.Tensor:
        used.append(id(self._workspaces))
        alive.append(self)
        return attend(self, *arguments)

    alive: list[TritonAttention] = []
    monkeypatch.setattr(TritonAttention, "attend", noting)
    attention = TritonAttention(DEVICE)
    run(tmp_path, attention)
    assert len(used) >= 4
    assert len(set(used)) == len(used)
    assert not attention._workspaces
