"""The write kernel against the plain-torch reference: storage, quantisation, and rotary embedding."""

from __future__ import annotations

import pytest
import torch

pytest.importorskip("triton")

from kvforge.worker.attention import KvLayer, PagedBatch
from kvforge.worker.attention.quantised import TOP, dequantise
from kvforge.worker.attention.reference import rotate
from kvforge.worker.attention.reference import write_kv as write_kv_reference
from kvforge.worker.attention.triton_attention import TritonAttention, is_interpreted
from kvforge.worker.attention.write import write_kv
from kvforge.worker.device.device import open_device
from kvforge.worker.device.targets import current_target
from tests.worker.attention.cases import broken_layer

DEVICE = open_device("auto")
pytestmark = pytest.mark.skipif(
    not DEVICE.runs_kernels and not is_interpreted(), reason="needs a GPU or the interpreter"
)
KV_DTYPES = [torch.float32, torch.float16, torch.bfloat16, torch.int8, torch.float8_e4m3fn]
SLOTS = [3, -1, 9, 0, 31, -1, 16]
# (head size, rotated numbers, query heads, KV heads)
SHAPES = [
    (64, 64, 6, 2),
    (80, 32, 4, 4),
    (128, 0, 2, 1),
    (96, 96, 9, 9),
    (256, 128, 12, 3),
    (64, 16, 1, 1),
    (8, 8, 4, 2),
]


def numbers(*shape: int, dtype: torch.dtype) -> torch.Tensor:
    generator = torch.Generator().manual_seed(sum(shape))
    return torch.randn(shape, generator=generator).to(DEVICE.torch_device, dtype)


def read(layer: KvLayer) -> list[torch.Tensor]:
    return [dequantise(layer.keys, layer.key_scales), dequantise(layer.values, layer.value_scales)]


def close(got: torch.Tensor, want: torch.Tensor, dtype: torch.dtype) -> bool:
    """Equal, or one rounding of `dtype` apart: Triton's interpreter cuts bfloat16 off where hardware rounds."""
    apart = {torch.float32: 2e-6, torch.float16: 2e-3, torch.bfloat16: 1.6e-2}[dtype]
    return torch.allclose(got.float(), want.float(), rtol=apart, atol=apart / 4, equal_nan=True)


@pytest.mark.parametrize("kv_dtype", KV_DTYPES, ids=str)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_stores_what_the_reference_stores(shape: tuple[int, int, int, int], kv_dtype: torch.dtype) -> None:
    head_size, rotated, heads, kv_heads = shape
    for dtype in [torch.bfloat16, torch.float32] if kv_dtype in TOP else [kv_dtype]:
        tokens = len(SLOTS)
        query, key, value = (numbers(tokens, n, head_size, dtype=dtype) for n in (heads, kv_heads, kv_heads))
        key[2], value[3] = 0.0, 0.0
        cos, sin = ((numbers(tokens, rotated, dtype=torch.float32) + n) if rotated else None for n in (0, 1))
        slots = torch.tensor(SLOTS, device=DEVICE.torch_device)
        layers = [broken_layer((4, 8, kv_heads, head_size), kv_dtype, DEVICE) for _ in range(2)]
        got_query = query.clone()
        write_kv(got_query, key, value, cos, sin, layers[0], slots.int(), current_target(DEVICE))
        turned = key if cos is None or sin is None else rotate(key.float(), cos, sin)
        kept = slots >= 0
        write_kv_reference(turned[kept], value[kept], layers[1], slots[kept])
        if kv_dtype in TOP:  # bit by bit where float32 arithmetic gave the same number: a tie may round either way
            for name in ("keys", "values", "key_scales", "value_scales"):
                got, want = (getattr(layer, name).float() for layer in layers)
                differs = ~torch.isclose(got, want, rtol=1e-5, atol=0.0, equal_nan=True)
                assert float(differs.float().mean()) <= (2e-3 if rotated else 0.0), name
        for got, want in zip(*map(read, layers), strict=True):
            tolerance = dtype if kv_dtype not in TOP else torch.bfloat16
            spread = 1.0 if kv_dtype not in TOP else 8.0
            assert close(got / spread, want / spread, tolerance)
        if cos is not None and sin is not None:
            assert close(got_query, rotate(query, cos, sin), dtype)
        else:
            assert torch.equal(got_query, query)


