"""Driver of a chaos run: starts real processes, strikes them with faults, waits for calm, and compares the ledgers.

The workload comes from client processes (`client`). The driver kills, stops, restarts and measures processes.
"""

from __future__ import annotations

import asyncio
import json
import random
import shutil
import signal
import subprocess
import time
from collections import Counter
from collections.abc import Awaitable, Callable
from contextlib import suppress
from typing import Any

from kvforge import AsyncClient, Client, KvforgeError
from kvforge.coordinator.journal.recovery import recover
from kvforge.coordinator.journal.segment_completion import complete_segment
from kvforge.protocol.messages import Stats
from tools.cluster.cluster import READY_S, Cluster
from tools.cluster.drafting_cluster import DraftingCluster

from . import cases, interruptions, leftovers, planted, sizes, tokenizer
from .interruptions import COORDINATOR, GATEWAY
from .ledger import FINISHED, LIST_MAX, Ledger
from .processes import CLIENT_END_S, Processes

WORKERS = 2
CLIENTS = ("p0", "p1", "p2", "p3", "h0")  # the last process uses HTTP
CLIENTS_EACH = 4
DRAFTERS = ("lookup", "model", "mtp")
BLOCKS, BLOCKS_WITH_HOST = 128, 64  # with a host tier, so few that blocks leave the pool and requests are preempted
WRITEBACK_BLOCKS = 4
SILENCE_S, PEER_SILENCE_S = 2.0, 10.0
LEASE_S = 3.0
GIVEN_BACK_S = 2 * LEASE_S
WAIT_S = 60.0  # timeout of every wait, far longer than any process fault
CALM_S = 8.0  # calm at the end, so that every process is warm at the last measurement
TEND_S, LOOK_S, MEASURE_S = 0.02, 2.0, 1.0
LOOK_TIMEOUT_S = 5.0
ATTACHED_AT_END = 20
BYTES_MAX = {
    "c": 24 << 20,
    "g": 24 << 20,
    "w": 64 << 20,
    "p": 12 << 20,
    "h": 12 << 20,
}  # maximum memory growth of a process, by the first letter of its name
CONFIG = f"""
on_stop = "keep"
[limits]
idle_timeout_s = {SILENCE_S}
lease_s = {LEASE_S}
# Keep few finished requests, so that the limits are reached early and memory can be flat.
finished_max = 2048
answers_kept_max = 128
[schedule]
drafts_max = 0
step_timeout_s = 8
# Prompts take several steps. Few distinct row counts occur, because a CPU compiles its products for each one.
step_tokens_max = 64
# Workers crash all the time here, and not because of their requests.
crashes_max = 100
[cache]
# Take checkpoints of recurrent states within prompts and answers.
checkpoint_tokens = 64
[journal]
# Make snapshots frequent.
bytes_max = 1000000
replay_ms_max = 300
"""


