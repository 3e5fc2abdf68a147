"""Statistics, recycling, access counts and quotas as a client sees them, through real processes."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from kvforge import Client, SamplingParams
from kvforge.protocol.errors import CapacityExceeded, InvalidRequest, QuotaExceeded, SequenceNotFound, StaleGeneration
from kvforge.protocol.messages import PoolStats
from tools.cluster.cluster import Cluster

from .shared import wait_empty

GREEDY = SamplingParams(temperature=0.0, ignore_eos=True)
CONFIG = """
[cache]
block_size = 4
policy = "none"
[quotas.floored]
floor = 4
[quotas.capped]
ceiling = 3
"""
BLOCKS = 16
# 2 (K and V) x layers x KV heads x head size x block size x bytes(float32), of the tests' tiny Llama.
BYTES_PER_BLOCK = 2 * 2 * 2 * 16 * 4 * 4


@pytest.fixture(scope="module")
def cluster() -> Iterator[Cluster]:
    with Cluster(blocks=BLOCKS, coordinator=CONFIG) as started:
        started.start("w0")
        yield started


@pytest.fixture
def kv(cluster: Cluster) -> Iterator[Client]:
    with Client(cluster.endpoint, timeout_s=60, connect_timeout_s=30) as client:
        yield client
        wait_empty(client)


def pool(kv: Client) -> PoolStats:
    return kv.stats().pools[0]


def test_fresh_totals_match_the_configuration(kv: Client) -> None:
    """behaviours 2 and 5. First in this file: this coordinator has had no requests yet."""
    stats = kv.stats()
    fresh = pool(kv)
    assert (fresh.blocks, fresh.free, fresh.block_size) == (BLOCKS, BLOCKS, 4)
    assert fresh.bytes_per_block == BYTES_PER_BLOCK
    zero = (fresh.cached, fresh.referenced, fresh.quarantined, fresh.referenced_peak, fresh.live_tokens, fresh.steps)
    assert zero == (0, 0, 0, 0, 0, 0)
    assert (fresh.allocated_total, fresh.freed_total) == (0, 0)
    assert (stats.sequences, stats.requests.accepted_total, stats.requests.computed_tokens_total) == (0, 0, 0)


def test_what_a_workers_memory_is_for_arrives_at_the_client(kv: Client) -> None:
    """Weights are those of the tests' tiny Llama in float32, computed from its shape alone."""
    (worker,) = kv.health().workers
    assert (worker.name, worker.state) == ("w0", "ready")
    assert worker.device_bytes["pool"] == BLOCKS * BYTES_PER_BLOCK == pool(kv).blocks * pool(kv).bytes_per_block
    attention, inner, norms = 64 * (64 + 32 + 32) + 64 * 64, 3 * 64 * 128, 2 * 64
    tables, final_norm = 2 * 256 * 64, 64
    parameters = tables + 2 * (attention + inner + norms) + final_norm
    beside = worker.device_bytes["weights"] - 4 * parameters
    assert 0 <= beside <= 256, "beside them are only the frequencies of the rotation, 8 numbers, or 16 with their copy"
    assert set(worker.device_bytes) == {"weights", "pool"}


def test_peak_current_total_and_bytes_by_tenant(kv: Client) -> None:
    """behaviour 17."""
    before = pool(kv)
    s1 = kv.create_sequence(list(range(10)), tenant="x")
    s2 = kv.create_sequence(list(range(5)), tenant="y")
    during = pool(kv)
    assert (during.referenced, during.live_tokens) == (5, 15)
    assert during.allocated_total - before.allocated_total == 5
    by_tenant = {row.tenant: (row.blocks, row.bytes) for row in kv.stats().tenants}
    assert by_tenant["x"] == (3, 3 * BYTES_PER_BLOCK)
    assert by_tenant["y"] == (2, 2 * BYTES_PER_BLOCK)
    assert (kv.info(s1).blocks, kv.info(s1).bytes) == (3, 3 * BYTES_PER_BLOCK)
    kv.remove([s1, s2])
    after = pool(kv)
    assert (after.referenced, after.free) == (0, BLOCKS)
    assert after.referenced_peak >= 5
    assert after.freed_total - before.freed_total == 5


