"""Which generated tokens lack K and V of a drafter, through steps, proposals, forks and copies from other tiers."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from kvforge.worker.attention.draft_backlog import (
    DraftBacklog,
    generated_tokens,
    slots_or_spare,
    store_tokens,
    stored_tokens,
)
from kvforge.worker.attention.mixed_batch import MixedSize
from kvforge.worker.attention.pool import KvGeometry, KvPool
from kvforge.worker.device.device import Device

BLOCK_SIZE, BLOCKS = 4, 9
TABLES = np.array([[5, 2, 7], [1, 8, 3]], np.int32)


def i4(*numbers: int) -> np.ndarray[tuple[int], np.dtype[np.int32]]:
    return np.array(numbers, np.int32)


@pytest.fixture
def pool(cpu: Device) -> KvPool:
    own = KvGeometry.uniform(layers=1, kv_heads=1, head_size=8, block_size=BLOCK_SIZE, kv_dtype="float32")
    pool = KvPool(own.joined(own), BLOCKS, cpu)
    assert pool.beside is not None
    return pool


@pytest.fixture
def backlog(pool: KvPool) -> DraftBacklog:
    assert pool.beside is not None and pool.beside.backlog is not None
    return pool.beside.backlog


def flags(*kinds: int) -> np.ndarray[tuple[int], np.dtype[np.bool_]]:
    return np.array(kinds, np.bool_)


def found(backlog: DraftBacklog, *ends: int) -> list[tuple[int, int]]:
    rows, positions = backlog.find(TABLES, i4(*ends))
    return [*zip(rows.tolist(), positions.tolist(), strict=True)]


def test_the_id_of_a_token_takes_four_bytes(pool: KvPool) -> None:
    assert pool.geometry.bytes_per_block == 2 * 2 * 8 * 4 * BLOCK_SIZE + 4 * BLOCK_SIZE
    assert [each.shape[0] for each in pool.tensors()] == [BLOCKS] * 5
    assert pool.geometry.bytes_for(BLOCKS) == sum(
        each.nbytes
        for each in (*pool._own_tensors(), *pool.beside.tensors())  # type: ignore[union-attr]
    )


def test_generated_tokens_lack_what_prompt_tokens_have(backlog: DraftBacklog) -> None:
    """Below the ends of the rows alone."""
    assert found(backlog, 12, 12) == []
    backlog.write(TABLES, i4(0, 0), i4(6, 1), flags(0, 0, 0, 0, 0, 0, 1))
    backlog.write(TABLES, i4(6, 1), i4(1, 1), flags(1, 1))
    backlog.write(TABLES[[0, 0, 0]], i4(7, 8, 9), i4(1, 1, 1), flags(1, 1, 1))
    assert found(backlog, 9, 1) == [(0, 6), (0, 7), (0, 8), (1, 0)]
    assert found(backlog, 10, 2) == [(0, 6), (0, 7), (0, 8), (0, 9), (1, 0), (1, 1)]
    backlog.write(TABLES[:1], i4(5), i4(2), flags(0, 0))
    assert found(backlog, 10, 0) == [(0, 7), (0, 8), (0, 9)]


def test_computed_tokens_lack_nothing_until_they_are_written_again(backlog: DraftBacklog) -> None:
    for position in range(3, 7):
        backlog.write(TABLES[:1], i4(position), i4(1), flags(1))
    backlog.settle(np.array([5 * BLOCK_SIZE + 3, 2 * BLOCK_SIZE + 1]))
    assert found(backlog, 7, 0) == [(0, 4), (0, 6)]
    backlog.settle(np.array([2 * BLOCK_SIZE, 2 * BLOCK_SIZE + 2]))
    assert found(backlog, 7, 0) == []
    backlog.write(TABLES[:1], i4(5), i4(1), flags(1))
    assert found(backlog, 7, 0) == [(0, 5)]


def test_entries_behind_a_row_are_not_looked_at(backlog: DraftBacklog) -> None:
    backlog.write(TABLES[:1], i4(2), i4(1), flags(1))
    rows, positions = backlog.find(np.array([[5, -7, 10_000]], np.int32), i4(4))
    assert (rows.tolist(), positions.tolist()) == ([0], [2])


def test_copies_of_blocks_lack_what_these_lack(pool: KvPool, backlog: DraftBacklog) -> None:
    for position in range(1, 7):
        backlog.write(TABLES[:1], i4(position), i4(1), flags(1))
    pool.copy_blocks(np.array([[5, 1, 4], [2, 8, 2]], np.int32))
    assert found(backlog, 0, 12) == [(1, 1), (1, 2), (1, 3), (1, 4), (1, 5)]
    backlog.settle(np.array([5 * BLOCK_SIZE + 1]))
    assert (1, 1) in found(backlog, 0, 12), "K and V of the copy are its own"


def test_zeroed_blocks_lack_nothing(pool: KvPool, backlog: DraftBacklog) -> None:
    for position in range(6):
        backlog.write(TABLES[:1], i4(position), i4(1), flags(1))
    pool.zero_blocks(i4(5))
    assert found(backlog, 6, 0) == [(0, 4), (0, 5)]


def test_the_device_knows_the_tokens_of_loaded_blocks(pool: KvPool, backlog: DraftBacklog) -> None:
    """Also of their copies. All generated ones count as lacking, whatever was known of the block before."""
    assert pool.beside is not None and pool.beside.tokens is not None
    for position in range(6):
        backlog.write(TABLES[:1], i4(position), i4(1), flags(1))
    pool.beside.tokens[5, :, 0] = torch.tensor([0, 0, 8, 1])
    backlog.load(i4(5))
    assert found(backlog, 6, 0) == [(0, 2), (0, 3), (0, 4), (0, 5)]
    backlog.load(i4(5))
    pool.copy_blocks(np.array([[5, 1, 3]], np.int32))
    backlog.write(TABLES[1:], i4(3), i4(1), flags(0))
    assert found(backlog, 0, 4) == [(1, 2)]
    backlog.settle(np.array([1 * BLOCK_SIZE + 2]))
    assert found(backlog, 0, 4) == [], "the device is asked once"


def test_rows_without_tokens_before_them_lack_nothing(backlog: DraftBacklog) -> None:
    assert found(backlog, 0, 0) == []


def test_ids_are_stored_for_generated_tokens(pool: KvPool) -> None:
    """In batches of decodes, of prompts with decodes, and in static ones, where padding goes to the spare slot."""
    own = pool.beside
    assert own is not None and own.tokens is not None
    own.tokens.fill_(127)
    spare = (own.blocks - 1) * BLOCK_SIZE

    def store(batch: object, *token_ids: int) -> None:
        store_tokens(torch.tensor(token_ids), own.tokens, batch, slots_or_spare(batch, spare))  # type: ignore[arg-type, union-attr]

    store(pool.batch(TABLES, i4(0, 0), i4(5, 1), flags(0, 1)), 9, 9, 9, 9, 9, 3)
    assert own.tokens[[5, 2, 1], :, 0].tolist() == [[0] * 4, [0, 127, 127, 127], [4, 127, 127, 127]]
    static = pool.static_batch(4, 3)
    pool.fill(static, TABLES, i4(6, 2))
    store(static, 0, 6, 50, 51)
    assert own.tokens[[5, 2, 1], :, 0].tolist() == [[0] * 4, [0, 1, 127, 127], [4, 7, 127, 127]]
    size = MixedSize(2, 16, 2)
    mixed = pool.mixed_batch(size, pool.mixed_places(size, 3, 0), 0)
    pool.refill_mixed(mixed, TABLES[::-1].copy(), i4(2, 6), i4(3, 1), 1, i4())
    assert generated_tokens(mixed)[[0, 1, 2, 16]].tolist() == [0, 0, 0, 1]
    store(mixed, *[40] * size.tokens)
    assert own.tokens[[2, 1, 8], :, 0].tolist() == [[0, 1, 41, 127], [4, 7, 0, 0], [0, 127, 127, 127]]
    assert not (own.tokens[:BLOCKS] > 127).any()
    assert stored_tokens(own.tokens, torch.tensor([4, 6, 9]), 97).tolist() == [3, 0, 0]
    assert stored_tokens(own.tokens, torch.tensor([4, 5, 2 * BLOCK_SIZE + 3]), 60).tolist() == [3, 6, 59]
