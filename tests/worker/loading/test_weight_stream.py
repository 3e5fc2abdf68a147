"""Weights read in parallel, straight into their place: the same bits, bounded memory, and errors with names.

The stream runs on the CPU here, through the same host buffers as for a GPU.
"""

from __future__ import annotations

import os
import sys
import threading
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from kvforge.protocol.errors import ModelNotFound
from kvforge.worker.device.device import Device, open_device
from kvforge.worker.device.staged_copies import BUFFERS
from kvforge.worker.loading import fusion
from kvforge.worker.loading.build import build
from kvforge.worker.loading.configuration import read_config
from kvforge.worker.loading.fingerprint import fingerprint
from kvforge.worker.loading.load import load_model
from kvforge.worker.loading.source import find_source
from kvforge.worker.loading.streamed_files import StreamedFile, reading_order
from kvforge.worker.loading.weight_stream import WeightStream, tensors_together
from tests.pairs import every_pair
from tests.worker.loading.random_models import DESCRIBED, save

EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32}
MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("llama", {}),
    "tied, with biases": ("qwen2", {"tie_word_embeddings": True}),
    "packed projections": ("phi3", {"pad_token_id": 0}),
    "experts that are stored one by one": ("qwen3_moe", {"head_dim": 16, **EXPERTS}),
    "a stored buffer": DESCRIBED["glm4_moe"],
}
ALL: dict[str, int] = {"readers": 3, "piece_bytes": 1 << 10, "ahead_bytes": 1 << 13}


@pytest.fixture
def files(tmp_path: Path) -> list[Path]:
    """Two files with tensors of many types and shapes."""
    generator = torch.Generator().manual_seed(5)
    for file in range(2):
        numbers = torch.randn(97, 64, generator=generator)
        tensors = {
            f"{file}.wide": numbers,
            f"{file}.half": numbers.half()[:31],
            f"{file}.bfloat": numbers.bfloat16().view(97, 8, 8),
            f"{file}.octets": torch.arange(5, dtype=torch.uint8),
            f"{file}.scalar": torch.tensor(3.5),
            f"{file}.empty": torch.zeros(0, 4),
            **{f"{file}.attn.{name}.weight": numbers[:rows] + rows for name, rows in (("q_proj", 8), ("k_proj", 4))},
            f"{file}.attn.v_proj.weight": numbers[:4] - 1,
        }
        save_file(tensors, tmp_path / f"{file}.safetensors")
    return sorted(tmp_path.glob("*.safetensors"))


def stored(files: list[Path]) -> dict[str, torch.Tensor]:
    from safetensors.torch import load_file

    return {name: tensor for file in files for name, tensor in load_file(file).items()}


def same(one: torch.Tensor, other: torch.Tensor) -> bool:
    return one.dtype == other.dtype and one.shape == other.shape and torch.equal(one, other)


@pytest.mark.parametrize("order", ["ahead", "backwards", "never"])
def test_every_tensor_has_the_bits_of_its_file(order: str, files: list[Path], cpu: Device) -> None:
    want = stored(files)
    names = sorted(want)
    ahead = {"ahead": names, "backwards": names[::-1], "never": []}[order]
    with WeightStream(files, cpu, ahead, **ALL) as stream:
        assert all(same(stream.take(name), want[name]) for name in names)
        assert stream.bytes_read == sum(each.nbytes for each in want.values())
        assert stream.share == (1.0 if ahead else 0.0)


def test_rows_are_read_alone(files: list[Path], cpu: Device) -> None:
    want = stored(files)["0.wide"]
    with WeightStream(files, cpu, **ALL) as stream:
        file = StreamedFile(stream, files[0], stays=False)
        assert same(file.get_slice("0.wide")[10:20,], want[10:20])
        assert stream.bytes_read == 10 * 64 * 4
        assert same(stream.take("0.wide", ((3, 5), (90, 97))), torch.cat((want[3:5], want[90:97])))
        assert stream.bytes_read == (10 + 9) * 64 * 4
        part = file.get_slice("0.wide")[:, 8:24]
        assert same(part, want[:, 8:24])
        assert part.untyped_storage().nbytes() == part.nbytes, "no view keeps the whole"


