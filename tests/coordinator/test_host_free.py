"""Free blocks of a host file: blocks that are copied together get neighbours."""

from __future__ import annotations

import random

import pytest

from kvforge.coordinator.core.cache.host_free import ALIGN, HEAP_SPARE, FreeBlocks
from kvforge.coordinator.core.cache.host_node import NO_HOST_BLOCK
from kvforge.coordinator.core.cache.host_tier import HostTier
from kvforge.coordinator.core.cache.host_tiers import HostTiers

TOTAL = 64


def free(*runs: range) -> FreeBlocks:
    """Return free blocks of these runs."""
    return FreeBlocks.of([block for run in runs for block in run], TOTAL)


def test_blocks_are_those_of_the_smallest_run_that_has_enough() -> None:
    blocks = free(range(24), range(32, 42), range(48, 64))
    assert blocks.take(9) == [*range(32, 41)]
    assert [*blocks] == [*range(24), 41, *range(48, 64)]


def test_blocks_are_those_of_the_longest_run_if_none_has_enough() -> None:
    blocks = free(range(8), range(16, 32), range(40, 52))
    assert blocks.take(30) == [*range(16, 32), *range(40, 52), 0, 1]


def test_blocks_follow_the_one_before_them() -> None:
    blocks = free(range(3, 8), range(16, 24))
    assert blocks.take(2, behind=2) == [3, 4]
    assert blocks.take(4, behind=4) == [16, 17, 18, 19], "three would not do"
    assert blocks.take(1, behind=40) == [5], "no free block is behind it"


def test_a_chain_begins_at_a_multiple_and_leaves_room_for_the_one_before_it() -> None:
    blocks = free(range(3, 64))
    assert blocks.take(4, room=ALIGN) == [8, 9, 10, 11]
    assert blocks.take(4, room=ALIGN) == [16, 17, 18, 19]
    assert blocks.take(4, behind=11) == [12, 13, 14, 15]


def test_blocks_without_a_multiple_are_the_last_choice() -> None:
    blocks = free(range(1, 5), range(16, 18))
    assert blocks.take(1) == [16]
    assert blocks.take(5) == [17, 1, 2, 3, 4] or [*blocks] == []


def test_a_block_that_becomes_free_joins_its_neighbours() -> None:
    blocks = free(range(16, 20), range(21, 26))
    blocks.add(20)
    blocks.check_invariants()
    assert blocks.end_of == {16: 26}


@pytest.mark.parametrize("numbers", [[3, 3], [-1], [TOTAL]])
def test_numbers_of_a_snapshot_are_checked(numbers: list[int]) -> None:
    with pytest.raises(ValueError, match="free block"):
        FreeBlocks.of(numbers, TOTAL)


@pytest.mark.parametrize("seed", range(8))
def test_free_blocks_are_those_of_a_plain_set(seed: int) -> None:
    rng = random.Random(seed)
    blocks, model = FreeBlocks(500), set(range(500))
    for _ in range(600):
        used = [block for block in range(500) if block not in model]
        if rng.random() < 0.5 and model:
            count = rng.randint(1, min(40, len(model)))
            taken = blocks.take(count, behind=rng.choice([-1, *used]), room=rng.choice([0, 8, 64]))
            assert len(set(taken)) == count and model.issuperset(taken)
            model.difference_update(taken)
        elif used:
            for block in rng.sample(used, min(len(used), rng.randint(1, 30))):
                blocks.add(block)
                model.add(block)
        assert [*blocks] == sorted(model) and len(blocks) == len(model)
        blocks.check_invariants()
    blocks.update(block for block in range(100) if block not in model)
    again = FreeBlocks.of(blocks, 500)
    assert [again.take(each) for each in (3, 20, 5)] == [blocks.take(each) for each in (3, 20, 5)], "after a restart"
    gone = {block for block in again if block % 3}
    assert [*again.without(gone)] == [block for block in again if block not in gone]


def test_runs_that_come_and_go_do_not_let_the_heaps_grow() -> None:
    blocks = FreeBlocks(64, range(0, 64, 16))
    for _ in range(1000):
        (one,) = blocks.take(1)
        blocks.add(one)
    assert sum(map(len, blocks._heaps.values())) <= 2 * 4 + 2 * HEAP_SPARE


def chain(tier: HostTier, number: int, blocks: int) -> list[int]:
    """Add a chain of entries without blocks; return its nodes."""
    nodes, parent = [], -number
    for place in range(blocks):
        value = number << 20 | place
        node = tier.add(parent, value, value.to_bytes(16, "little"))
        assert node is not None
        nodes.append(node)
        parent = node
    return nodes


def saved(tier: HostTier, number: int, blocks: int) -> list[int]:
    """Save a chain as the pool evicts it, from its end; return the host blocks in the order of the chain."""
    nodes = chain(tier, number, blocks)
    assert tier.give_blocks(nodes[::-1], [0] * blocks, backwards=True) == blocks
    places = [tier.nodes[node].block for node in nodes]
    for node in reversed(nodes):
        tier.written(node)
    tier.check_invariants()
    return places


def test_a_chain_has_neighbours_in_its_order() -> None:
    tier = HostTiers(1, 999).new("file", 64)
    assert saved(tier, 1, 10) == [*range(10)]
    assert saved(tier, 2, 10) == [*range(16, 26)], "behind room for the first one"


def test_blocks_that_a_request_evicts_become_neighbours() -> None:
    tier = HostTiers(1, 9999).new("file", 64)
    for number in range(1, 5):
        saved(tier, number, 16)
    assert tier.free == 0
    assert saved(tier, 9, 24) == [*range(24, 32), *range(16)], "the oldest chain, behind the end of the next one"
    assert (tier.free, tier.evicted_total) == (0, 24)


def test_nodes_beyond_what_can_be_given_get_no_block() -> None:
    tier = HostTiers(1, 99).new("file", 4)
    nodes = chain(tier, 1, 6)
    assert tier.give_blocks(nodes[::-1], [0] * 6, backwards=True) == 4
    assert [tier.nodes[node].block for node in nodes] == [NO_HOST_BLOCK] * 2 + [0, 1, 2, 3]
