"""Every GPU gets tiles that fit it: its queried limits take precedence over those of its chip's name."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

pytest.importorskip("triton")

from kvforge.protocol.errors import InvalidConfiguration
from kvforge.worker.attention import AttentionOptions, triton_attention
from kvforge.worker.attention.selftest import AttentionShape, self_test
from kvforge.worker.attention.triton_attention import TritonAttention
from kvforge.worker.device.device import Device, open_device
from kvforge.worker.device.target import Target
from kvforge.worker.device.targets import TARGETS, check_dtypes, current_target
from kvforge.worker.loading import load

KIB = 1024
F32, F16, BF16, I8, FP8 = torch.float32, torch.float16, torch.bfloat16, torch.int8, torch.float8_e4m3fn
CHIPS = {  # compute capability, shared memory of a block in KiB, multiprocessors, source of the tiles
    "T4": ((7, 5), 64, 40, "sm_75"),
    "A100": ((8, 0), 163, 108, "sm_80"),
    "A10": ((8, 6), 99, 72, "sm_86"),
    "Orin": ((8, 7), 163, 16, "sm_86"),
    "L4": ((8, 9), 99, 58, "sm_89"),
    "H200": ((9, 0), 227, 132, "sm_90"),
    "B200": ((10, 0), 227, 148, "sm_100"),
    "B300": ((10, 3), 227, 148, "sm_100"),
    "5090": ((12, 0), 99, 170, "sm_120"),
    "GB10": ((12, 1), 99, 48, "sm_120"),
    "a later one": ((13, 0), 300, 200, "sm_120"),
    "a Hopper that grants less": ((9, 0), 99, 132, "sm_89"),
    "a B200 that grants less": ((10, 0), 120, 148, "sm_89"),
}


@pytest.fixture
def chip(monkeypatch: pytest.MonkeyPatch) -> Callable[..., Device]:
    """chip(capability, shared KiB, multiprocessors) -> a device with these properties in torch."""

    def make(capability: tuple[int, int], shared_kib: int, multiprocessors: int = 20) -> Device:
        properties = SimpleNamespace(
            major=capability[0],
            minor=capability[1],
            multi_processor_count=multiprocessors,
            shared_memory_per_block_optin=shared_kib * KIB,
        )
        monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: properties)
        return Device("cuda", torch.device("cuda", 0), "NVIDIA")

    return make


@pytest.mark.parametrize("name", CHIPS)
def test_tiles_are_those_that_fit(name: str, chip: Callable[..., Device]) -> None:
    capability, shared_kib, multiprocessors, like = CHIPS[name]
    target = current_target(chip(capability, shared_kib, multiprocessors))
    assert (target.decode, target.decode_few, target.prefill) == (
        TARGETS[like].decode,
        TARGETS[like].decode_few,
        TARGETS[like].prefill,
    )
    assert TARGETS[like].shared_bytes <= target.shared_bytes == shared_kib * KIB
    assert target.multiprocessors == multiprocessors
    number = 10 * capability[0] + capability[1]
    assert (target.name, target.arch) == (f"sm_{number}", number)
    assert target.hopper == (number == 90)
    assert target.chained == (number >= 90)
    assert (FP8 in target.packed, FP8 in target.bitwise) == (number >= 89, number < 89)
    assert (BF16 in target.lacks) == (number < 80)


def test_where_the_driver_does_not_say_it_is_what_others_of_the_name_have(chip: Callable[..., Device]) -> None:
    for name, target in TARGETS.items():
        if name.startswith("sm_"):
            number = int(name.removeprefix("sm_"))
            assert current_target(chip((number // 10, number % 10), 0)).decode == target.decode
    assert current_target(chip((10, 3), 0)).decode == TARGETS["sm_89"].decode, "unknown: as little as any since sm_80"


@pytest.mark.parametrize(("capability", "shared_kib"), [((7, 0), 96), ((6, 1), 48), ((7, 5), 48)])
def test_what_no_kernel_fits_is_refused_by_name(
    capability: tuple[int, int], shared_kib: int, chip: Callable[..., Device]
) -> None:
    with pytest.raises(
        InvalidConfiguration, match=r"need at least sm_75 with 64 KiB .* set kernels = 'reference'"
    ) as e:
        current_target(chip(capability, shared_kib))
    assert e.value.field == "kernels"


def test_a_dtype_that_the_device_lacks_is_refused_by_name(chip: Callable[..., Device]) -> None:
    turing = chip((7, 5), 64)
    for dtypes, field in (((BF16, BF16), "dtype"), ((BF16, I8), "dtype"), ((F16, BF16), "kv_dtype")):
        with pytest.raises(InvalidConfiguration, match=rf"no bfloat16 .* set {field} = 'float16'") as caught:
            check_dtypes(turing, *dtypes)
        assert caught.value.field == field
    for dtype in (F16, F32):
        for kv_dtype in (dtype, I8, FP8):
            check_dtypes(turing, dtype, kv_dtype)
    check_dtypes(chip((8, 0), 163), BF16, BF16)


def test_it_is_refused_before_a_weight_is_loaded(
    write_config: Callable[..., Path], cpu: Device, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*arguments: Any) -> None:
        raise InvalidConfiguration("dtype", "not here")

    monkeypatch.setattr(Device, "runs_kernels", True)
    monkeypatch.setattr(load, "check_dtypes", refuse)
    monkeypatch.setattr(load, "build", lambda *_: pytest.fail("weights are loaded"))
    with pytest.raises(InvalidConfiguration, match="not here"):
        load.load_model(write_config("llama"), load_format="dummy", dtype="bfloat16", device=cpu, block_size=8)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available() or torch.version.hip is not None, reason="needs an NVIDIA GPU")
@pytest.mark.parametrize(
    "dtypes", [(F16, F16), (BF16, BF16), (F32, F32), (F16, I8), (BF16, I8), (F16, FP8), (BF16, FP8)]
)
@pytest.mark.parametrize("name", [name for name in TARGETS if name.startswith("sm_")])
def test_what_other_chips_run_is_right_on_this_one(
    name: str, dtypes: tuple[torch.dtype, torch.dtype], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Tiles, conversions and products of other chips, where this chip supports them."""
    device, row = open_device("cuda"), TARGETS[name]
    here = current_target(device)
    if row.shared_bytes > here.shared_bytes or (row.hopper and not here.hopper):
        pytest.skip(f"{name}'s tiles do not fit {here.name}")
    if dtypes[0] in row.lacks:
        pytest.skip(f"{name} has no {dtypes[0]}")
    packed = tuple(dtype for dtype in row.packed if dtype in here.packed)
    bitwise = tuple({*row.bitwise, *here.bitwise})
    target = replace(
        row, name=here.name, arch=here.arch, multiprocessors=here.multiprocessors, packed=packed, bitwise=bitwise,
        chained=row.chained and here.chained,
    )  # fmt: skip
    monkeypatch.setattr(triton_attention, "current_target", lambda _: target)
    attention = TritonAttention(device)
    shapes = [
        AttentionShape(heads, 2, head_size, AttentionOptions(head_size**-0.5, window=window, softcap=softcap), sinks)
        for heads, head_size, window, softcap, sinks in (
            (8, 64, 0, 0.0, True),
            (8, 96, 0, 0.0, False),
            (8, 128, 20, 0.0, True),
            (40, 80, 0, 20.0, False),
            (8, 256, 0, 0.0, False),
        )
    ]
    self_test(attention, device, shapes, dtype=dtypes[0], kv_dtype=dtypes[1], block_size=16, remembered_in=tmp_path)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available() or torch.version.hip is not None, reason="needs an NVIDIA GPU")
def test_the_driver_says_how_much_shared_memory_a_block_may_use() -> None:
    device = Device("cuda", torch.device("cuda", 0), "NVIDIA")
    assert 48 * KIB <= device.shared_bytes <= 512 * KIB
    target: Target = current_target(device)
    assert target.shared_bytes == device.shared_bytes
