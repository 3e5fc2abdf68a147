"""Faults to plant in what outlives a coordinator: the journal, the snapshots, and reconnecting peers.

Like `faults`, but for worlds in which the coordinator dies (test_bites.py).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import numpy as np

from kvforge.coordinator import machine_store
from kvforge.coordinator import publish as publishing
from kvforge.coordinator.core.cache.changes import Change, Cleared
from kvforge.coordinator.core.commands.requests import RequestCommands
from kvforge.coordinator.core.commands.sessions import Sessions
from kvforge.coordinator.core.deadlines import NEVER, Deadlines
from kvforge.coordinator.core.events import Boot, ClientCame, ClientGone, FromClient, ToWorker
from kvforge.coordinator.core.machine import Machine
from kvforge.coordinator.core.workers import reports
from kvforge.coordinator.core.workers.reports import WorkerReports
from kvforge.coordinator.core.workers.worker import Worker, registered
from kvforge.coordinator.host.downtime import HostTime
from kvforge.coordinator.journal import entries, log, memory, records, recovery
from kvforge.coordinator.journal.log import Journal
from kvforge.coordinator.kv_events.stream import EventStream
from kvforge.coordinator.turn import TurnLoop
from kvforge.protocol.messages import PoolRegistered
from tools.simulation import crashes
from tools.simulation.faults import Patch

FAULTS_OF_DEATH: dict[str, Callable[[], list[Patch]]] = {}


def fault(make: Callable[[], list[Patch]]) -> Callable[[], list[Patch]]:
    """Register a fault under its function's name."""
    FAULTS_OF_DEATH[make.__name__] = make
    return make


@fault
def effects_before_the_journal() -> list[Patch]:
    """A turn's effects are carried out before the turn is written."""
    write, carry_out = TurnLoop._write, TurnLoop._carry_out

    def carry_out_first(self: TurnLoop) -> None:
        carry_out(self)
        write(self)

    return [(TurnLoop, "_write", lambda _self: None), (TurnLoop, "_carry_out", carry_out_first)]


@fault
def stored_records_not_added() -> list[Patch]:
    """A start does not add the records that the process before had not written to their segment."""
    return [(crashes, "complete_segment", lambda _folder: 0)]


@fault
def event_not_written() -> list[Patch]:
    """The disconnect of a client is not written, because it is not a message."""
    real = Journal.note

    def note(self: Journal, event: Any, now_us: int, frames: Any = ()) -> None:
        if not isinstance(event, ClientGone):
            real(self, event, now_us, frames)

    return [(Journal, "note", note)]


@fault
def entropy_not_written() -> list[Patch]:
    """After a recovery, a request without a seed of its own draws another one."""
    real = entries.pack

    def pack(event: Any, now_us: int, frames: Any = ()) -> Any:
        if isinstance(event, FromClient):
            event = FromClient(event.client, event.message, 0)
        return real(event, now_us, frames)

    return [(log, "pack", pack)]


