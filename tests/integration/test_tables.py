"""The shared tables of a real coordinator match the coordinator's answers."""

from __future__ import annotations

import asyncio
import json
import select
import signal
from collections.abc import Iterator
from time import monotonic

import pytest

from kvforge import (
    AsyncClient,
    CachedSequence,
    Client,
    CoordinatorUnavailable,
    Request,
    SamplingParams,
    SequenceNotFound,
    Tables,
)
from kvforge.commands import cli
from tools.cluster.cluster import Cluster

from .midway import stopped_in_time
from .shared import wait_empty

GREEDY = SamplingParams(temperature=0.0, ignore_eos=True)
BLOCK_SIZE = 4
SMALL_BLOCKS = f"[cache]\nblock_size = {BLOCK_SIZE}\n"
WAIT_S = 30.0
PROMPT, TOKENS, LOOKS, TRIES = 5, 900, 4, 20


@pytest.fixture(scope="module")
def cluster() -> Iterator[Cluster]:
    with Cluster(blocks=512, coordinator=SMALL_BLOCKS) as started:
        started.start("w0")
        yield started


@pytest.fixture
def kv(cluster: Cluster) -> Iterator[Client]:
    with Client(cluster.endpoint, timeout_s=60, connect_timeout_s=30) as client:
        wait_empty(client)
        yield client
    with Client(cluster.endpoint, timeout_s=60, connect_timeout_s=30) as client:
        wait_empty(client)


def lengths(tables: Tables) -> dict[int, int]:
    return dict(zip(*(column.tolist() for column in tables.sequences()), strict=True))


def wait_done(tables: Tables) -> None:
    """Wait until the tables show no request."""
    deadline = monotonic() + WAIT_S
    while tables.gauges()["requests_running"]:
        assert monotonic() < deadline
        select.select([], [], [], 0.02)


def test_sequences_of_clients_are_what_the_coordinator_says(kv: Client) -> None:
    """Tables are updated before answers, so that no wait is needed."""
    tables = kv.tables()
    assert (tables.boot, tables.block_size, tables.alive) == (kv.stats().boot, BLOCK_SIZE, True)
    s = kv.create_sequence([1, 2, 3, 4, 5], tenant="a")
    empty = kv.create_sequence()
    (fork,) = kv.fork(s)
    kv.append(s, [6, 7, 8, 9])
    assert lengths(tables) == {s.id: 9, empty.id: 0, fork.id: 5}
    for one in (s, empty, fork):
        info, row = kv.info(one), tables.sequence(one)
        assert (row.sequence_id, row.length, row.blocks.size) == (one.id, info.length, info.blocks)
    own, shared = tables.sequence(s).blocks.tolist(), tables.sequence(fork).blocks.tolist()
    assert own[0] == shared[0]
    assert own[1] != shared[1]  # the block that was written to
    for block in (*own, *shared):
        told, counts = kv.block(block), tables.block(block)
        assert (counts.refcount, counts.generation) == (told.refcount, told.generation)
        assert counts.owner > 0
    assert [tables.block(block).refcount for block in own] == [2, 1, 1]
    kv.remove([s, empty, fork])
    assert lengths(tables) == {}
    with pytest.raises(SequenceNotFound):
        tables.sequence(s.id)


def test_gauges_are_the_statistics(kv: Client) -> None:
    tables = kv.tables()
    for request in [kv.submit([i, 2, 3], max_tokens=8, sampling=GREEDY) for i in range(4)]:
        request.result(WAIT_S)
    wait_empty(kv)
    s = kv.create_sequence([1, 2, 3, 4, 5])
    stats, gauges = kv.stats(), tables.gauges()
    (pool,) = stats.pools
    assert [gauges[f"blocks_{name}"] for name in ("free", "cached", "referenced", "quarantined")] == [
        pool.free,
        pool.cached,
        pool.referenced,
        pool.quarantined,
    ]
    assert gauges["blocks_total"] == pool.blocks == 512
    assert (gauges["sequences"], gauges["sequence_tokens"]) == (stats.sequences, 5)
    assert (gauges["requests_running"], gauges["requests_pending"]) == (0, 0)
    assert gauges["generated_tokens_total"] == stats.requests.generated_tokens_total
    assert gauges["steps_total"] == pool.steps
    assert gauges["uptime_us"] >= stats.uptime_us
    kv.remove(s)


