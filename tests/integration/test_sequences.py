"""Client sequences through real sockets and real processes: create, append, fork, continue, hold, explain, expire."""

from __future__ import annotations

import os
import select
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest

from kvforge import Client, Request, SamplingParams
from kvforge.protocol.errors import (
    AlreadyHolder,
    BlockNotFound,
    BlockNotHeld,
    CapacityExceeded,
    Conflict,
    InvalidRequest,
    KvforgeError,
    NotAHolder,
    SequenceBusy,
    SequenceNotFound,
    StaleGeneration,
)
from kvforge.protocol.messages import Stats
from tools.cluster.cluster import Cluster
from tools.cluster.fork_server import SERVICES, fork_server

from .midway import stopped_midway
from .shared import wait_empty

GREEDY = SamplingParams(temperature=0.0, ignore_eos=True)
SMALL_BLOCKS = "[cache]\nblock_size = 4\n"


@pytest.fixture(scope="module")
def cluster() -> Iterator[Cluster]:
    with Cluster(blocks=256, coordinator=SMALL_BLOCKS) as started:
        started.start("w0")
        yield started


@pytest.fixture
def kv(cluster: Cluster) -> Iterator[Client]:
    with Client(cluster.endpoint, timeout_s=60, connect_timeout_s=30) as client:
        yield client
    with Client(cluster.endpoint, timeout_s=60, connect_timeout_s=30) as client:
        wait_empty(client)


def referenced(stats: Stats) -> int:
    return sum(pool.referenced for pool in stats.pools)


def test_append_read_back_and_count_blocks(kv: Client) -> None:
    """behaviours 6, 7, 8."""
    s = kv.create_sequence()
    assert (kv.info(s).length, kv.info(s).blocks) == (0, 0)
    assert kv.append(s, [11]) == (1,)
    assert kv.info(s).blocks == 1
    assert kv.append(s, [12, 13]) == (3,)
    assert kv.tokens(s) == (11, 12, 13)
    for length, blocks in ((9, 3), (17, 5)):
        kv.append(s, list(range(kv.info(s).length, length)))
        assert (kv.info(s).length, kv.info(s).blocks) == (length, blocks)
    assert referenced(kv.stats()) == 5
    assert kv.remove(s) == 5
    with pytest.raises(SequenceNotFound) as caught:
        kv.append(s, [1])
    assert caught.value.sequence_id == s.id


def test_bulk_append_is_all_or_nothing(kv: Client) -> None:
    """behaviour 9."""
    s1, s2 = kv.create_sequence([1, 2, 3]), kv.create_sequence([4])
    assert kv.append([s1, s2], [[5, 6], [7]]) == (5, 2)
    before = kv.stats().pools
    with pytest.raises(CapacityExceeded):
        kv.append([s1, s2], [[1], [9] * 1500])
    with pytest.raises(SequenceNotFound):
        kv.append([s1, 999_999], [[1], [1]])
    assert kv.stats().pools == before
    assert (kv.tokens(s1), kv.tokens(s2)) == ((1, 2, 3, 5, 6), (4, 7))
    kv.remove([s1, s2])


def test_forks_share_until_one_side_writes_and_the_worker_copies_the_kv(kv: Client) -> None:
    """behaviour 15, and copy-on-write inside the step that needs it: continuations equal those of fresh requests."""
    prompt = [7, 8, 9, 10, 11, 12]
    s = kv.create_sequence(prompt)
    first = kv.submit(sequence=s, max_tokens=4, sampling=GREEDY).result(30)
    known = kv.tokens(s)
    assert known == (*prompt, *first.tokens)
    held = referenced(kv.stats())
    t1, t2 = kv.fork(s, 2)
    assert referenced(kv.stats()) == held  # shared, not copied
    kv.append([t1, t2], [[21], [22]])
    assert referenced(kv.stats()) == held + 2  # each side got its own last block
    runs = [kv.submit(sequence=one, max_tokens=8, sampling=GREEDY) for one in (t1, t2, s)]
    results = [run.result(30).tokens for run in runs]
    with Client(kv.endpoint, timeout_s=60) as other:
        for start, tokens in zip(((*known, 21), (*known, 22), known), results, strict=True):
            fresh = other.submit(list(start), max_tokens=8, sampling=GREEDY, cache_salt=f"for {start} alone").result(30)
            assert fresh.cached_tokens == 0
            assert fresh.tokens == tokens
    assert kv.tokens(t1) == (*known, 21, *results[0])
    assert kv.remove([s, t1, t2]) > 0


