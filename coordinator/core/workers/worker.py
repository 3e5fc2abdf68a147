"""A worker process as seen by the coordinator."""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np
import numpy.typing as npt

from kvforge.protocol.errors import Field
from kvforge.protocol.messages import PoolRegistered, WorkerHealth
from kvforge.protocol.meters import NAME_LENGTH_MAX, WorkerInfo

from ..cache.groups import Group
from ..events import Log


class Worker:
    """A connected worker process, from its handshake to its end; one rank of several if `ranks` is above 1."""

    def __init__(self, number: int, name: str, pid: int, rank: int = 0, ranks: int = 1) -> None:
        self.number, self.name, self.pid = number, name, pid
        self.rank, self.ranks = rank, ranks
        self.phase, self.progress = "connecting", 0.0
        self.device_bytes: dict[str, int] = {}
        self.kernels: dict[str, str] = {}
        self.group: Group | None = None
        self.away_until_us = 0  # meaningful while its group is away

    def health(self, now_us: int) -> WorkerHealth:
        """Return the worker's state for `kvforge status`."""
        tier = self.group.host.tier if self.group and self.group.host else None
        state = "ready" if self.group else "loading" if self.phase != "connecting" else "connecting"
        return WorkerHealth(
            name=self.name,
            pid=self.pid,
            state=state,
            phase=self.phase,
            progress=self.progress,
            steps=self.group.steps_total - len(self.group.sent) if self.group else 0,
            since_step_us=working_us(self.group, now_us),
            device_bytes=self.device_bytes,
            kernels=self.kernels,
            rank=self.rank,
            ranks=self.ranks,
            drafts=self.group.drafts if self.group else 0,
            drafted_total=self.group.drafted_total if self.group else 0,
            accepted_total=self.group.accepted_total if self.group else 0,
            host_blocks=tier.total if tier else 0,
            host_cached=tier.cached if tier else 0,
            host_saved_total=tier.saved_total if tier else 0,
            host_loaded_total=tier.loaded_total if tier else 0,
            host_missed_total=tier.missed_tags_total + tier.missed_checksums_total if tier else 0,
            host_swapped_total=tier.swapped_total if tier else 0,
            host_swap_saved_us_total=tier.swap_saved_us_total if tier else 0,
            host_returns_total=tier.returns_total if tier else 0,
            host_returns_used_total=tier.returns_used_total if tier else 0,
            disk=self.group.disk.stats() if self.group and self.group.disk else None,
        )

    def facts(self, ranks: Iterable[Worker] = ()) -> WorkerInfo:
        """Return the facts for monitors. If `ranks` is given, they share the entry of this one."""
        group = self.group
        current = self.health(0)
        device_bytes: dict[str, int] = {}
        for each in ranks or (self,):
            for purpose, size in each.device_bytes.items():
                device_bytes[purpose] = device_bytes.get(purpose, 0) + size
        return WorkerInfo(
            name=self.name[:NAME_LENGTH_MAX],
            pid=self.pid,
            state="away" if self.group is not None and self.group.away else current.state,
            pool=group.number if group is not None else -1,
            block_bytes=group.bytes_per_block * self.ranks if group is not None else 0,
            kv_dtype=group.kv_dtype[:NAME_LENGTH_MAX] if group is not None else "",
            device_bytes=device_bytes,
        )


def log_of(level: str, text: str, event: str = "", worker: Worker | None = None, **facts: Field) -> Log:
    """Return a line of the log about a worker, or about none."""
    name: dict[str, Field] = {"worker": worker.name} if worker is not None else {}
    return Log(level, text, event, {**name, **facts})


def working_us(group: Group | None, now_us: int) -> int:
    """Return for how long a group's worker has worked on the step that is due; 0 if none is."""
    if group is None or not group.sent or group.away:
        return 0
    return now_us - max(group.sent[0].sent_us, group.result_us)


def slots_in_steps(group: Group, run: npt.NDArray[np.int64]) -> set[int]:
    """Return the slots with a present run in a step that the worker has not answered. run: of each slot."""
    rows = [sent.slots[run[sent.slots] == sent.runs] for sent in group.sent]
    return {slot for part in rows for slot in part.tolist()}


def registered(group: Group, rid: int, done: int = -1) -> PoolRegistered:
    """Build the answer to a registration.

    `done` is the last step with a result here; -1 takes the step before those in flight.
    """
    if done < 0:
        done = group.sent[0].step_id - 1 if group.sent else group.last_step
    return PoolRegistered(rid=rid, epoch=group.epoch, base_block=group.pool.base, pool=group.number, done=done)