def test_projections_of_one_product_are_placed_together(files: list[Path], cpu: Device) -> None:
    names = [f"0.attn.{name}.weight" for name in ("q_proj", "k_proj", "v_proj")]
    with WeightStream(files, cpu, sorted(names), **ALL) as stream:
        parts = [stream.take(name) for name in names]
    joined = tensors_together(parts)
    assert joined is not None
    assert same(joined, torch.cat(parts))
    assert joined.data_ptr() == parts[0].data_ptr()
    assert tensors_together(parts[::-1]) is None
    assert tensors_together([parts[0], parts[1].clone()]) is None


def test_the_memory_of_tensors_goes_with_them(files: list[Path], cpu: Device, monkeypatch: pytest.MonkeyPatch) -> None:
    """The experts of a mixture are stacked and dropped while others are read: the stream must keep none of them."""
    pages: list[weakref.ref[Any]] = []
    frombuffer = torch.frombuffer
    monkeypatch.setattr(
        torch, "frombuffer", lambda memory, **of: pages.append(weakref.ref(memory)) or frombuffer(memory, **of)
    )
    names = [f"0.attn.{name}.weight" for name in ("q_proj", "k_proj", "v_proj")]
    with WeightStream(files, cpu, names, **ALL) as stream:
        for name in names:
            stream.take(name)
        assert len(pages) == 1, "one allocation for the three"
        assert pages[0]() is None
        kept = stream.take("1.wide")
        assert pages[1]() is not None, "a tensor keeps its own"
        del kept