def test_a_running_sequence_can_be_forked(cluster: Cluster, kv: Client) -> None:
    made = []

    def submit() -> list[Request]:
        made.append(kv.create_sequence([3, 1, 4, 1, 5]))
        return [kv.submit(sequence=made[-1], max_tokens=60, sampling=GREEDY)]

    (request,) = stopped_midway(cluster, kv, submit, 60, "w0")
    s = made[-1]
    (child,) = kv.fork(s)
    taken = kv.tokens(child)
    with pytest.raises(SequenceBusy):
        kv.append(s, [1])
    cluster.signal("w0", signal.SIGCONT)
    whole = request.result(30).tokens
    left = 60 - (len(taken) - 5)
    assert (3, 1, 4, 1, 5, *whole)[: len(taken)] == taken
    assert kv.submit(sequence=child, max_tokens=left, sampling=GREEDY).result(30).tokens == whole[-left:]
    kv.remove([*made, child])


def test_only_tokens_without_kv_are_computed(kv: Client) -> None:
    s = kv.create_sequence([2, 7, 1, 8, 2, 8], cache_salt="x")
    kv.submit(sequence=s, max_tokens=6, sampling=GREEDY).result(30)
    computed = kv.stats().requests.computed_tokens_total
    done = kv.submit([50, 51], sequence=s, max_tokens=1, sampling=GREEDY).result(30)
    # the last generated token and the two new ones; a step more may have been under way
    assert kv.stats().requests.computed_tokens_total - computed == 3
    assert done.cached_tokens == 11
    kv.remove(s)


def test_a_prefix_is_shared_between_requests_of_a_tenant_and_not_between_tenants(kv: Client) -> None:
    prompt = list(range(100, 121))
    first = kv.submit(prompt, max_tokens=4, sampling=GREEDY, tenant="a").result(30)
    again = kv.submit(prompt, max_tokens=4, sampling=GREEDY, tenant="a").result(30)
    other = kv.submit(prompt, max_tokens=4, sampling=GREEDY, tenant="b").result(30)
    assert (first.cached_tokens, again.cached_tokens, other.cached_tokens) == (0, 20, 0)
    assert first.tokens == again.tokens == other.tokens
    shared = [kv.submit(prompt, max_tokens=4, sampling=GREEDY, tenant=t, cache_salt="s").result(30) for t in ("a", "b")]
    assert [done.cached_tokens for done in shared] == [0, 20]
    by_tenant = {row.tenant: row for row in kv.stats().tenants}
    assert by_tenant["a"].prefix_hit_tokens_total == 20
    assert by_tenant["a"].prefix_queried_tokens_total == 63


def test_part_of_a_cached_block_is_copied_instead_of_computed() -> None:
    with Cluster(blocks=64, coordinator="[cache]\nblock_size = 16\npartial_tokens_min = 4\n") as cluster:
        kv = cluster.start("w0")
        prompt = list(range(40, 72))
        kv.submit(prompt, max_tokens=2, sampling=GREEDY).result(30)
        branch = [*prompt[:26], 200, 201, 202, 203]
        done = kv.submit(branch, max_tokens=8, sampling=GREEDY).result(30)
        assert done.cached_tokens == 26  # one shared block and ten tokens copied from the next
        fresh = kv.submit(branch, max_tokens=8, sampling=GREEDY, cache_salt="alone").result(30)
        assert (fresh.cached_tokens, fresh.tokens) == (0, done.tokens)
        wait_empty(kv)


def test_named_holders_of_blocks(kv: Client) -> None:
    """behaviours 10, 13, 14."""
    s = kv.create_sequence([1, 2, 3, 4, 5])
    block = next(b for b in range(256) if kv.block(b).refcount)
    generation = kv.block(block).generation
    assert [holder.name for holder in kv.block(block).holders] == [f"sequence {s.id}"]
    assert kv.ref(block, "me").refcount == 2
    for error, action in (
        (AlreadyHolder, lambda: kv.ref(block, "me")),
        (NotAHolder, lambda: kv.unref(block, "you")),
        (StaleGeneration, lambda: kv.ref(block, "x", generation=generation + 1)),
        (BlockNotFound, lambda: kv.block(1_000_000)),
        (BlockNotFound, lambda: kv.ref(-5, "x")),
    ):
        with pytest.raises(error):
            action()
        assert kv.block(block).refcount == 2
    kv.remove(s)
    assert (kv.block(block).refcount, kv.block(block).state) == (1, "referenced")
    gone = kv.unref(block, "me", generation=generation)
    assert (gone.refcount, gone.state) == (0, "free")
    with pytest.raises((BlockNotHeld, StaleGeneration)):
        kv.unref(block, "me", generation=generation)
    assert kv.block(block).generation == generation + 1


