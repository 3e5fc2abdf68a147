"""Geometry, byte counts and the KV tensors themselves."""

from __future__ import annotations

import gc
import os
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from kvforge import worker
from kvforge.protocol.errors import InvalidConfiguration
from kvforge.worker.attention.geometry import DRAFT_ROWS_MAX, DRAFT_TOKENS_MAX
from kvforge.worker.attention.pool import KV_DTYPES, SLICED_COPIES_MAX, KvGeometry, KvPool, LayerShape
from kvforge.worker.device.device import Device, open_device

ONES: dict[str, Any] = {"layers": 1, "kv_heads": 1, "head_size": 1, "block_size": 1, "kv_dtype": "float32"}


def geometry(**fields: Any) -> KvGeometry:
    return KvGeometry.uniform(**(ONES | fields))


def test_layers_that_share_memory_count_once(cpu: Device) -> None:
    own, other = LayerShape(2, 8), LayerShape(1, 16)
    found = KvGeometry((own, other, replace(own, shared_with=0)), 4, "int8")
    assert found.bytes_per_block == KvGeometry((own, other), 4, "int8").bytes_per_block
    pool = KvPool(found, 3, cpu)
    assert pool.layers[2] is pool.layers[0]
    tensors = list(pool.tensors())
    assert len(tensors) == 2 * 4
    assert sum(each.numel() * each.itemsize for each in tensors) == pool.bytes
    pool.close()
    assert not list(pool.tensors())


@pytest.mark.parametrize("kv_dtype", KV_DTYPES)
def test_latents_are_stored_once(kv_dtype: str, cpu: Device) -> None:
    """DeepSeek's 576 numbers of a token take half the bytes of one KV head of that size."""
    shape = LayerShape(1, 576, latent=512)
    found = KvGeometry((shape, shape), 4, kv_dtype)
    dtype = found.dtype
    assert found.bytes_per_block == 2 * 4 * (576 * dtype.itemsize + dtype.scale_bytes)
    assert 2 * found.bytes_per_block == KvGeometry((replace(shape, latent=0),) * 2, 4, kv_dtype).bytes_per_block
    pool = KvPool(found, 3, cpu)
    assert sum(each.numel() * each.itemsize for each in pool.tensors()) == pool.bytes
    (layer, _) = pool.layers
    assert layer.values.shape == (3, 4, 1, 512) and layer.values.data_ptr() == layer.keys.data_ptr()
    pool.zero_blocks(np.array([0, 1, 2], np.int32))
    layer.keys[0] = 1
    pool.copy_blocks(np.array([[0, 2, 3]], np.int32))
    assert [float(each) for each in layer.values[2].float().sum((1, 2))] == [512.0] * 3 + [0.0]


@pytest.mark.parametrize("shape", [LayerShape(1, 8, latent=9), LayerShape(1, 8, latent=-1), LayerShape(2, 8, latent=4)])
def test_a_latent_is_a_part_of_one_head(shape: LayerShape) -> None:
    with pytest.raises(InvalidConfiguration, match="expected a part of one head") as caught:
        KvGeometry((shape,), 4, "float32")
    assert caught.value.field == "latent"


@pytest.mark.parametrize("shape", [LayerShape(2, 8, 1), LayerShape(2, 8, 2), LayerShape(2, 8, -1), LayerShape(2, 8, 3)])
def test_memory_is_shared_with_an_earlier_layer_of_the_same_shape(shape: LayerShape) -> None:
    with pytest.raises(InvalidConfiguration, match="layer 2 cannot share the memory of layer") as caught:
        KvGeometry((LayerShape(2, 8), LayerShape(1, 16), shape), 4, "float32")
    assert caught.value.field == "shared_with"


# behaviour 1
@pytest.mark.parametrize("field", ["layers", "kv_heads", "head_size", "block_size"])
@pytest.mark.parametrize("value", [0, -1, -(2**40), 1.5, True])
def test_geometry_refuses_by_field(field: str, value: Any) -> None:
    with pytest.raises(InvalidConfiguration) as caught:
        geometry(**{field: value})
    assert caught.value.field == field