@pytest.mark.parametrize("kv_dtype", TOP, ids=["int8", "fp8"])
def test_every_number_of_a_format_is_rounded_as_torch_does(kv_dtype: torch.dtype) -> None:
    """Every number of the format, both neighbours' midpoints, and the numbers next to these."""
    every = torch.arange(-128, 128, dtype=torch.int8).view(kv_dtype).float()
    every = every[every.abs() <= TOP[kv_dtype]].sort().values  # neither NaN nor -128
    middles = (every[1:] + every[:-1]) / 2
    beside = torch.cat((middles, torch.nextafter(middles, every[1:]), torch.nextafter(middles, every[:-1])))
    row = torch.cat((every, beside))
    row = row[: len(row) // 255 * 255].view(-1, 255)
    row = torch.cat((row, torch.full((len(row), 1), TOP[kv_dtype])), dim=1)  # its scale is 1
    x = row[:, None].to(DEVICE.torch_device)
    layers = [broken_layer((len(x), 1, 1, 256), kv_dtype, DEVICE) for _ in range(2)]
    slots = torch.arange(len(x), device=DEVICE.torch_device)
    write_kv(None, x, -x, None, None, layers[0], slots.int(), current_target(DEVICE))
    write_kv_reference(x, -x, layers[1], slots)
    assert torch.equal(layers[0].keys.float(), layers[1].keys.float())
    assert torch.equal(layers[0].values.float(), layers[1].values.float())
    assert layers[0].key_scales is not None
    assert torch.equal(layers[0].key_scales, torch.ones_like(layers[0].key_scales))


@pytest.mark.parametrize("kv_dtype", TOP, ids=["int8", "fp8"])
def test_rows_out_of_the_ordinary(kv_dtype: torch.dtype) -> None:
    x = numbers(5, 2, 64, dtype=torch.float32)
    x[0, 1] = 0.0
    x[1, 0, 5] = float("nan")
    x[2, 1, 63] = float("inf")
    x[3, 0] = 1e-44
    layers = [broken_layer((5, 1, 2, 64), kv_dtype, DEVICE) for _ in range(2)]
    slots = torch.arange(5, device=DEVICE.torch_device)
    write_kv(None, x, x, None, None, layers[0], slots.int(), current_target(DEVICE))
    write_kv_reference(x, x, layers[1], slots)
    for got, want in zip(*map(read, layers), strict=True):
        assert torch.equal(got.isnan(), want.isnan())
        assert torch.equal(got.nan_to_num(), want.nan_to_num())


def test_only_the_named_slots_change_and_strides_are_honoured() -> None:
    packed = numbers(len(SLOTS), 8, 64, dtype=torch.float32)
    query, key, value = packed.split((4, 2, 2), dim=1)
    cos, sin = numbers(len(SLOTS), 64, dtype=torch.float32), numbers(len(SLOTS), 64, dtype=torch.float32) + 1
    before = packed.clone()
    layer = broken_layer((4, 8, 2, 64), torch.float32, DEVICE)
    output = torch.zeros_like(query)
    slots = torch.tensor(SLOTS, device=DEVICE.torch_device)
    write_kv(query, key, value, cos, sin, layer, slots.int(), current_target(DEVICE), output)
    assert torch.equal(packed, before)
    assert close(output, rotate(query, cos, sin), torch.float32)
    write_kv(query, key, value, cos, sin, layer, slots.int(), current_target(DEVICE))
    assert torch.equal(query, output)
    assert torch.equal(packed[:, 4:], before[:, 4:])
    written = layer.values.flatten(0, 1).isnan().logical_not().all(-1).all(-1)
    assert written.nonzero().flatten().tolist() == sorted(slot for slot in SLOTS if slot >= 0)
    kept = slots >= 0
    assert torch.equal(layer.values.flatten(0, 1)[slots[kept]], value[kept])


@pytest.mark.parametrize("kv_dtype", KV_DTYPES, ids=str)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_any_pool_dtype_goes_with_any_model_dtype(dtype: torch.dtype, kv_dtype: torch.dtype) -> None:
    attention = TritonAttention(DEVICE)
    layers = [broken_layer((4, 8, 2, 64), kv_dtype, DEVICE) for _ in range(2)]
    table = torch.arange(2, dtype=torch.int32)[None].numpy()
    counts = torch.tensor([5], dtype=torch.int32).numpy()
    batch = PagedBatch.build(table, counts, counts, 8, DEVICE)
    query, key, value = (numbers(5, n, 64, dtype=dtype) for n in (4, 2, 2))
    cos, sin = numbers(5, 64, dtype=dtype), numbers(5, 64, dtype=dtype) + 1
    want = rotate(query, cos, sin)
    got = attention.write_rotated(query.clone(), key, value, cos, sin, layers[0], batch)
    assert close(got, want, dtype)
    write_kv_reference(rotate(key, cos, sin), value, layers[1], batch.slot_mapping)
    for got, want in zip(*map(read, layers), strict=True):
        assert torch.equal(got.isnan(), want.isnan())
        one_step = want.nan_to_num().abs().max() / (15 if kv_dtype == torch.float8_e4m3fn else 100)
        assert (got - want).nan_to_num().abs().max() <= one_step