class Driver:
    """A chaos run; `faults` describes every violation that it found."""

    def __init__(
        self,
        minutes: float,
        seed: int,
        log: Callable[[str], None],
        fault: str = "",
        device: str = "cpu",
        dtype: str = "float32",
        *,
        ranks: int = 1,
        pause_s: float = interruptions.PAUSE_S,
        family: str = "llama",
        drafts: int = 0,
        host_bytes: int = 0,
        disk_bytes: int = 0,
        drafter: str = DRAFTERS[0],
    ) -> None:
        """Create a run.

        Args:
            minutes: duration of the process faults.
            seed: the seed of faults and requests.
            log: called with a description of each process fault.
            fault: the bug to plant (see `planted`), or "".
            device: the workers' device.
            dtype: the workers' dtype.
            ranks: if above 1, run so many processes as ranks of one worker; else run two workers.
            pause_s: the mean pause between two process faults.
            family: of the tiny model, a name in `tools.cluster.running.FAMILIES`.
            drafts: `schedule.drafts_max` of the disturbed run; the expected answers are computed without drafts.
            host_bytes: of each worker's host file, 0 for none; the expected answers are computed without one.
            disk_bytes: of each worker's disk tier below it, 0 for none.
            drafter: a name in DRAFTERS. "model": the model itself is the draft model too; "mtp": a random module. With
                these, workers draft with each result, whatever it costs.
        """
        self._minutes, self._seed, self._log = minutes, seed, log
        self._computing = {"device": device, "dtype": dtype, "family": family}
        self._planted = fault
        self._ranks, self._pause_s, self._drafts, self._host_bytes = ranks, pause_s, drafts, host_bytes
        self._disk_bytes, self._drafter = disk_bytes, drafter
        self._workers = tuple(f"w{number}" for number in range(ranks if ranks > 1 else WORKERS))
        self.faults: list[str] = []
        self._struck: Counter[str] = Counter()
        self._sizes: dict[str, Any] = {}
        self._report: dict[str, Any] = {}

    def run(self) -> dict[str, Any]:
        """Run to the end and return the report, with all violations in its `faults`."""
        sizes: dict[str, Any] = {"blocks": BLOCKS, "ranks": self._ranks, **self._computing}
        config = CONFIG.replace("drafts_max = 0\n", f"drafts_max = {self._drafts}\n")
        if self._host_bytes:
            config = config.replace("[cache]\n", f"[cache]\nhost_writeback_blocks = {WRITEBACK_BLOCKS}\n")
        others = bool(self._drafts or self._host_bytes)
        if others:  # an answer that drafts or the host tier have changed would be the expected one
            with Cluster(coordinator=CONFIG, **sizes) as undisturbed:
                self._known = self._answered(undisturbed)
        if self._host_bytes:
            sizes |= {"blocks": BLOCKS_WITH_HOST, "host_bytes": self._host_bytes, "disk_bytes": self._disk_bytes}
        with self._cluster_of(coordinator=config, **sizes) as cluster:
            tokenizer.write(cluster.model)
            if self._drafter != DRAFTERS[0]:
                beside = cluster.model if self._drafter == "model" else self._drafter
                cluster.configure_workers(f'draft_model = "{beside}"\n')
            if others:
                cluster.start(*self._workers).close()
            else:
                self._known = self._answered(cluster)
            file = cluster.folder / "cases.json"
            file.write_text(json.dumps([known.as_json() for known in self._known]))
            options = {
                "endpoint": cluster.endpoint,
                "cases": str(file),
                "model": str(cluster.model),
                "clients": CLIENTS_EACH,
                "wait_s": WAIT_S,
                "gone_s": SILENCE_S / 2,
            }
            self._cluster = cluster
            self._ledger = Ledger(self._known)
            self._processes = Processes(cluster, self._workers, CLIENTS, options, self._ranks > 1)
            try:
                asyncio.run(self._run())
            except (KvforgeError, AssertionError, subprocess.TimeoutExpired) as error:
                self.faults.append(f"the run did not finish: {error!r}")
            finally:
                self._processes.close()
                if self.faults:
                    kept = shutil.copytree(cluster.folder, f"{cluster.folder}-failed", ignore=_no_sockets)
                    self._log(f"kept logs, notes and journal in {kept}")
        return {
            **self._computing,
            "ranks_of_one": self._ranks,
            "mean_pause_s": self._pause_s,
            **self._report,
            "faults": self.faults,
        }

    def _answered(self, cluster: Cluster) -> list[cases.Known]:
        with cluster.start(*self._workers) as kv:
            return cases.answered(kv, cases.draw(self._seed))

    def _cluster_of(self, **options: Any) -> Cluster:
        if self._planted:
            return planted.PlantedCluster(self._planted, **options)
        return Cluster(**options) if self._drafter == DRAFTERS[0] else DraftingCluster(**options)

    # --------------------------------------------------------------------------------------------------------- the run

    async def _run(self) -> None:
        began = time.monotonic()
        processes = self._processes
        for member in (COORDINATOR, *self._workers):
            processes.begin(member)
        async with AsyncClient(
            self._cluster.endpoint, timeout_s=WAIT_S, connect_timeout_s=WAIT_S, reconnect_s=WAIT_S
        ) as kv:
            await self._ledger.begin(kv)
            processes.start_gateway()
            for member in CLIENTS:
                processes.start_client(member)
            background = [
                asyncio.create_task(_every(TEND_S, self._tend)),
                asyncio.create_task(_every(LOOK_S, lambda: self._look(kv))),
                asyncio.create_task(_every(MEASURE_S, self._measure)),
            ]
            await self._interrupt_members()
            self._log("calm")
            processes.calm()
            await self._until("all workers serve", lambda: self._serving(kv), READY_S)
            await asyncio.sleep(CALM_S)
            for task in background:
                task.cancel()
            for error in await asyncio.gather(*background, return_exceptions=True):
                if not isinstance(error, asyncio.CancelledError):
                    self.faults.append(f"a monitoring task failed: {error!r}")
            processes.measure()
            await self._settle(kv)
        self._check_sizes()
        self._report = self._make_report(time.monotonic() - began)
        await self._end_all()

    async def _interrupt_members(self) -> None:
        until = time.monotonic() + self._minutes * 60
        drawn = interruptions.draw(
            self._seed, self._workers, CLIENTS, SILENCE_S, PEER_SILENCE_S, self._pause_s, self._disk_bytes > 0
        )
        for pause_s, interruption in drawn:
            if time.monotonic() + pause_s > until:
                break
            await asyncio.sleep(pause_s)
            self._log(f"{time.strftime('%H:%M:%S')} {interruption}")
            for member in interruption.members:
                self._struck[f"{interruption.kind} {member[0] if member in CLIENTS else member}"] += 1
            self._processes.strike(interruption)
        await asyncio.sleep(max(0.0, until - time.monotonic()))

    async def _tend(self) -> None:
        self._processes.tend()

    async def _measure(self) -> None:
        self._processes.measure()

    async def _look(self, kv: AsyncClient) -> None:
        with suppress(KvforgeError, TimeoutError):  # the coordinator may be dead or stopped
            async with asyncio.timeout(LOOK_TIMEOUT_S):
                await self._ledger.look(kv)
                workers = (await kv.health()).workers
                serving = {worker.pid for worker in workers if worker.state == "ready"}
                self._processes.serving({*serving, self._processes.lives[COORDINATOR][-1].pid})
        with suppress(OSError, TimeoutError):
            async with asyncio.timeout(LOOK_TIMEOUT_S):
                if (pid := await self._processes.gateway_serves()) is not None:
                    self._processes.serving({pid})

    async def _serving(self, kv: AsyncClient) -> bool:
        health = await kv.health()
        return sum(worker.state == "ready" for worker in health.workers) == len(self._workers)

    # ----------------------------------------------------------------------------------------------------- the end

    async def _settle(self, kv: AsyncClient) -> None:
        """Wait until all work has ended, then compare the ledgers."""
        processes, ledger = self._processes, self._ledger
        processes.end_clients()
        if not await self._until("the clients have ended", self._clients_ended, CLIENT_END_S):
            processes.clients_ended(late=True)
        if (status := processes.end_gateway()) != 0:
            self.faults.append(f"{GATEWAY} exited with status {status}")
        await self._until("all requests have ended", lambda: self._ended(kv), WAIT_S)
        stories = processes.stories()
        await self._attach(kv, stories)
        ledger.account(stories, processes.absences + processes.drains, processes.killed_clients)
        self.faults += ledger.faults
        self.excused = Counter(note["code"] for story in stories for note in story.broken)
        await self._until("only the books' own client is left", lambda: self._alone(kv), WAIT_S)
        # A sequence that a request continued when its owner left lives for one lease after the request.
        await self._until("what had a lease is given back", lambda: self._given_back(kv), GIVEN_BACK_S)
        stats = self._stats = await kv.stats()
        self._last_workers = (await kv.health()).workers
        self._check_empty(stats)
        for request_id in sorted(ledger.records)[-ATTACHED_AT_END:]:
            if not (await kv.explain(request=request_id)).sentences:
                self.faults.append(f"explain returns nothing for request {request_id}")

    async def _clients_ended(self) -> bool:
        return self._processes.clients_ended(late=False)

    async def _ended(self, kv: AsyncClient) -> bool:
        await self._ledger.look(kv)
        return not self._ledger.running

    async def _alone(self, kv: AsyncClient) -> bool:
        return (await kv.stats()).clients == 1

    async def _given_back(self, kv: AsyncClient) -> bool:
        return not any(leftovers.not_given_back(await kv.stats()))

    async def _attach(self, kv: AsyncClient, stories: list[Any]) -> None:
        """Attach to detached requests that no client read to the end, and compare their tokens."""
        listed = {row.request_id for row in (await kv.requests(LIST_MAX)).requests}  # older requests may be evicted
        left = sorted({request_id for story in stories for request_id in story.left} & listed)
        for request_id in random.Random(self._seed).sample(left, min(len(left), ATTACHED_AT_END)):
            done = await (await kv.attach(request_id)).result()
            record = self._ledger.records.get(request_id)
            if record is None or done.tokens != record.tokens:
                self.faults.append(f"request {request_id} returns {done.tokens} on attach, but its record is {record}")

    def _check_empty(self, stats: Stats) -> None:
        self.faults += leftovers.not_given_back(stats)
        requests = stats.requests
        # The reference answers are counted, too.
        if requests.accepted_total != len(self._ledger.records):
            self.faults.append(
                f"accepted {requests.accepted_total} requests, but {len(self._ledger.records)} have ended"
            )

    async def _end_all(self) -> None:
        """Recover the journal and check the machine, then end all processes and check that nothing is left."""
        cluster = self._cluster
        cluster.kill(COORDINATOR)
        complete_segment(cluster.runtime / "state")
        found = recover(cluster.runtime / "state")
        if found is None or found.torn is not None:
            self.faults.append(f"the journal does not recover cleanly: {found}")
        else:
            try:
                found.machine.check_invariants()
            except AssertionError as error:
                self.faults.append(f"the recovered machine violates an invariant: {error}")
            if found.machine.requests.live:
                self.faults.append(f"the recovered machine has {len(found.machine.requests.live)} unfinished requests")
        cluster.start_coordinator()
        with cluster.client() as kv:
            cluster.wait_workers(kv, len(self._workers))
            self._check_last(kv)
        for member in (COORDINATOR, *self._workers):
            cluster.signal(member, signal.SIGTERM)
            if (status := cluster.end(member)) != 0:
                self.faults.append(f"{member} exited with status {status}")
        self.faults += leftovers.orphans(cluster.folder)
        self.faults += leftovers.files(cluster.runtime)
        for member in (COORDINATOR, GATEWAY, *self._workers, *CLIENTS):
            self.faults += leftovers.complaints(member, cluster.log(member))

    def _check_last(self, kv: Client) -> None:
        stats = kv.stats()
        if stats.requests.accepted_total != self._stats.requests.accepted_total:
            self.faults.append(
                f"request counts changed over the last restart: {self._stats.requests}, then {stats.requests}"
            )
        self._check_empty(stats)
        kv.purge_finished(0)

    # -------------------------------------------------------------------------------------------------- the report

    def _check_sizes(self) -> None:
        for member, lives in self._processes.lives.items():
            spans = self._processes.spans(member)
            if not spans:
                continue
            grown = sizes.growth(spans)
            self._sizes[member] = {
                "processes": len(lives),
                "last_mb": round(spans[-1].last.bytes / 1e6, 1),
                "grown_mb_most": round(grown.bytes / 1e6, 1),
                "last_descriptors": spans[-1].last.descriptors,
                "grown_descriptors_most": grown.descriptors,
            }
            self.faults += sizes.too_large(member, spans, BYTES_MAX[member[0]])

    def _make_report(self, took_s: float) -> dict[str, Any]:
        records = self._ledger.records.values()
        requests = self._stats.requests
        return {
            "seed": self._seed,
            "minutes": self._minutes,
            "took_s": round(took_s, 1),
            "clients": len(CLIENTS) * CLIENTS_EACH,
            "interruptions": dict(sorted(self._struck.items())),
            "processes_started": {member: len(lives) for member, lives in self._processes.lives.items()},
            "requests": {
                "accepted": requests.accepted_total,
                "finished": sum(record.state == FINISHED for record in records),
                "cancelled": requests.cancelled_total,
                "tokens": requests.generated_tokens_total,
                "tokens_compared": sum(len(record.tokens) for record in records),
                "recomputed_tokens": requests.recomputed_tokens_total,
                "preemptions": requests.preemptions_total,
            },
            "drafts": {
                "most": self._drafts,
                "drafter": self._drafter,
                "drafted_by_last_workers": sum(worker.drafted_total for worker in self._last_workers),
                "accepted_by_last_workers": sum(worker.accepted_total for worker in self._last_workers),
            },
            "host": {
                "bytes": self._host_bytes,
                "saved_by_last_workers": sum(worker.host_saved_total for worker in self._last_workers),
                "loaded_by_last_workers": sum(worker.host_loaded_total for worker in self._last_workers),
                "missed_by_last_workers": sum(worker.host_missed_total for worker in self._last_workers),
                "swapped": sum(pool.host_swapped_total for pool in self._stats.pools),
                "swapped_or_not": sum(
                    pool.host_swapped_total + pool.host_unswapped_total for pool in self._stats.pools
                ),
            },
            "disk": {
                "bytes": self._disk_bytes,
                "processes_killed": self._processes.disks_killed,
                **self._disk_counts(),
            },
            "away_too_long": len(self._processes.absences),
            "errors_of_those": dict(self.excused),
            "sizes": self._sizes,
        }

    def _disk_counts(self) -> dict[str, int]:
        """Return what the last workers have counted of their disk tiers."""
        disks = [worker.disk for worker in self._last_workers if worker.disk is not None]
        names = ("recovered", "saved", "loaded", "missed_tags", "missed_checksums", "failed", "late")
        return {f"{name}_by_last_workers": sum(getattr(disk, f"{name}_total") for disk in disks) for name in names}

    async def _until(self, what: str, ready: Callable[[], Awaitable[bool]], wait_s: float) -> bool:
        deadline = time.monotonic() + wait_s
        while time.monotonic() < deadline:
            with suppress(KvforgeError):
                if await ready():
                    return True
            await asyncio.sleep(TEND_S)
        self.faults.append(f"timed out after {wait_s:g} s: {what}")
        return False


async def _every(pause_s: float, do: Callable[[], Awaitable[None]]) -> None:
    while True:
        await do()
        await asyncio.sleep(pause_s)


def _no_sockets(folder: str, names: list[str]) -> list[str]:
    return [name for name in names if name.endswith(".sock")]