# behaviour 1
@pytest.mark.parametrize("blocks", [0, -3])
def test_pool_refuses_blocks(blocks: int, cpu: Device) -> None:
    with pytest.raises(InvalidConfiguration) as caught:
        KvPool(geometry(), blocks, cpu)
    assert caught.value.field == "blocks"


# behaviour 1
def test_all_ones_is_accepted(cpu: Device) -> None:
    pool = KvPool(geometry(), 1, cpu)
    assert pool.bytes == 8
    assert pool.layers[0].keys.shape == (1, 1, 1, 1)


# behaviour 2
def test_bytes_per_block() -> None:
    assert geometry(layers=30, kv_heads=3, head_size=64, block_size=16).bytes_per_block == 2 * 30 * 3 * 64 * 16 * 4
    uneven = KvGeometry((LayerShape(2, 64), LayerShape(1, 128), LayerShape(8, 80)), 8, "float16")
    assert uneven.bytes_per_block == 2 * (2 * 64 + 128 + 8 * 80) * 8 * 2


# behaviour 2
@pytest.mark.parametrize(
    ("fields", "named"),
    [
        ({"head_size": 2**62}, "bytes_per_block"),
        ({"kv_heads": 2**31, "head_size": 2**31}, "bytes_per_block"),
        ({"block_size": 2**60}, "bytes_per_block"),
        ({"layers": 2**60}, "layers"),
    ],
)
def test_bytes_per_block_is_bounded(fields: dict[str, int], named: str) -> None:
    with pytest.raises(InvalidConfiguration) as caught:
        geometry(**fields)
    assert caught.value.field == named


# behaviour 2
def test_largest_block_fits_exactly_and_one_more_does_not() -> None:
    largest = geometry(kv_dtype="float16", head_size=2**60 + (2**60 - 1))  # 4 bytes per element of K and V: 2^63 - 4
    assert largest.bytes_per_block == 2**63 - 4
    with pytest.raises(InvalidConfiguration):
        geometry(kv_dtype="float16", head_size=2**61)


# behaviour 2
@pytest.mark.parametrize("blocks", [2**61, 10**9])
def test_oversized_pool_is_refused_before_allocation(blocks: int, cpu: Device) -> None:
    with pytest.raises(InvalidConfiguration) as caught:
        KvPool(geometry(head_size=1024, layers=64), blocks, cpu)
    assert caught.value.field == "blocks"


# behaviour 3
@pytest.mark.parametrize(
    ("kv_dtype", "per_head"), [("float32", 256), ("float16", 128), ("bfloat16", 128), ("int8", 68), ("fp8", 68)]
)
def test_sizes_follow_the_dtype(kv_dtype: str, per_head: int) -> None:
    sized = geometry(layers=3, kv_heads=2, head_size=64, block_size=16, kv_dtype=kv_dtype)
    assert sized.bytes_per_block == 2 * 3 * 2 * 16 * per_head
    assert sized.blocks_for(1_000_000) == 1_000_000 // sized.bytes_per_block
    assert sized.bytes_for(7) == 7 * sized.bytes_per_block


# behaviour 3
@pytest.mark.parametrize("kv_dtype", KV_DTYPES)
def test_allocated_bytes_are_the_counted_bytes(kv_dtype: str, cpu: Device) -> None:
    pool = KvPool(KvGeometry((LayerShape(2, 16), LayerShape(1, 8)), 4, kv_dtype), 5, cpu)
    tensors = list(pool.tensors())
    assert sum(t.numel() * t.element_size() for t in tensors) == pool.bytes == 5 * pool.geometry.bytes_per_block
    assert [tuple(layer.keys.shape) for layer in pool.layers] == [(5, 4, 2, 16), (5, 4, 1, 8)]
    for layer in pool.layers:
        assert {layer.keys.dtype, layer.values.dtype} == {KV_DTYPES[kv_dtype].torch_dtype}
        for scales in (layer.key_scales, layer.value_scales):
            assert (scales is not None) == (kv_dtype in ("int8", "fp8"))
            assert scales is None or (scales.shape == layer.keys.shape[:3] and scales.dtype == torch.float32)