def test_host_memory_and_reading_ahead_are_bounded(
    files: list[Path], cpu: Device, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nothing is taken: reading stops at the bound, plus the tensor that crosses it."""
    host, allocate = [], Device.host_buffer
    monkeypatch.setattr(
        Device,
        "host_buffer",
        lambda self, size, dtype: host.append(size * dtype.itemsize) or allocate(self, size, dtype),
    )
    want = stored(files)
    names = sorted(want)
    with WeightStream(files, cpu, names, readers=3, piece_bytes=1 << 10, ahead_bytes=1 << 13) as stream:
        with stream._changed:
            assert stream._changed.wait_for(lambda: stream._untaken >= 1 << 13, timeout=30)
            assert stream._changed.wait_for(lambda: not stream._pieces, timeout=30)
        assert stream.bytes_read <= (1 << 13) + max(each.nbytes for each in want.values())
        assert stream.bytes_read < sum(each.nbytes for each in want.values())
        taken = [stream.take(name) for name in names]
    assert all(same(one, want[name]) for one, name in zip(taken, names, strict=True))
    assert sum(host) <= 3 * BUFFERS * (1 << 10)


def test_a_file_that_shrinks_is_named_with_the_tensor(files: list[Path], cpu: Device) -> None:
    with WeightStream(files, cpu, **ALL) as stream:
        last = max(stream.stored.values(), key=lambda each: each.offset if each.name.startswith("1.") else 0)
        os.truncate(files[1], last.offset + 3)
        problem = rf"1\.safetensors ends at byte {last.offset + 3}, within its tensor {last.name}: .*fetch it again"
        with pytest.raises(OSError, match=problem):
            stream.take(last.name)
        with pytest.raises(OSError, match=problem):  # and every later one, instead of a wait
            stream.take("0.wide")


def test_no_thread_and_no_file_is_left(files: list[Path], cpu: Device) -> None:
    before = len([*Path("/proc/self/fd").iterdir()])
    with WeightStream(files, cpu, stored(files), **ALL):
        assert any(thread.name.startswith("weights-") for thread in threading.enumerate())
    assert not any(thread.name.startswith("weights-") for thread in threading.enumerate())
    assert len([*Path("/proc/self/fd").iterdir()]) == before


def test_a_failure_of_the_device_ends_the_load(files: list[Path], cpu: Device, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: Any) -> None:
        raise torch.OutOfMemoryError("planted")

    monkeypatch.setattr(Device, "allocate", fail)
    with WeightStream(files, cpu, stored(files), **ALL) as stream, pytest.raises(torch.OutOfMemoryError):
        stream.take("0.wide")


# --------------------------------------------------------------------------------------------------- the whole load


def read_in_parallel(monkeypatch: pytest.MonkeyPatch) -> None:
    for module in ("build", "streamed_files"):
        monkeypatch.setattr(sys.modules[f"kvforge.worker.loading.{module}"], "reads_in_parallel", lambda _device: True)


def filled(folder: Path, device: Device, dtype: torch.dtype, seen: list[tuple[str, float]] | None = None) -> Any:
    source = find_source(folder, "auto")
    say: Callable[[str, float], None] = lambda *each: seen.append(each) if seen is not None else None  # noqa: E731
    return build(source, read_config(source), dtype, device, say, 0)


@pytest.mark.parametrize(("name", "dtype"), every_pair(MODELS, [torch.float32, torch.bfloat16]))
def test_a_model_is_the_same_bit_for_bit(
    name: str, dtype: torch.dtype, tmp_path: Path, cpu: Device, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Parameters, tied weights and buffers, those that are stored and those that transformers computes."""
    folder = save(tmp_path / "model", *MODELS[name])
    want = filled(folder, cpu, dtype)
    read_in_parallel(monkeypatch)
    taken: list[str] = []
    take = WeightStream.take
    monkeypatch.setattr(WeightStream, "take", lambda self, name, *more: taken.append(name) or take(self, name, *more))
    seen: list[tuple[str, float]] = []
    got = filled(folder, cpu, dtype, seen)
    assert sorted(taken) == sorted(set(taken)), "each is read once"
    assert len(taken) > 20
    assert fingerprint(got, "") == fingerprint(want, "")
    assert {key: each.dtype for key, each in got.state_dict().items()} == {
        key: each.dtype for key, each in want.state_dict().items()
    }
    tied = [id(each) for each in (got.get_input_embeddings().weight, got.get_output_embeddings().weight)]
    assert (tied[0] == tied[1]) == name.startswith("tied")
    assert seen[-1] == ("reading 0.0 GB of weights", 1.0)
    assert [share for _, share in seen] == sorted(share for _, share in seen)


def test_joining_the_projections_copies_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = save(tmp_path / "model", "llama", {})
    read_in_parallel(monkeypatch)
    joined = []
    monkeypatch.setattr(fusion, "tensors_together", lambda parts: joined.append(tensors_together(parts)) or joined[-1])
    model = load_model(folder, dtype="float32", block_size=4, device=open_device("cpu", kernels=False))
    assert len(joined) == 6, "two products in each of three layers"
    assert all(each is not None for each in joined)
    assert model.fused is not None
    assert model.fused.layers[1].projected.weight is joined[2]


def test_files_that_shrink_while_the_model_loads_are_an_error_of_the_model(
    tmp_path: Path, cpu: Device, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = save(tmp_path / "model", "llama", {})
    read_in_parallel(monkeypatch)
    enter = WeightStream.__enter__

    def shrink(self: WeightStream) -> WeightStream:
        os.truncate(folder / "model.safetensors", self.stored["model.norm.weight"].offset + 1)
        return enter(self)

    monkeypatch.setattr(WeightStream, "__enter__", shrink)
    with pytest.raises(ModelNotFound, match=r"its weights cannot be read: model\.safetensors ends at byte"):
        filled(folder, cpu, torch.float32)


def test_what_a_text_model_drops_is_not_read() -> None:
    tensors = dict.fromkeys(("model.layers.10.a", "model.layers.2.a", "vision.b"))
    assert reading_order(tensors, {"vision.b"}) == ["model.layers.2.a", "model.layers.10.a"]  # type: ignore[arg-type]


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU here")
@pytest.mark.parametrize("name", MODELS)
def test_a_gpu_gets_the_same_bits(name: str, tmp_path: Path, cpu: Device) -> None:
    folder = save(tmp_path / "model", *MODELS[name])
    gpu = open_device("auto")
    got, want = (filled(folder, device, torch.bfloat16) for device in (gpu, cpu))
    assert {each.device.type for each in got.parameters()} == {"cuda"}
    assert fingerprint(got, "") == fingerprint(want, "")