def test_exhaust_free_one_and_allocate_again(kv: Client) -> None:
    """behaviour 16: exactly the available blocks are allocated; ids are recycled, generations differ."""
    mine = [kv.create_sequence([i, 1, 2, 3], tenant="all") for i in range(BLOCKS - 4)]  # 4 are reserved for another
    with pytest.raises(CapacityExceeded) as full:
        kv.create_sequence([9], tenant="all")
    assert (full.value.needed, full.value.available) == (1, 0)
    held = {b: kv.block(b).generation for b in range(BLOCKS) if kv.block(b).refcount}
    assert kv.remove(mine.pop(3)) == 1
    (freed,) = [b for b in held if kv.block(b).refcount == 0]
    mine.append(kv.create_sequence([7], tenant="all"))
    assert kv.block(freed).refcount == 1
    assert kv.block(freed).generation == held[freed] + 1
    with pytest.raises(StaleGeneration) as stale:
        kv.ref(freed, "old name", generation=held[freed])
    assert (stale.value.generation, stale.value.current) == (held[freed], held[freed] + 1)
    with pytest.raises(CapacityExceeded):
        kv.create_sequence([9], tenant="all")
    kv.remove(mine)


def test_a_floor_is_kept_free_and_a_ceiling_is_a_typed_error(kv: Client) -> None:
    all_mine = kv.create_sequence([1] * 4 * 12, tenant="greedy")
    with pytest.raises(CapacityExceeded):
        kv.append(all_mine, [1])
    floored = kv.create_sequence([1] * 16, tenant="floored")
    assert kv.info(floored).blocks == 4
    kv.remove([all_mine, floored])
    capped = kv.create_sequence([1] * 12, tenant="capped")
    with pytest.raises(QuotaExceeded) as over:
        kv.append(capped, [1])
    assert (over.value.tenant, over.value.needed, over.value.ceiling) == ("capped", 4, 3)
    with pytest.raises(QuotaExceeded):
        kv.submit([1] * 10, max_tokens=10, tenant="capped")
    assert kv.info(capped).length == 12
    kv.remove(capped)


def test_reading_and_appending_count_as_accesses(kv: Client) -> None:
    """behaviour 21."""
    s = kv.create_sequence([1])
    first = kv.info(s)
    assert (first.accesses, kv.info(s).accesses) == (0, 0)  # a query is no access
    kv.tokens(s)
    kv.append(s, [2])
    later = kv.info(s)
    assert later.accesses == 2
    assert 0 <= later.idle_us <= later.age_us
    assert later.age_us > first.age_us
    kv.remove(s)


def test_a_removed_sequence_refuses_everything(kv: Client) -> None:
    """behaviour 23."""
    s = kv.create_sequence([1, 2, 3])
    kv.remove(s)
    for action in (
        lambda: kv.append(s, [4]),
        lambda: kv.tokens(s),
        lambda: kv.info(s),
        lambda: kv.fork(s),
        lambda: kv.remove(s),
        lambda: kv.submit(sequence=s, max_tokens=1),
    ):
        with pytest.raises(SequenceNotFound) as caught:
            action()
        assert caught.value.sequence_id == s.id


def test_interleaved_sequences_never_see_each_others_tokens(kv: Client) -> None:
    """behaviour 12."""
    one, two = kv.create_sequence(tenant="p"), kv.create_sequence(tenant="q")
    for i in range(10):
        kv.append(one, [i])
        kv.append(two, [100 + i])
    assert kv.tokens(one) == tuple(range(10))
    assert kv.tokens(two) == tuple(range(100, 110))
    holders = [kv.block(b).holders for b in range(BLOCKS) if kv.block(b).refcount]
    assert sorted(len(one) for one in holders) == [1] * 6
    kv.remove([one, two])


def test_bad_arguments_name_their_field(kv: Client) -> None:
    s = kv.create_sequence([1, 2])
    cases = [
        (lambda: kv.append([s, s], [[1], [2]]), "sequence_ids"),
        (lambda: kv.append(s, [256]), "tokens"),
        (lambda: kv.append(s, []), "tokens"),
        (lambda: kv.append([s], [[1], [2]]), "tokens"),
        (lambda: kv.create_sequence([1], tenant="\n"), "tenant"),
        (lambda: kv.create_sequence([1], idle_ttl_s=-1), "idle_ttl_s"),
        (lambda: kv.fork(s, 0), "count"),
        (lambda: kv.ref(0, ""), "holder"),
        (lambda: kv.explain(), "subject"),
        (lambda: kv.explain(block=1, request=2), "subject"),
    ]
    before = kv.stats().pools
    for action, field in cases:
        with pytest.raises(InvalidRequest) as caught:
            action()
        assert caught.value.field == field
    assert kv.stats().pools == before
    kv.remove(s)