@fault
def times_written_in_milliseconds() -> list[Patch]:
    """Times are rounded to milliseconds."""
    real = entries.pack

    def pack(event: Any, now_us: int, frames: Any = ()) -> Any:
        return real(event, now_us // 1000 * 1000, frames)

    return [(log, "pack", pack)]


@fault
def rights_not_written() -> list[Patch]:
    """After a recovery, every client has all rights."""
    real = entries.pack

    def pack(event: Any, now_us: int, frames: Any = ()) -> Any:
        return real(ClientCame(event.client, event.session) if isinstance(event, ClientCame) else event, now_us, frames)

    return [(log, "pack", pack)]


@fault
def torn_record_taken() -> list[Patch]:
    """A record with a missing end is accepted."""

    def valid(data: memoryview, at: int, number: int | None = None) -> Any:
        start = at + records.HEADER.size
        if start >= len(data):
            return None
        magic, size, crc, before, own = records.HEADER.unpack_from(data, at)
        if magic != records.MAGIC or (number is not None and own != number):
            return None
        return records.Record(own, crc, before, data[start : start + size], at, min(start + size, len(data)))

    return [(records, "_valid", valid)]


@fault
def page_left_out_of_a_snapshot() -> list[Patch]:
    """The last used page of each array is missing in a snapshot."""
    real = memory._write_array

    def write_array(array: Any, write: Any) -> None:
        copy = np.ascontiguousarray(array).copy()
        page = copy.reshape(-1).view(np.uint8)
        if page.any():
            page[np.flatnonzero(page)[-1]] = 0
        real(copy, write)

    return [(memory, "_write_array", write_array)]


@fault
def entry_applied_twice() -> list[Patch]:
    """The last entry of each record is applied twice."""
    real = entries.Reader.entries

    def twice(self: entries.Reader, payload: memoryview) -> Iterator[entries.Entry]:
        for entry in real(self, payload):
            yield entry
        if not isinstance(entry.event, Boot):
            yield entry

    return [(entries.Reader, "entries", twice)]


@fault
def command_done_again() -> list[Patch]:
    """A repeated command is executed again if its answer was lost."""
    return [(Sessions, "answer", lambda _self, _client, _rid: None)]


@fault
def whoever_is_away_is_streamed_to() -> list[Patch]:
    """Tokens are streamed to a disconnected client, which misses them."""
    return [(RequestCommands, "client_away", lambda _self, _client: None)]


@fault
def whoever_is_away_is_waited_for_for_ever() -> list[Patch]:
    """A disconnected client keeps its requests and sequences forever."""
    return [(Sessions, "pass_time", lambda _self: NEVER)]


@fault
def deadlines_not_found_again() -> list[Patch]:
    """A coordinator that recovered does not know when its parts have something to do."""
    return [(Deadlines, "arm_all", lambda _self, _due_us: None)]


@fault
def everybody_is_known_again() -> list[Patch]:
    """A client without a session is waited for, though it cannot come back."""

    def restarted(self: Sessions, clients: set[int]) -> list[int]:
        real(self, clients)
        return []

    real = Sessions.restarted
    return [(Sessions, "restarted", restarted)]


@fault
def stale_epoch_accepted() -> list[Patch]:
    """A worker that lost its pool is accepted as the one that had it."""
    real = WorkerReports._worker_hello

    def worker_hello(self: WorkerReports, number: int, message: Any) -> None:
        same = next((worker for worker in self.workers.values() if worker.name == message.name), None)
        if same is not None and same.group is not None and same.group.away:
            self._come_back(same, same.group, number, message.rid)
            return
        real(self, number, message)

    return [(WorkerReports, "_worker_hello", worker_hello)]


@fault
def rank_of_an_earlier_life_accepted() -> list[Patch]:
    """A rank that lost its pool is accepted as the one that had it."""

    def rank_hello(self: WorkerReports, number: int, message: Any) -> None:
        team = self._teams.get(message.name)
        member = team.members.get(message.rank) if team is not None else None
        if team is not None and member is not None and member.group is not None and member.group.away:
            self._rank_back(team, member.group, member, number, message.rid)
            return
        real(self, number, message)

    real = WorkerReports._rank_hello
    return [(WorkerReports, "_rank_hello", rank_hello)]


@fault
def group_goes_on_with_the_first_rank_that_is_back() -> list[Patch]:
    """A worker group continues when its first rank is back."""

    def rank_back(self: WorkerReports, team: Any, group: Any, worker: Worker, number: int, rid: int) -> None:
        team.back = set(range(team.count))
        real(self, team, group, worker, number, rid)

    real = WorkerReports._rank_back
    return [(WorkerReports, "_rank_back", rank_back)]


@fault
def worker_that_comes_back_begins_anew() -> list[Patch]:
    """A reconnecting worker loses its pool, though it still holds it."""

    def come_back(self: WorkerReports, worker: Worker, _group: Any, number: int, _rid: int) -> None:
        self.end_worker(worker.number, False)
        self.workers[number] = Worker(number, worker.name, worker.pid)

    return [(WorkerReports, "_come_back", come_back)]


@fault
def acknowledged_what_was_not() -> list[Patch]:
    """A reconnecting worker's last results are acknowledged, though they did not arrive."""
    real = registered

    def forgetful(group: Any, rid: int) -> PoolRegistered:
        answer = real(group, rid)
        return PoolRegistered(
            rid=rid, epoch=answer.epoch, base_block=answer.base_block, pool=answer.pool, done=group.last_step
        )

    return [(reports, "registered", forgetful)]


@fault
def steps_not_sent_again() -> list[Patch]:
    """A worker's lost steps are not sent again."""
    real = WorkerReports._come_back

    def come_back(self: WorkerReports, worker: Worker, group: Any, number: int, rid: int) -> None:
        before = len(self._effects)
        real(self, worker, group, number, rid)
        kept = [
            e for e in self._effects[before:] if not (isinstance(e, ToWorker) and type(e.message).__name__ == "Step")
        ]
        self._effects[before:] = kept

    return [(WorkerReports, "_come_back", come_back)]


@fault
def ended_rows_left_out_of_the_new_tables() -> list[Patch]:
    """A step in flight finds no blocks for ended rows in the new tables."""
    real = publishing.all_changed

    def all_changed(machine: Machine) -> None:
        real(machine)
        s = machine.cache.sequences
        s.changed_cells[:] = [(slots, slice(s.used[slots[0]])) for slots, _ in s.changed_cells]

    return [(recovery, "all_changed", all_changed)]


@fault
def born_otherwise() -> list[Patch]:
    """The next process starts its ids elsewhere."""
    real = entries.pack

    def pack(event: Any, now_us: int, frames: Sequence[Any] = ()) -> Any:
        if isinstance(event, Boot):
            event = Boot(event.boot, event.hash_key, event.limits, event.first_id + 1, event.first_generation)
        return real(event, now_us, frames)

    return [(log, "pack", pack)]


@fault
def mirrors_go_on_over_a_restart() -> list[Patch]:
    """After a restart, mirrors keep the entries of the previous process."""
    original = EventStream._send

    def send(self: EventStream, changes: Iterable[Change]) -> None:
        original(self, [change for change in changes if not isinstance(change, Cleared)])

    return [(EventStream, "_send", send)]


@fault
def time_away_by_the_wall_clock() -> list[Patch]:
    """The downtime is computed from the wall clock, which may have been set."""

    def downtime_us(_anchor: object, _last_us: int, written_s: float, now: HostTime, _most: float) -> int:
        return max(0, int((now.wall_s - written_s) * 1e6))

    return [(machine_store, "downtime_us", downtime_us)]
