"""Hidden states in the blocks of a pool: each token finds the one of the position before it."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from kvforge.worker.attention.batch import PagedBatch
from kvforge.worker.attention.draft_backlog import slots_or_spare
from kvforge.worker.attention.hidden_states import NONE, hidden_before, hidden_shape, slots_before, store_hidden
from kvforge.worker.attention.mixed_batch import MixedSize
from kvforge.worker.attention.pool import KvGeometry, KvPool
from kvforge.worker.device.device import Device

BLOCK_SIZE, BLOCKS, SIZE = 4, 9, 3
TABLES = np.array([[5, 2, 7], [1, 8, 3]], np.int32)


@pytest.fixture
def pool(cpu: Device) -> KvPool:
    pool = KvPool(KvGeometry((hidden_shape(SIZE),), BLOCK_SIZE, "float32"), BLOCKS, cpu)
    for each in pool.tensors():
        each.fill_(float("nan"))
    return pool


def i4(*numbers: int) -> np.ndarray[tuple[int], np.dtype[np.int32]]:
    return np.array(numbers, np.int32)


def states(row: int, *positions: int) -> torch.Tensor:
    """Return hidden states that name their row and position."""
    return torch.tensor([[row + 1.0, position, 0.5] for position in positions])


def store(pool: KvPool, batch: PagedBatch, hidden: torch.Tensor) -> None:
    store_hidden(hidden, pool.layers[0], slots_or_spare(batch, (BLOCKS - 1) * BLOCK_SIZE))


def test_a_token_has_as_many_numbers_as_a_hidden_state(pool: KvPool) -> None:
    assert pool.geometry.bytes_per_block == BLOCK_SIZE * SIZE * 4
    assert len([*pool.tensors()]) == 1


def test_rows_find_the_states_of_this_step_and_of_earlier_ones(pool: KvPool) -> None:
    """Also behind the end of a block, and none before position 0."""
    batch = pool.batch(TABLES, i4(0, 0), i4(4, 2))
    store(pool, batch, torch.cat((states(0, 0, 1, 2, 3), states(1, 0, 1))))
    nothing = torch.zeros(1, SIZE)
    want = torch.cat((nothing, states(0, 0, 1, 2), nothing, states(1, 0)))
    assert torch.equal(hidden_before(pool.layers[0], batch), want)
    batch = pool.batch(TABLES, i4(4, 2), i4(1, 4))
    store(pool, batch, torch.cat((states(0, 4), states(1, 2, 3, 4, 5))))
    want = torch.cat((states(0, 3), states(1, 1, 2, 3, 4)))
    assert torch.equal(hidden_before(pool.layers[0], batch), want)


def test_rows_of_one_request_find_those_of_its_other_rows(pool: KvPool) -> None:
    """A row of one token for each draft."""
    batch = pool.batch(TABLES[[0, 0, 0]], i4(3, 4, 5), i4(1, 1, 1))
    store(pool, batch, states(0, 3, 4, 5))
    assert torch.equal(hidden_before(pool.layers[0], batch)[1:], states(0, 3, 4))


def test_padding_of_static_batches_writes_to_the_spare_slot(pool: KvPool) -> None:
    store(pool, pool.batch(TABLES, i4(0, 0), i4(4, 4)), torch.cat((states(0, 0, 1, 2, 3), states(1, 0, 1, 2, 3))))
    kept = pool.layers[0].keys.clone()
    batch = pool.static_batch(4, 3)
    for lengths in ((5, 3), (6, 4)):
        pool.fill(batch, TABLES, i4(*lengths))
        at = [length - 1 for length in lengths]
        before = hidden_before(pool.layers[0], batch)
        assert torch.equal(before[:2], torch.cat((states(0, at[0] - 1), states(1, at[1] - 1))))
        assert torch.equal(before[2:], torch.zeros(2, SIZE))
        store(pool, batch, torch.cat((states(0, at[0]), states(1, at[1]), states(9, 9, 9))))
    assert torch.equal(pool.layers[0].keys[[5, 1]], kept[[5, 1]])
    pool.fill(batch, TABLES[:0], i4())
    assert (slots_before(batch) == NONE).all()


def test_static_batches_of_prompts_have_room_between_their_tokens(pool: KvPool) -> None:
    store(pool, pool.batch(TABLES[1:], i4(0), i4(4)), states(1, 0, 1, 2, 3))
    size = MixedSize(2, 16, 2)
    batch = pool.mixed_batch(size, pool.mixed_places(size, 3, 0), 0)
    pool.refill_mixed(batch, TABLES, i4(0, 4), i4(6, 1), 1, i4())
    hidden = torch.full((size.tokens, SIZE), 9.0)
    hidden[:6], hidden[16] = states(0, 0, 1, 2, 3, 4, 5), states(1, 4)
    store(pool, batch, hidden)
    before = hidden_before(pool.layers[0], batch)
    assert torch.equal(before[:6], torch.cat((torch.zeros(1, SIZE), states(0, 0, 1, 2, 3, 4))))
    assert torch.equal(before[16:17], states(1, 3))
    assert not before[6:16].any()
    assert not before[17:].any()