def test_a_running_request_is_seen_to_grow(cluster: Cluster, kv: Client) -> None:
    tables = kv.tables()
    for _ in range(TRIES):
        s = kv.create_sequence([3, 1, 4, 1, 5])
        on_s = kv.submit(sequence=s, max_tokens=TOKENS, sampling=GREEDY)
        alone = kv.submit([2, 7, 1], max_tokens=TOKENS, sampling=GREEDY)
        in_time = len(seen_lengths(cluster, kv, tables, s, [on_s, alone])) == LOOKS
        for request in (on_s, alone):
            if in_time:
                kv.cancel(request.id)
            assert request.result(WAIT_S).reason == ("cancelled" if in_time else "length")
        wait_done(tables)
        assert tables.sequence(s).length == kv.info(s).length
        kv.remove(s)
        if in_time:
            return
    raise AssertionError(f"the requests ended {TRIES} times before their worker could be stopped")


def seen_lengths(cluster: Cluster, kv: Client, tables: Tables, s: CachedSequence, running: list[Request]) -> set[int]:
    """Return the lengths of a growing sequence, which the tables show while its worker is stopped.

    Fewer than LOOKS where this process had to wait for a core for so long that a request ended first.
    """
    seen: set[int] = set()
    on_s, alone = (iter(request) for request in running)
    next(alone)
    for _ in range(LOOKS):
        while PROMPT + len(running[0].tokens) <= max(seen, default=PROMPT):
            next(on_s)
        if not stopped_in_time(cluster, kv, running, TOKENS, "w0"):
            break
        before = kv.info(s).length
        row, gauges = tables.sequence(s), tables.gauges()
        assert before <= row.length <= kv.info(s).length
        assert row.length <= row.blocks.size * BLOCK_SIZE
        assert len(set(row.blocks.tolist())) == row.blocks.size
        assert gauges["requests_running"] == gauges["sequences"] == 2
        assert kv.status(running[0].id).state == "running"
        assert set(lengths(tables)) > {s.id}  # the request's own sequence is there too
        seen.add(row.length)
        cluster.signal("w0", signal.SIGCONT)
    return seen


def test_nothing_can_be_written(kv: Client) -> None:
    reader = kv.tables()._reader
    for column in (reader.block_refcount, reader.block_owner, reader._row_length, reader._block_table):
        with pytest.raises(ValueError, match="read-only"):
            column[0] = 1
    with pytest.raises(TypeError):
        reader._map[0] = 1


def test_the_asyncio_client_and_the_monitor_read_the_same(
    cluster: Cluster, kv: Client, capsys: pytest.CaptureFixture[str]
) -> None:
    async def ask() -> Tables:
        async with AsyncClient(cluster.endpoint, timeout_s=60) as client:
            return await client.tables()

    tables = asyncio.run(ask())  # it outlives the client
    clients = kv.stats().clients
    assert cli.main(["--endpoint", cluster.endpoint, "top", "--json", "--count", "2", "--every", "0.1"]) == 0
    first, second = (json.loads(line) for line in capsys.readouterr().out.splitlines())
    assert (first["boot"], first["blocks_total"], first["tokens_per_s"]) == (tables.boot, 512, None)
    assert second["tokens_per_s"] == 0
    assert second["uptime_us"] >= first["uptime_us"]
    assert kv.stats().clients == clients


def test_what_a_coordinator_leaves_behind() -> None:
    with Cluster() as cluster:
        kv = cluster.start()
        s, waiting = kv.create_sequence([1, 2, 3]), kv.submit([1], max_tokens=1)  # there is no worker
        killed = kv.tables()
        assert killed.gauges()["requests_pending"] == 1
        cluster.kill("coordinator")
        assert not killed.alive
        assert not Tables(cluster.runtime).alive  # its file still exists
        assert lengths(killed)[s.id] == 3
        cluster.start_coordinator()
        kv.append(s, [4])
        assert not waiting.done
        # The successor uses a new file, and readers of the old one switch to it.
        assert (killed.boot, killed.alive, killed.pid) == (kv.stats().boot, True, cluster.pid("coordinator"))
        assert lengths(killed)[s.id] == 4
        assert killed.gauges()["requests_pending"] == 1
        kv.close()
        cluster.signal("coordinator", signal.SIGTERM)
        assert cluster.end("coordinator") == 0
        assert not killed.alive
        with pytest.raises(CoordinatorUnavailable, match="no coordinator serves"):
            Tables(cluster.runtime)