def test_explain_answers(kv: Client) -> None:
    s = kv.create_sequence([1, 2, 3, 4, 5], tenant="explained")
    block = next(b for b in range(256) if kv.block(b).tenant == "explained")
    told = kv.explain(block=block)
    assert told.subject == f"block {block}"
    assert any(f"held by sequence {s.id} for" in sentence for sentence in told.sentences)
    told = kv.explain(sequence=s)
    assert (told.facts["blocks"], told.facts["length"], told.facts["computed_tokens"]) == (2, 5, 0)
    told = kv.explain(tenant="explained")
    bytes_per_block = kv.stats().pools[0].bytes_per_block
    assert told.facts["bytes"] == 2 * bytes_per_block
    assert told.facts["live_tokens"] == 5
    assert told.facts["byte_seconds"] > 0
    assert kv.stats().pools[0].live_tokens == 5
    done = kv.submit([1, 2], max_tokens=1, sampling=GREEDY)
    done.result(30)
    assert kv.explain(request=done.id).facts["state"] == "finished"
    kv.remove(s)


def test_explain_says_why_a_request_waits() -> None:
    with Cluster(blocks=16, coordinator="[cache]\nblock_size = 4\npolicy = 'none'\n") as cluster:
        kv = cluster.start("w0")
        s = kv.create_sequence(list(range(40)))
        request = kv.submit(list(range(30)), max_tokens=8, sampling=GREEDY)
        behind = kv.submit(list(range(30, 60)), max_tokens=2, sampling=GREEDY)
        small = kv.submit([1], max_tokens=2, sampling=GREEDY)
        assert len(small.result(30).tokens) == 2  # it fits and does not wait behind requests that do not
        told = kv.explain(request=request.id)
        assert told.facts["passed"] == 1
        assert (told.facts["limit"], told.facts["blocks_short"], told.facts["place"]) == ("blocks", 2, 0)
        assert any(f"sequence {s.id} is idle and holds 10 blocks" in sentence for sentence in told.sentences)
        told = kv.explain(request=behind.id)
        assert told.facts["place"] == 1
        assert f"it waits behind request {request.id}" in told.sentences
        kv.remove(s)
        assert len(request.result(30).tokens) == 8
        assert len(behind.result(30).tokens) == 2


def test_an_idle_sequence_expires_and_its_owner_is_told_when_it_asks(kv: Client) -> None:
    """behaviour 24."""
    s = kv.create_sequence([1, 2, 3], idle_ttl_s=0.3)
    kept = kv.create_sequence([1, 2, 3])
    with pytest.raises(SequenceNotFound, match=r"idle for its time to live of 0\.3 s"):
        while True:
            kv.info(s)
    assert kv.info(kept).length == 3
    kv.remove(kept)


def test_pressure_evicts_idle_sequences_which_keep_their_tokens() -> None:
    """behaviour 22."""
    with Cluster(blocks=16, coordinator="[cache]\nblock_size = 4\n") as cluster:
        kv = cluster.start("w0")
        old, young = kv.create_sequence(list(range(24))), kv.create_sequence(list(range(24)))
        kv.tokens(old)
        third = kv.create_sequence(list(range(24)))  # 18 of 16 blocks: evicts the least recently used
        assert [kv.info(s).resident for s in (old, young, third)] == [True, False, True]
        assert kv.tokens(young) == tuple(range(24))
        expected = kv.submit(list(range(24)), max_tokens=4, sampling=GREEDY, cache_salt="other").result(30).tokens
        assert kv.submit(sequence=young, max_tokens=4, sampling=GREEDY).result(30).tokens == expected
    with Cluster(blocks=16, coordinator="[cache]\nblock_size = 4\npolicy = 'none'\n") as cluster:
        kv = cluster.start("w0")
        kv.create_sequence(list(range(40)))
        before = kv.stats().pools
        with pytest.raises(CapacityExceeded) as caught:
            kv.create_sequence(list(range(40)))
        assert (caught.value.needed, caught.value.available) == (10, 6)
        assert kv.stats().pools == before


def clients(endpoint: str, count: int, mode: str) -> list[list[str]]:
    """Run `count` client processes at once; return their outputs."""
    server, errors = fork_server(SERVICES), Path(f"/proc/{os.getpid()}/fd/2")
    running = [
        server.start_piped([endpoint, str(i), mode], errors, {**os.environ}, "tests.integration.appending")
        for i in range(count)
    ]
    printed = []
    for _, output in running:
        with output:
            printed.append(output.read().decode().split())
    assert [process.wait(120) for process, _ in running] == [0] * count
    return printed


def test_ten_clients_append_at_once_without_a_lost_update(kv: Client) -> None:
    """behaviour 18: exact totals, unique ids, no duplicate block."""
    ids = [int(words[0]) for words in clients(kv.endpoint, 10, "own")]
    assert len(set(ids)) == 10
    stats = kv.stats()
    assert (stats.sequences, referenced(stats)) == (10, 250)
    holders = [kv.block(b).holders for b in range(256) if kv.block(b).refcount]
    assert all(len(one) == 1 for one in holders)
    kv.remove(ids)
    assert referenced(wait_empty(kv)) == 0


