"""The disk tier with real processes: prefixes come back with the same bits after a restart of everything."""

from __future__ import annotations

import os
import select
import signal
from pathlib import Path
from time import monotonic

import pytest

from kvforge import Client
from kvforge.protocol.messages import DiskStats
from kvforge.worker.disk import segments
from kvforge.worker.host_file import PAGE
from tests.coordinator.net import until
from tools.cluster.cluster import Cluster

from .shared import wait_empty
from .test_host_tier import BLOCKS, CACHED, PROMPTS, bits, found, serve
from .test_unresponsive import wait_log

HOST_BYTES, DISK_BYTES = 4 << 20, 3 * segments.SEGMENT_BYTES
WAIT_S = 60.0
TIER_READY = "disk tier ready"  # a line of the coordinator's log


def settings(cluster: Cluster) -> str:
    """Return the worker's settings: a host file and a disk tier in the cluster's folder, encrypted."""
    key = cluster.folder / "key"
    if not key.exists():
        key.touch(0o600)
        key.write_text("07" * 32)
    disk = f'disk_bytes = {DISK_BYTES}\ndisk_dir = "{cluster.folder}"\ndisk_key_file = "{key}"\n'
    return f'host_bytes = {HOST_BYTES}\nhost_dir = "{cluster.folder}"\n{disk}'


def disk_of(kv: Client) -> DiskStats:
    """Return the disk of the only worker, once everything has been copied."""
    deadline = monotonic() + WAIT_S
    while True:
        (pool,) = wait_empty(kv).pools
        assert pool.disk is not None
        disk = pool.disk
        if not disk.referenced and disk.quarantined < disk.blocks and disk.saved_total + disk.loaded_total >= 1:
            return disk
        assert monotonic() < deadline, f"copies do not end: {disk}"
        select.select([], [], [], 0.05)


def all_again(cluster: Cluster, ranks: tuple[str, ...] = ("w0",)) -> Client:
    """Kill everything, remove the host files as a restart of the host does, and start everything."""
    for name in (*ranks, "coordinator"):
        cluster.kill(name)
    for path in cluster.folder.glob("kvforge-host-*"):
        path.unlink()
    return started(cluster, ranks)


def started(cluster: Cluster, ranks: tuple[str, ...] = ("w0",), changed: str = "") -> Client:
    """Start a coordinator, and a worker with a disk tier; `ranks` names its processes. Return once the tier is there.

    `changed` replaces the setting of its name.

    A recovered coordinator has the worker that was killed for a moment, and requests of that time find nothing.
    """
    log = cluster.folder / "coordinator.log"
    before = log.read_text().count(TIER_READY) if log.exists() else 0
    cluster.start_coordinator()
    for name in ranks:
        cluster.start_worker(name, settings(cluster), changed)
    kv = cluster.client()
    kv.wait_ready(300)
    until(lambda: log.read_text().count(TIER_READY) > before)
    cluster.wait_workers(kv, len(ranks))
    return kv


def segment(cluster: Cluster) -> Path:
    """Return the only segment."""
    (path,) = cluster.folder.glob("kvforge-disk-*/*/segment-*")
    return path


# behaviours: a restart of everything keeps the disk's entries, with the same bits; flipped bits are misses; a copying
# process that dies turns the tier off, and serving goes on
@pytest.mark.skipif(not Path("/proc").is_dir(), reason="finds the copying process in /proc")
def test_prefixes_come_back_after_a_restart_of_everything() -> None:
    with Cluster(blocks=BLOCKS) as cluster:
        kv = started(cluster)
        whole = [serve(kv, prompt) for prompt in PROMPTS]
        saved = disk_of(kv)
        assert saved.saved_total == saved.cached >= 3 * 9

        kv = all_again(cluster)
        again = [serve(kv, prompt) for prompt in PROMPTS[:3]]  # the last one was on the device alone
        assert found(again) == [CACHED] * 3 and list(map(bits, again)) == list(map(bits, whole[:3]))
        disk = disk_of(kv)
        assert disk.recovered_total >= 3 * 9 and disk.loaded_total >= 3 * 9 and not disk.late_total

        flip(segment(cluster))
        kv = all_again(cluster)
        again = [serve(kv, prompt) for prompt in PROMPTS[:3]]
        assert found(again) == [0] * 3 and list(map(bits, again)) == list(map(bits, whole[:3]))
        disk = disk_of(kv)
        assert disk.recovered_total >= 3 * 9 and disk.missed_checksums_total >= 3 and disk.loaded_total < 9

        os.kill(copying_process(cluster.pid("w0")), signal.SIGKILL)
        again = [serve(kv, prompt) for prompt in [*PROMPTS, *PROMPTS]]
        assert list(map(bits, again)) == list(map(bits, [*whole, *whole]))
        wait_log(cluster, "w0", "disk tier: its process has ended")


def flip(path: Path) -> None:
    """Flip a bit of each block of a segment, and of no record in use."""
    with path.open("r+b") as file:
        file.seek(1 << 20)
        area = bytearray(file.read(8 << 20))
        area[:: segments.PAGE] = bytes(byte ^ 4 for byte in area[:: segments.PAGE])
        file.seek(1 << 20)
        file.write(area)


def copying_process(worker: int) -> int:
    """Return the copying process of a worker."""
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        try:
            command = path.read_bytes()
            parent = int((path.parent / "stat").read_text().rpartition(")")[2].split()[1])
        except OSError:
            continue
        if b"kvforge.worker.disk.copying" in command and parent == worker:
            return int(path.parent.name)
    raise AssertionError("no copying process")


def wiped(kv: Client, tenant: str) -> tuple[int, int, int]:
    """Wipe a tenant until all is overwritten. Return the blocks that the first command removed, by tier."""
    deadline = monotonic() + WAIT_S
    first = reply = kv.wipe_tenant(tenant)
    while reply.held_blocks or reply.pending_blocks:
        assert monotonic() < deadline, f"not wiped: {reply}"
        select.select([], [], [], 0.05)
        reply = kv.wipe_tenant(tenant)
    return first.device_blocks, first.host_blocks, first.disk_blocks


# behaviour: a wiped tenant has no bytes in the host file and in the segments, and nothing comes back
def test_a_wiped_tenant_leaves_no_bytes() -> None:
    with Cluster(blocks=BLOCKS) as cluster:
        kv = started(cluster)
        whole = [serve(kv, prompt) for prompt in PROMPTS]
        saved = disk_of(kv)
        (host,) = cluster.folder.glob("kvforge-host-*")
        assert any(host.read_bytes()[PAGE:]) and any(segment(cluster).read_bytes())
        device, in_host, on_disk = wiped(kv, "default")
        assert device > 0 and in_host >= 3 * 9 and on_disk == saved.cached
        assert not any(host.read_bytes()[PAGE:]) and not any(segment(cluster).read_bytes())
        again = serve(kv, PROMPTS[0])
        assert found([again]) == [0] and bits(again) == bits(whole[0])
        wiped(kv, "default")
        kv = all_again(cluster)
        assert found([serve(kv, PROMPTS[0])]) == [0]
