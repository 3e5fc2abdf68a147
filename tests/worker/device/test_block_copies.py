"""Blocks of several tensors become rows with checksums, by the kernel as by plain torch."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from kvforge.worker.checksums import checksums, weights_of
from kvforge.worker.device.block_buffers import BlockBuffers
from kvforge.worker.device.device import Device, open_device
from kvforge.worker.device.queue import DeviceEvent

BLOCKS = 6
SIZES = (8, 8 * 1025, 64, 8 * 1024)  # bytes of a block in each tensor


def tensors(device: Device, sizes: tuple[int, ...] = SIZES) -> list[torch.Tensor]:
    rng = np.random.default_rng(1)
    return [device.upload(rng.integers(0, 256, (BLOCKS, 2, size // 2), np.uint8)) for size in sizes]


def expected_rows(held: list[torch.Tensor], blocks: list[int]) -> np.ndarray:
    return np.concatenate([each.cpu().numpy().reshape(BLOCKS, -1)[blocks] for each in held], axis=1)


@pytest.mark.parametrize("kind", ["cpu", pytest.param("auto", marks=pytest.mark.gpu)])
@pytest.mark.parametrize("sizes", [SIZES, (6, 10, 2)])
def test_blocks_become_rows_and_come_back(kind: str, sizes: tuple[int, ...]) -> None:
    device = open_device(kind)
    if kind == "auto" and not device.queues:
        pytest.skip("no GPU here")
    held, order = tensors(device, sizes), [4, 0, 5]
    other = [torch.zeros_like(each) for each in held]
    source, target = BlockBuffers(device, held), BlockBuffers(device, other)
    rows = torch.zeros((3, sum(sizes)), dtype=torch.uint8, device=device.torch_device)
    gathered, scattered = source.begin(np.array(order)), target.begin(np.array([1, 2, 3]))
    for part in (slice(0, 2), slice(2, 4)):
        gathered.gather(part, rows[part])
    scattered.scatter(slice(0, 8), rows)
    out, back = gathered.sums(), scattered.sums()
    DeviceEvent(device).wait()
    want = expected_rows(held, order)
    assert np.array_equal(rows.cpu().numpy(), want) and np.array_equal(expected_rows(other, [1, 2, 3]), want)
    sums = checksums(want, weights_of(sum(sizes)))
    assert out.array().tolist() == back.array().tolist() == sums.tolist()
    assert not any(part[0].any() or part[4:].any() for part in other), "other blocks stay as they were"


def test_the_kernel_copies_and_sums_what_plain_torch_does() -> None:
    """In Triton's interpreter."""
    pytest.importorskip("triton")
    if torch.cuda.is_available():
        pytest.skip("kernels are not interpreted beside a GPU")
    from kvforge.worker.device.block_copies import copy_blocks

    held, order = tensors(open_device("cpu")), [3, 1]
    other = [torch.zeros_like(each) for each in held]
    words = np.array(SIZES) // 8
    places = np.cumsum(words) - words
    rows = torch.zeros((2, int(words.sum())), dtype=torch.int64)
    want = expected_rows(held, order)
    sums = checksums(want, weights_of(want.shape[1]))
    for side, into_pool in ((held, False), (other, True)):
        table = torch.tensor(np.array([[each.data_ptr() for each in side], words, places]))
        parts = torch.zeros((2, len(SIZES)), dtype=torch.int64)
        for first in (0, 1):
            copy_blocks(table, torch.tensor(order), rows[first : first + 1], parts, first, into_pool=into_pool)
        assert parts.numpy().view(np.uint64).sum(1, dtype=np.uint64).tolist() == sums.tolist()
        assert np.array_equal(rows.numpy().view(np.uint8), want)
    assert np.array_equal(expected_rows(other, order), want)


@pytest.mark.parametrize("kind", ["cpu", pytest.param("auto", marks=pytest.mark.gpu)])
@pytest.mark.parametrize("sizes", [SIZES, (6, 10, 2)])
def test_every_byte_of_zeroed_blocks_is_zero_and_no_other(kind: str, sizes: tuple[int, ...]) -> None:
    device = open_device(kind)
    if kind == "auto" and not device.queues:
        pytest.skip("no GPU here")
    held = tensors(device, sizes)
    before = expected_rows(held, [0, 1, 3, 5])
    buffers = BlockBuffers(device, held)
    for blocks in ([4], [4, 2]):
        buffers.zero(np.array(blocks))
    DeviceEvent(device).wait()
    assert not expected_rows(held, [2, 4]).any()
    assert np.array_equal(expected_rows(held, [0, 1, 3, 5]), before)


def test_the_kernel_zeroes_what_plain_torch_does() -> None:
    """In Triton's interpreter."""
    pytest.importorskip("triton")
    if torch.cuda.is_available():
        pytest.skip("kernels are not interpreted beside a GPU")
    from kvforge.worker.device.block_copies import zero_blocks

    held = tensors(open_device("cpu"))
    before = expected_rows(held, [0, 2, 4, 5])
    words = np.array(SIZES) // 8
    table = torch.tensor(np.array([[each.data_ptr() for each in held], words, np.zeros(len(SIZES), np.int64)]))
    zero_blocks(table, torch.tensor([3, 1]), torch.zeros(int(words.max()), dtype=torch.int64))
    assert not expected_rows(held, [1, 3]).any()
    assert np.array_equal(expected_rows(held, [0, 2, 4, 5]), before)


@pytest.mark.parametrize("size", [64, 24, 9])
def test_every_bit_counts(size: int) -> None:
    rows = np.random.default_rng(size).integers(0, 256, (1, size), np.uint8)
    weights = weights_of(size)
    whole, seen = checksums(rows, weights)[0], set()
    for bit in range(8 * size):
        rows[0, bit // 8] ^= 1 << bit % 8
        seen.add(int(checksums(rows, weights)[0]))
        rows[0, bit // 8] ^= 1 << bit % 8
    assert int(whole) not in seen