def test_ten_clients_on_a_pool_that_is_too_small() -> None:
    """behaviour 18: every command succeeds or is refused with CapacityExceeded; nothing is lost."""
    with Cluster(blocks=40, coordinator="[cache]\nblock_size = 4\npolicy = 'none'\n") as cluster:
        kv = cluster.start("w0")
        printed = [tuple(map(int, words)) for words in clients(cluster.endpoint, 10, "small")]
        made = sum(count for count, _ in printed)
        stats = kv.stats()
        assert stats.sequences == made
        assert referenced(stats) == 3 * made <= 40
        assert sum(refused for _, refused in printed) > 0


def test_many_clients_on_one_sequence_get_success_or_a_typed_error(kv: Client) -> None:
    """behaviour 20."""
    s = kv.create_sequence([1, 2, 3])
    allowed = {"ok", SequenceBusy.code, SequenceNotFound.code, CapacityExceeded.code, "invalid_request"}
    for outcomes in clients(kv.endpoint, 4, str(s.id)):
        assert set(outcomes) <= allowed
    with pytest.raises(SequenceNotFound):
        kv.info(s)
    wait_empty(kv)


def cycles_leave_memory_flat(count: int, growth_max: int) -> None:
    """Create, append to and remove sequences. The resident memory of the processes may grow in the first thousand.

    Args:
        count: The number of cycles.
        growth_max: Bytes that a process may grow by in the others.
    """
    with Cluster(blocks=64) as cluster:
        kv = cluster.start("w0")
        fresh = kv.stats().pools[0]

        def cycles(count: int) -> None:
            for i in range(count):
                s = kv.create_sequence([i % 256, 1, 2])
                kv.append(s, [3])
                kv.remove(s)

        cycles(1000)
        before = {name: cluster.resident_bytes(name) for name in ("coordinator", "w0")}
        cycles(count - 1000)
        for name, resident in before.items():
            assert cluster.resident_bytes(name) - resident < growth_max
        after = kv.stats().pools[0]
        assert (after.free, after.referenced, after.cached) == (fresh.free, 0, 0)
        assert after.allocated_total - fresh.allocated_total == after.freed_total == count


def test_thousands_of_cycles_leave_memory_flat() -> None:
    """behaviour 11: measured by the processes' resident memory, not by our counters."""
    cycles_leave_memory_flat(2000, 1 << 20)


def test_ten_thousand_cycles_leave_memory_flat() -> None:
    """behaviour 11, with a fifth of the growth that escapes in the test above."""
    cycles_leave_memory_flat(10_000, 2 << 20)


def test_a_closed_client_refuses_and_a_dead_owner_loses_only_what_has_no_time_to_live(
    cluster: Cluster, kv: Client
) -> None:
    other = cluster.client()
    lasting, fleeting = other.create_sequence([1, 2], idle_ttl_s=60), other.create_sequence([3, 4])
    held = next(b for b in range(256) if kv.block(b).refcount)
    other.ref(held, "a dead client's")
    assert kv.block(held).refcount == 2
    other.close()
    with pytest.raises(Conflict):
        other.info(lasting)
    with pytest.raises(SequenceNotFound, match="its owner's connection ended"):
        while kv.info(fleeting):
            select.select([], [], [], 0.01)
    assert kv.info(lasting).length == 2
    assert kv.block(held).refcount <= 1
    kv.remove(lasting)
    with pytest.raises(KvforgeError):
        kv.tokens(lasting)
    wait_empty(kv)


def test_a_sequence_is_cut_off_and_goes_on_and_outlives_its_connection(kv: Client, cluster: Cluster) -> None:
    s = kv.create_sequence([11, 12, 13, 14, 15])
    kv.submit(sequence=s, max_tokens=6, sampling=GREEDY).result()
    whole = kv.tokens(s)
    (fork,) = kv.fork(s)
    assert kv.rewind(s, 7).length == 7
    assert kv.tokens(s) == whole[:7] and kv.tokens(fork) == whole
    assert kv.submit(sequence=s, max_tokens=4, sampling=GREEDY).result().tokens == whole[7:]
    with pytest.raises(InvalidRequest, match="length"):
        kv.rewind(s, 12)
    assert kv.keep(s, 30).idle_ttl_ms == 30_000
    kv.close()
    with Client(cluster.endpoint, timeout_s=60, connect_timeout_s=30) as other:
        assert other.tokens(s) == whole
        with pytest.raises(SequenceNotFound):
            other.tokens(fork)
        other.remove(s)
