"""The disk tier of a worker with ranks, with real processes: each has its share, and one that lacks it is a miss."""

from __future__ import annotations

import hashlib
import os
import resource
import select
import signal
from pathlib import Path
from time import monotonic

import pytest

from kvforge import Client
from tools.cluster.cluster import Cluster

from .shared import wait_empty
from .test_disk_tier import WAIT_S, all_again, copying_process, disk_of, flip, settings, started
from .test_host_tier import BLOCKS, CACHED, GREEDY, PROMPTS, bits, found, serve

RANKS = ("w0", "w1")
PATIENT = "[schedule]\ndisk_wait_s = 60\n"
FIRST = PROMPTS[:3]  # those that the last one evicts from the pool


def segment_of(cluster: Cluster, rank: int) -> Path:
    """Return the only segment of a rank."""
    digest = hashlib.blake2b(f"w0\n{rank}".encode(), digest_size=8).hexdigest()
    (path,) = cluster.folder.glob(f"kvforge-disk-{digest}/*/segment-*")
    return path


# behaviours: prefixes come back after a restart of everything with the same bits; what one rank lacks, or has with a
# flipped bit, is a miss for all, with a counter; another number of ranks misses all
@pytest.mark.parametrize("rank", [1, pytest.param(0, marks=pytest.mark.soak)])
def test_prefixes_come_back_from_the_disks_of_all_ranks(rank: int) -> None:
    with Cluster(ranks=2, blocks=BLOCKS, coordinator=PATIENT) as cluster:
        kv = started(cluster, RANKS)
        whole = [serve(kv, prompt) for prompt in PROMPTS]
        saved = disk_of(kv)
        assert saved.saved_total == saved.cached >= 3 * 9
        assert len(list(cluster.folder.glob("kvforge-disk-*"))) == len(RANKS)

        kv = all_again(cluster, RANKS)
        again = [serve(kv, prompt) for prompt in FIRST]
        assert found(again) == [CACHED] * 3 and list(map(bits, again)) == list(map(bits, whole[:3]))
        disk = disk_of(kv)
        assert disk.recovered_total >= 3 * 9 and disk.loaded_total >= 3 * 9 and not disk.late_total

        flip(segment_of(cluster, rank))
        kv = all_again(cluster, RANKS)
        again = [serve(kv, prompt) for prompt in FIRST]
        assert found(again) == [0] * 3 and list(map(bits, again)) == list(map(bits, whole[:3]))
        disk = disk_of(kv)
        assert disk.recovered_total >= 3 * 9 and disk.missed_checksums_total >= 3 and disk.loaded_total < 9

        segment_of(cluster, rank).unlink()
        kv = all_again(cluster, RANKS)
        again = [serve(kv, prompt) for prompt in FIRST]
        assert found(again) == [0] * 3 and list(map(bits, again)) == list(map(bits, whole[:3]))
        disk = disk_of(kv)
        assert (disk.recovered_total, disk.loaded_total) == (0, 0) and (disk.pruned_total > 0) == (rank == 1)


def test_another_number_of_ranks_misses_all() -> None:
    with Cluster(ranks=2, blocks=BLOCKS, coordinator=PATIENT) as cluster:
        kv = started(cluster, RANKS)
        for prompt in PROMPTS:
            serve(kv, prompt)
        assert disk_of(kv).cached >= 3 * 9
        for name in RANKS:
            cluster.kill(name)
        cluster.kill("coordinator")
        cluster._ranks = 1
        kv = started(cluster)
        again = [serve(kv, prompt) for prompt in FIRST]  # a dummy model has other weights than two ranks have
        whole = [kv.submit(prompt, max_tokens=4, sampling=GREEDY, cache_salt="whole").result(60) for prompt in FIRST]
        assert found(again) == [0] * 3 and list(map(bits, again)) == list(map(bits, whole))
        assert not disk_of(kv).recovered_total


# behaviours: whichever rank is killed while blocks are copied, the answers keep their bits and no block is lost
def test_ranks_are_killed_while_they_copy() -> None:
    with Cluster(ranks=2, blocks=BLOCKS, coordinator=PATIENT) as cluster:
        kv = started(cluster, RANKS)
        whole = [serve(kv, prompt) for prompt in PROMPTS]
        for victim, other in (RANKS, RANKS[::-1]):
            disk_of(kv)
            for path in cluster.folder.glob("kvforge-host-*"):  # so that the successors read from the disk
                path.unlink()
            running = [kv.submit(prompt, max_tokens=4, sampling=GREEDY) for prompt in 3 * PROMPTS]
            next(iter(running[1]))
            cluster.kill(victim)
            assert cluster.end(other) != 0, "its supervisor must start it again"
            for name in RANKS:
                cluster.start_worker(name, settings(cluster))
            results = [request.result(120) for request in running]
            assert list(map(bits, results)) == list(map(bits, 3 * whole))
            assert any(found(results))
        pool_is_whole(kv)


def pool_is_whole(kv: Client) -> None:
    """Check that no block of a tier is lost."""
    disk, (pool,) = disk_of(kv), wait_empty(kv).pools
    assert pool.host_free + pool.host_cached == pool.host_blocks
    assert disk.free + disk.cached + disk.quarantined == disk.blocks and disk.loaded_total > 0


# behaviours: a full disk of one rank makes the tier smaller for all; the death of its copying process turns it off
@pytest.mark.skipif(not Path("/proc").is_dir(), reason="finds the copying process in /proc")
@pytest.mark.parametrize("rank", ["w1", pytest.param("w0", marks=pytest.mark.soak)])
def test_a_full_disk_of_one_rank(rank: str) -> None:
    with Cluster(ranks=2, blocks=BLOCKS, coordinator=PATIENT) as cluster:
        kv = started(cluster, RANKS)
        # A limit of file sizes is to a process what a full disk is: there is no space for the first segment.
        copying = copying_process(cluster.pid(rank))
        children = Path(f"/proc/{copying}/task/{copying}/children").read_text(encoding="ascii").split()
        for pid in (copying, *map(int, children)):
            resource.prlimit(pid, resource.RLIMIT_FSIZE, (4096, 4096))
        whole = [serve(kv, prompt) for prompt in PROMPTS]
        deadline = monotonic() + WAIT_S
        while True:
            (pool,) = wait_empty(kv).pools
            assert pool.disk is not None
            if not pool.disk.free and not pool.disk.referenced:
                break
            assert monotonic() < deadline, f"copies do not end: {pool.disk}"
            select.select([], [], [], 0.05)
        assert (pool.disk.cached, pool.disk.quarantined, pool.disk.off) == (0, pool.disk.blocks, False)
        assert pool.disk.failed_total > 0
        assert "no space for more than 0 blocks" in cluster.log(rank)
        os.kill(copying, signal.SIGKILL)
        again = [serve(kv, prompt) for prompt in [*PROMPTS, *PROMPTS]]
        assert list(map(bits, again)) == list(map(bits, [*whole, *whole]))