def test_unknown_dtype_and_too_little_memory() -> None:
    with pytest.raises(InvalidConfiguration) as caught:
        geometry(kv_dtype="float8")
    assert caught.value.field == "kv_dtype"
    with pytest.raises(InvalidConfiguration) as caught:
        geometry().blocks_for(7)
    assert caught.value.field == "memory_bytes"
    assert geometry().blocks_for(8) == 1


@pytest.mark.parametrize("sliced_max", [0, 16])
@pytest.mark.parametrize("kv_dtype", KV_DTYPES)
def test_copies_move_the_named_slots_only(
    kv_dtype: str, sliced_max: int, cpu: Device, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("kvforge.worker.attention.pool.SLICED_COPIES_MAX", sliced_max)
    pool = KvPool(geometry(layers=2, kv_heads=2, head_size=3, block_size=4, kv_dtype=kv_dtype), 6, cpu)
    for index, cache in enumerate(pool.tensors()):
        values = torch.arange(cache.numel()).view(cache.shape) + 1000 * index
        cache.copy_(values % 120 if cache.element_size() == 1 else values)
    before = [cache.clone() for cache in pool.tensors()]
    pool.copy_blocks(np.array([[0, 3, 2], [0, 4, 4], [1, 5, 0]], np.int32))
    for old, new in zip(before, pool.tensors(), strict=True):
        old, new = old.float(), new.float()
        assert torch.equal(new[3, :2], old[0, :2])
        assert torch.equal(new[3, 2:], old[3, 2:])
        assert torch.equal(new[4], old[0])
        assert torch.equal(new[[0, 1, 2, 5]], old[[0, 1, 2, 5]])
        assert not torch.equal(new[3, :2], old[3, :2])


@pytest.mark.parametrize("kv_dtype", KV_DTYPES)
def test_zeroed_blocks_are_zero_in_every_byte_and_no_others(kv_dtype: str, cpu: Device) -> None:
    pool = KvPool(geometry(layers=2, kv_heads=2, head_size=3, block_size=4, kv_dtype=kv_dtype), 6, cpu)
    for cache in pool.tensors():
        cache.view(torch.uint8).fill_(0x5A)
    pool.zero_blocks(np.array([4, 1], np.int32))
    for cache in pool.tensors():
        held = cache.view(torch.uint8)
        assert not held[[1, 4]].any()
        assert (held[[0, 2, 3, 5]] == 0x5A).all()


# behaviour 11
def resident_bytes() -> int:
    return int(Path("/proc/self/statm").read_text(encoding="ascii").split()[1]) * os.sysconf("SC_PAGE_SIZE")


def test_close_returns_memory(cpu: Device) -> None:
    sized = geometry(layers=2, kv_heads=8, head_size=128, block_size=128)
    blocks = sized.blocks_for(64 * 2**20)
    gc.collect()
    for _ in range(3):
        pool = KvPool(sized, blocks, cpu)
        for cache in pool.tensors():
            cache.zero_()
        del cache  # the loop's last tensor
        held = resident_bytes()
        pool.close()
        pool.close()
        assert held - resident_bytes() > pool.bytes * 3 // 4


def test_only_the_device_asks_which_it_is() -> None:
    """Other code queries its capabilities."""
    asking = re.compile(r"torch\.cuda|torch\.version\.(hip|cuda)|\bdevice\.kind\b|\bis_gpu\b|\.queues\b")
    package = Path(worker.__file__).parent
    found = {str(path.relative_to(package)) for path in package.rglob("*.py") if asking.search(path.read_text())}
    names = ("device", "queue", "side_queue", "capture", "exchange", "host_memory", "copy_batches")
    assert found == {f"device/{name}.py" for name in names}


def test_unknown_device_is_refused() -> None:
    with pytest.raises(InvalidConfiguration) as caught:
        open_device("tpu")
    assert caught.value.field == "device"


@pytest.mark.skipif(torch.cuda.is_available(), reason="only where torch sees no GPU")
def test_absent_gpu_is_refused_and_auto_takes_the_cpu() -> None:
    for kind in ("cuda", "hip"):
        with pytest.raises(InvalidConfiguration, match="sees no"):
            open_device(kind)
    assert open_device("auto").kind == "cpu"
    assert open_device("auto").free_bytes() > 0


def test_upload_never_shares_memory(cpu: Device) -> None:
    array = np.arange(4)
    tensor = cpu.upload(array)
    array[0] = 9
    assert tensor.tolist() == [0, 1, 2, 3]


def beside(kv_dtype: str = "float32", **fields: Any) -> tuple[KvGeometry, KvGeometry]:
    """Return the geometries of a draft model, and of a model with it."""
    draft = KvGeometry((LayerShape(1, 8),), 4, kv_dtype)
    return draft, KvGeometry((LayerShape(2, 16),) * 3, 4, kv_dtype, beside=draft, **fields)


@pytest.mark.parametrize("kv_dtype", ["float32", "int8"])
def test_a_draft_model_has_memory_of_each_block_and_scratch_blocks(kv_dtype: str, cpu: Device) -> None:
    draft, both = beside(kv_dtype)
    alone = replace(both, beside=None)
    assert both.bytes_per_block == alone.bytes_per_block + draft.bytes_per_block
    scratch = DRAFT_ROWS_MAX * DRAFT_TOKENS_MAX // 4
    assert (both.scratch_blocks, both.scratch_per_row, alone.scratch_blocks) == (scratch, 4, 0)
    assert both.bytes_for(5) == 5 * both.bytes_per_block + scratch * draft.bytes_per_block
    assert both.blocks_for(both.bytes_for(5)) == 5 == both.blocks_for(both.bytes_for(6) - 1)
    words = r"hold no block beside .* bytes of the draft model's scratch blocks"
    with pytest.raises(InvalidConfiguration, match=words):
        both.blocks_for(both.bytes_for(1) - 1)
    pool = KvPool(both, 5, cpu)
    assert pool.beside is not None
    assert (pool.beside.blocks, pool.bytes) == (5 + scratch, both.bytes_for(5))
    assert {len(tensor) for tensor in pool.tensors()} == {5}
    assert sum(each.numel() * each.itemsize for each in pool.tensors()) == 5 * both.bytes_per_block
    pool.close()
    assert not [*pool.tensors()]


@pytest.mark.parametrize("copies", [1, SLICED_COPIES_MAX + 1])
def test_copies_and_zeros_reach_the_draft_models_layers(copies: int, cpu: Device) -> None:
    pool = KvPool(beside()[1], 2 * copies, cpu)
    for tensor in pool.tensors():
        tensor.copy_(1 + torch.arange(tensor.numel()).view(tensor.shape))
    before = [tensor.clone() for tensor in pool.tensors()]
    ids = np.arange(copies, dtype=np.int32)
    pool.copy_blocks(np.stack((ids, ids + np.int32(copies), np.full_like(ids, 3)), 1))
    for tensor, old in zip(pool.tensors(), before, strict=True):
        assert torch.equal(tensor[copies:, :3], old[:copies, :3])
        assert torch.equal(tensor[copies:, 3], old[copies:, 3])
    pool.zero_blocks(ids)
    assert not any(bool(tensor[:copies].any()) or not bool(tensor[copies:].all()) for tensor in pool.tensors())
    pool.close()


def test_a_draft_model_needs_the_same_blocks() -> None:
    draft = KvGeometry((LayerShape(1, 8),), 8, "float32")
    with pytest.raises(InvalidConfiguration, match="has 8 tokens of a block, the model 4") as caught:
        KvGeometry((LayerShape(1, 8),), 4, "float32", beside=draft)
    assert caught.value.field == "block_size"
    window = KvGeometry((LayerShape(1, 8), LayerShape(1, 8, window=4)), 4, "float32")
    with pytest.raises(InvalidConfiguration, match="is page-major"):
        KvGeometry((LayerShape(1, 8),), 4, "float32", beside=window)
    assert KvGeometry(window.layers, 4, "float32", beside=beside()[0]).is_paged
