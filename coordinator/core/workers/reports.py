"""Worker messages: connection, loading, pool registration, results, and the end of a worker."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import numpy as np

from kvforge.protocol.errors import Conflict, Field, KvforgeError, ProtocolError, WorkerError, restore
from kvforge.protocol.messages import (
    ERROR_TEXT_MAX,
    LEFT,
    DiskEntries,
    DiskResults,
    ErrorInfo,
    Message,
    Refused,
    Rendezvous,
    StepResult,
    WorkerFailed,
    WorkerHello,
    WorkerLoading,
    WorkerReady,
)
from kvforge.protocol.meters import WorkerInfo

from ..cache.costs import DURATION_US_MAX
from ..cache.groups import Group
from ..cache.kv_cache_manager import KVCacheManager
from ..commands import validate
from ..commands.requests import RequestCommands
from ..deadlines import NEVER, WORKERS
from ..events import DropWorker, Effect, FromWorker, ReplaceWorker, ToWorker
from ..limits import microseconds
from ..requests.request import NO_SLOT, Request
from ..requests.table import RequestTable
from ..scheduling.admission import Admission
from ..scheduling.finisher import RequestFinisher
from .disk_reports import DiskReports
from .results import StepResults
from .teams import Team, check_rank
from .worker import Worker, log_of, registered, slots_in_steps

BEGINS_OF = 8  # a step that begins 1 / BEGINS_OF of its rows is no measure of others


class WorkerReports:
    """Handlers of the worker messages. A worker that violates the protocol is refused and dropped."""

    def __init__(
        self,
        cache: KVCacheManager,
        requests: RequestTable,
        admission: Admission,
        finisher: RequestFinisher,
        results: StepResults,
        commands: RequestCommands,
        effects: list[Effect],
        boot: str,
    ) -> None:
        self._cache, self._requests, self._admission = cache, requests, admission
        self._finisher, self._results, self._commands = finisher, results, commands
        self._clock, self._crashes_max = cache.clock, cache.limits.schedule.crashes_max
        self._timeout_us = microseconds(cache.limits.schedule.step_timeout_s)
        self._boot, self._reattach_us = boot, microseconds(cache.limits.bounds.reattach_s)
        self.workers: dict[int, Worker] = {}
        self._teams: dict[str, Team] = {}  # by name, of workers with several ranks
        self.ended: dict[str, str] = {}  # by name: how absent workers ended, most recent last
        self._ended_max = cache.limits.bounds.pools_max
        self.registered_total = self.returned_total = self.left_total = self.lost_total = 0
        self.changed: set[int] = set()  # workers with new facts to publish
        self._effects, disks = effects, DiskReports(cache, effects)
        self._reports: dict[type[Message], Callable[[Worker, Any], None]] = {
            WorkerLoading: self._worker_loading,
            WorkerReady: self._worker_ready,
            StepResult: self._step_result,
            DiskEntries: disks.entries,
            DiskResults: disks.results,
            WorkerFailed: self._worker_failed,
        }

    def pass_time(self) -> int:
        """Replace workers that have worked on one step for too long, and drop those that did not return in time.

        Returns:
            When the next worker will have exceeded the time for its step or its return, or NEVER.
        """
        first_us, now_us = NEVER, self._clock.now_us
        for worker in list(self.workers.values()):
            group = worker.group
            if group is None or worker.number not in self.workers:  # a rank of a worker that has just ended
                continue
            if group.away:
                due_us = worker.away_until_us
                if due_us <= now_us:
                    self.end_worker(self._absent(worker).number, False)
                    continue
            elif group.sent:
                since_us = max(group.sent[0].sent_us, group.result_us)
                due_us = since_us + self._timeout_us + 1
                if due_us <= now_us:
                    self._replace(worker, now_us - since_us)
                    continue
            else:
                continue
            if due_us < first_us:
                first_us = due_us
        return first_us

    def _absent(self, worker: Worker) -> Worker:
        """Return the rank that a worker waits for. The connected ranks are told of its end, and replaced."""
        if worker.ranks == 1:
            return worker
        team = self._teams[worker.name]
        return next(member for rank, member in team.members.items() if rank not in team.back)

    def _replace(self, worker: Worker, silent_us: int) -> None:
        """Replace a worker that has done no step for `silent_us`."""
        reason = f"worker {worker.name}{self._lagging(worker)} has done no step for {silent_us / 1e6:.3g} s"
        reason += " while one was due"
        self._log("error", f"{reason}: it is replaced", "worker_hung", worker)
        self._drop_worker(worker.number, reason)
        self._effects.append(ReplaceWorker(worker.number, worker.pid, reason))

    def facts(self) -> Iterator[WorkerInfo]:
        """Yield the facts of each worker for monitors. The ranks of one worker share an entry."""
        for worker in self.workers.values():
            if worker.ranks == 1:
                yield worker.facts()
            elif worker.rank == min(self._teams[worker.name].members):
                yield worker.facts(self._teams[worker.name].members.values())

    def apply(self, event: FromWorker) -> None:
        """Apply a message of a worker."""
        message: Any = event.message
        try:
            if isinstance(message, WorkerHello):
                self._worker_hello(event.worker, message)
            else:
                worker = self.workers.get(event.worker)
                if worker is None:
                    raise ProtocolError("the first message of a worker must be worker_hello")
                self._reports[type(message)](worker, message)
        except KvforgeError as error:
            rid = getattr(message, "rid", 0)
            self._effects.append(ToWorker(event.worker, Refused(rid=rid, error=ErrorInfo.of(error))))
            text = f"worker connection {event.worker} was refused: {error}"
            self._log("warning", text, "worker_refused", self.workers.get(event.worker), error=error.code)
            self._drop_worker(event.worker, str(error))

    def _worker_hello(self, number: int, message: WorkerHello) -> None:
        if number in self.workers:
            raise ProtocolError("worker_hello was sent twice")
        check_rank(message)
        if message.ranks > 1 or message.name in self._teams:
            self._rank_hello(number, message)
            return
        same = next((worker for worker in self.workers.values() if worker.name == message.name), None)
        if same is not None and same.group is not None and same.group.away:
            if message.boot == self._boot and message.epoch == same.group.epoch:
                self._come_back(same, same.group, number, message.rid)
                return
            # A successor, or the same process: its registration never arrived, so it has no pool to return to.
            self.end_worker(same.number, False, died=message.pid != same.pid)
        elif same is not None:
            raise Conflict(f"a worker named {message.name!r} is connected already: give each worker its own name")
        worker = self.workers[number] = Worker(number, message.name, message.pid)
        self.changed.add(number)
        self.ended.pop(message.name, None)
        self._log("info", "worker connected", "worker_connected", worker, pid=message.pid)

    def _rank_hello(self, number: int, message: WorkerHello) -> None:
        """Add a rank of a worker. When all ranks are connected, send them a unique name for their rendezvous."""
        name, rank, team = message.name, message.rank, self._teams.get(message.name)
        group = next(iter(team.members.values())).group if team is not None else None
        if team is not None and group is not None and group.away:
            if rank in team.back:
                raise Conflict(f"rank {rank} of worker {name!r} is connected already: give each a rank of its own")
            if (message.boot, message.epoch, message.ranks) == (self._boot, group.epoch, team.count):
                self._rank_back(team, group, team.members[rank], number, message.rid)
                return
            lost = team.members[rank] if rank in team.members else self._absent(team.members[0])
            self.end_worker(lost.number, False, died=message.pid != lost.pid)  # a successor, as above
            team = None
        if team is None:
            if any(worker.name == name for worker in self.workers.values()):
                raise Conflict(f"a worker named {name!r} is connected already: give each worker its own name")
            team = Team(name, message.ranks)
        if message.ranks != team.count:
            raise Conflict(f"worker {name!r} has {team.count} ranks, but one that connected announces {message.ranks}")
        if rank in team.members:
            raise Conflict(f"rank {rank} of worker {name!r} is connected already: give each a rank of its own")
        self._teams[name] = team
        worker = self.workers[number] = team.members[rank] = Worker(number, name, message.pid, rank, team.count)
        self.ended.pop(name, None)
        self._log("info", "worker connected", "worker_connected", worker, pid=message.pid, rank=rank)
        self._update_phases(team)
        if not team.missing:
            meeting = Rendezvous(name=f"{self._boot}-{number}")
            self._effects.extend(ToWorker(member.number, meeting) for member in team.members.values())

    def _update_phases(self, team: Team) -> None:
        """Update the phase of ranks that have not met."""
        missing = ", ".join(map(str, team.missing))
        for member in team.members.values():
            member.phase = f"waiting for rank {missing} of {team.count}" if missing else "meeting the other ranks"
            self.changed.add(member.number)

    def _rank_back(self, team: Team, group: Group, worker: Worker, number: int, rid: int) -> None:
        """Reconnect a rank under another number, immediately.

        Another rank may be in the middle of a step that this one has not received, and cannot reconnect before.
        No step is planned until all ranks are back.
        """
        del self.workers[worker.number]
        self.workers[number] = worker
        worker.number = number
        self.changed.add(number)
        team.back.add(worker.rank)
        self._effects.append(ToWorker(number, registered(group, rid, team.done[worker.rank])))
        self._effects.extend(ToWorker(number, sent.message) for sent in group.sent)
        if len(team.back) < team.count:
            return
        group.worker, group.others = team.members[0].number, team.others
        group.away, group.result_us = False, self._clock.now_us
        if group.disk is not None:
            group.disk.came_back()
        self._clock.deadlines.arm(WORKERS, self._clock.now_us + self._timeout_us)
        self.returned_total += 1
        self._cache.waits.wake_all()
        self._log("info", "worker is back", "worker_back", worker, steps=len(group.sent))

    def restarted(self, gone_us: int) -> None:
        """Mark every worker as disconnected. Workers with a pool may return with its content.

        Args:
            gone_us: Since when no coordinator ran.
        """
        for request in self._requests.live.values():
            request.phases.restart(request.slot != NO_SLOT, gone_us, self._clock.now_us)
            if request.slot != NO_SLOT:
                self._admission.rows.set_fresh(request.slot, True)
        for worker in list(self.workers.values()):
            if worker.number not in self.workers:
                continue  # a rank of a worker that has just ended
            if worker.group is None:
                if worker.ranks > 1:
                    self._teams[worker.name].back.clear()
                self.end_worker(worker.number, False)
            else:
                worker.group.away, worker.away_until_us = True, self._clock.now_us + self._reattach_us
                self._clock.deadlines.arm(WORKERS, worker.away_until_us)
                if worker.ranks > 1:
                    self._teams[worker.name].back.clear()
                self.changed.add(worker.number)

    def _come_back(self, worker: Worker, group: Group, number: int, rid: int) -> None:
        """Reconnect a worker under another number, and resend the steps in flight, which it may not have received."""
        del self.workers[worker.number]
        self.workers[number] = worker
        worker.number = group.worker = number
        group.away, group.result_us = False, self._clock.now_us
        if group.disk is not None:
            group.disk.came_back()
        self._clock.deadlines.arm(WORKERS, self._clock.now_us + self._timeout_us)
        self.returned_total += 1
        self.changed.add(number)
        self._cache.waits.wake_all()
        self._log("info", "worker is back", "worker_back", worker, steps=len(group.sent))
        self._effects.append(ToWorker(number, registered(group, rid)))
        self._effects.extend(ToWorker(number, sent.message) for sent in group.sent)

    def _worker_loading(self, worker: Worker, message: WorkerLoading) -> None:
        worker.phase, worker.progress = message.phase, message.progress
        self.changed.add(worker.number)

    def _worker_ready(self, worker: Worker, message: WorkerReady) -> None:
        if worker.group is not None:
            raise ProtocolError(f"worker {worker.name}: worker_ready was sent twice")
        validate.worker_ready(worker.name, message, self._cache.limits)
        model = self._cache.model
        others = bool(self._cache.groups) or bool(self._requests.live)
        if model is not None and others and model.fingerprint != message.model.fingerprint:
            raise Conflict(
                f"worker {worker.name!r} serves {message.model.name!r} ({message.model.fingerprint[:12]}), "
                f"but other workers or live requests use {model.name!r} ({model.fingerprint[:12]}): "
                "all must use the same model; a start with --fresh discards the state of earlier runs"
            )
        self._check_host_file(worker, message)
        worker.phase, worker.progress = "ready", 1.0
        worker.device_bytes, worker.kernels = message.device_bytes, message.kernels
        self.changed.add(worker.number)
        team = self._teams[worker.name] if worker.ranks > 1 else None
        if team is not None:
            announced = self._rank_ready(worker, team, message)
            if announced is None:
                return
            worker, message = team.members[0], announced
            self._check_host_file(worker, message)
        group = worker.group = self._cache.add_group(worker.number, worker.name, message, worker.ranks)
        self.registered_total += 1
        if team is not None:
            self._register_ranks(team, group)
        else:
            self._effects.append(ToWorker(worker.number, registered(group, message.rid)))
        facts: dict[str, Field] = {"blocks": message.blocks, "model": message.model.name, "device": message.device}
        self._log("info", "worker ready", "worker_ready", worker, **facts)
        if model is None:
            self._commands.recheck()

    def _check_host_file(self, worker: Worker, message: WorkerReady) -> None:
        if message.host_blocks and self._cache.host_tiers.is_mapped(message.host_identity):
            raise Conflict(f"worker {worker.name!r} announces the host file of another worker: give each its own name")

    def _rank_ready(self, worker: Worker, team: Team, message: WorkerReady) -> WorkerReady | None:
        """Return the joint announcement of all ranks, or None while one is still loading."""
        if worker.rank in team.ready:
            raise ProtocolError(f"worker {worker.name}: worker_ready was sent twice by rank {worker.rank}")
        if team.missing:
            raise ProtocolError(f"worker {worker.name}: rank {worker.rank} is ready before all ranks have come")
        team.ready[worker.rank] = message
        return team.announced() if len(team.ready) == team.count else None

    def _register_ranks(self, team: Team, group: Group) -> None:
        group.others = team.others
        team.begin(group.last_step)
        for rank in range(team.count):
            member = team.members[rank]
            member.group = group
            self.changed.add(member.number)
            self._effects.append(ToWorker(member.number, registered(group, team.ready[rank].rid)))

    def _rank_result(self, worker: Worker, team: Team, group: Group, message: StepResult) -> None:
        """Take a rank's result; a step counts once all ranks have answered it."""
        if not team.answer(worker.rank, message):
            step, rank = message.step_id, worker.rank
            self._log("warning", f"worker {worker.name}: stale result of step {step} of rank {rank} ignored")
            return
        while group.sent and (settled := team.settled()) is not None:
            self._settle(group, settled)

    def _step_result(self, worker: Worker, message: StepResult) -> None:
        group = worker.group
        if group is None or message.epoch != group.epoch:
            self._log("warning", f"worker {worker.name}: result of step {message.step_id} of another epoch ignored")
            return
        if worker.ranks > 1:
            self._rank_result(worker, self._teams[worker.name], group, message)
            return
        if not group.sent or message.step_id < group.sent[0].step_id:
            self._log("warning", f"worker {worker.name}: stale result of step {message.step_id} ignored")
            return
        if message.step_id != group.sent[0].step_id:
            raise ProtocolError(f"step {group.sent[0].step_id} is due, but the result is for step {message.step_id}")
        self._settle(group, message)

    def _settle(self, group: Group, message: StepResult) -> None:
        sent = group.sent[0]
        if message.step_id != sent.step_id:
            raise ProtocolError(f"step {sent.step_id} is due, but the result is for step {message.step_id}")
        self._results.apply(group, message)
        reads = bool(sent.message.host_reads.size)
        group.step_took(sent.prefill_tokens, message.duration_us, reads)
        wanted = group.drafts or self._admission.rows.batch_count
        if wanted and sent.slots.size and not sent.prefill_tokens and not reads:
            since_us = max(sent.sent_us, group.result_us)
            passes_us = max(0, min(message.draft_us, DURATION_US_MAX)) if sent.message.propose else 0
            drafts, elapsed_us = int(np.add.reduce(sent.message.drafts)), self._clock.now_us - since_us - passes_us
            alone = sent.sent_us >= group.result_us and self._cache.limits.schedule.steps_in_flight_max > 1
            rows = sent.slots.size
            group.row_costs.add(rows, drafts, message.duration_us, elapsed_us, alone=alone)
            if group.model_drafts.most and sent.message.propose and drafts:
                group.model_drafts.gains.add_drafted(rows, message.slots.size, elapsed_us + passes_us)
            # Rows that begin take the worker longer than their tokens: a step with many is like no other.
            is_like_others = not (
                alone or drafts or sent.message.propose or BEGINS_OF * len(sent.message.begins) >= rows
            )
            if group.model_drafts.most and is_like_others:
                group.model_drafts.gains.add_plain(rows, elapsed_us)
        if message.idle_us >= 0:
            with_result = sent.sent_us == group.result_us  # both have the time of their turn
            group.pauses.add(message.idle_us, message.duration_us, with_result=with_result, in_time=sent.in_time)
        group.result_us = self._clock.now_us

    def _worker_failed(self, worker: Worker, message: WorkerFailed) -> None:
        error = restore(message.error.code, message.error.message, message.error.fields)
        self._log("error", f"worker {worker.name} failed: {error}", "worker_failed", worker, error=error.code)
        self._drop_worker(worker.number, str(error))

    def _drop_worker(self, number: int, reason: str) -> None:
        self.end_worker(number, False, f" ({reason[:ERROR_TEXT_MAX]})")
        self._effects.append(DropWorker(number, reason))

    def end_worker(self, number: int, goodbye: bool, why: str = "", died: bool = True) -> None:
        """A worker's connection ended: its blocks are gone, its requests wait for another place.

        Args:
            number: The number of the connection.
            goodbye: Whether it left on purpose.
            why: The reason it gave, or why the coordinator gave it up.
            died: Its process may have died of what it was computing.
        """
        worker = self.workers.pop(number, None)
        if worker is None:
            return
        self.changed.add(number)
        if worker.ranks > 1:
            self._end_others(worker, self._teams[worker.name], goodbye, why)
        self.left_total += goodbye
        self.lost_total += not goodbye
        requests = worker.group.running if worker.group is not None else 0
        how = "worker left" if goodbye else "worker lost"
        self._note_end(worker, f"{LEFT if goodbye else 'was lost'}, process {worker.pid}{why}")
        self._log("info" if goodbye else "warning", how, how.replace(" ", "_"), worker, running=requests)
        group, s = worker.group, self._cache.sequences
        if group is None:
            return
        active = np.flatnonzero(s.running & (s.pool == group.number))
        running = [self._requests.live[request] for request in s.request[active].tolist()]
        suspects = set() if goodbye or not died else slots_in_steps(group, self._admission.rows.run)
        self._admission.note_computed(running)
        self._cache.drop_group(group)
        for request in sorted(running, key=lambda r: -r.admitted_order):
            suspected = request.slot in suspects
            request.phases.lose_worker(self._clock.now_us)
            self._admission.requeue(request)
            if suspected:
                self._count_crash(request, worker.name)

    def cut_off(self, number: int) -> None:
        """Wait for a worker that lost its connection while the coordinator stood still, as after a restart.

        Args:
            number: Its connection. A worker without a pool has nothing to come back to, and is gone.
        """
        worker = self.workers.get(number)
        if worker is None or worker.group is None:
            self.end_worker(number, False)
            return
        group, now_us = worker.group, self._clock.now_us
        if worker.ranks > 1:
            self._teams[worker.name].back.discard(worker.rank)
            for member in self._teams[worker.name].members.values():
                member.away_until_us = now_us + self._reattach_us
        if not group.away:
            s = self._cache.sequences
            for slot in np.flatnonzero(s.running & (s.pool == group.number)).tolist():
                self._requests.live[int(s.request[slot])].phases.lose_worker(now_us)
                self._admission.rows.set_fresh(slot, True)
        group.away, worker.away_until_us = True, now_us + self._reattach_us
        self._clock.deadlines.arm(WORKERS, worker.away_until_us)
        self.changed.add(number)
        reattach_s = self._reattach_us / 1e6
        text = f"worker cut off while the coordinator stood still: it has {reattach_s:g} s to come back with its pool"
        self._log("warning", text, "worker_cut_off", worker, running=group.running)

    def _end_others(self, worker: Worker, team: Team, goodbye: bool, why: str) -> None:
        """End the other ranks of a worker that lost one. Their processes are killed: they may hang in a collective."""
        if team.leave(worker.rank):
            self._update_phases(team)
            if not team.members:
                del self._teams[team.name]
            return
        del self._teams[team.name]
        reason = f"rank {worker.rank} of {team.count} of worker {team.name} {'left' if goodbye else 'was lost'}{why}"
        for rank, other in team.members.items():
            if other is worker:
                continue
            del self.workers[other.number]
            self.changed.add(other.number)
            if rank not in team.back:
                continue  # this rank is away too
            # Sent as a fault even if the rank left on purpose, so that the supervisor restarts the processes.
            refusal = Refused(rid=0, error=ErrorInfo.of(WorkerError(reason)))
            self._effects.append(ToWorker(other.number, refusal))
            self._effects.append(DropWorker(other.number, reason))
            if not goodbye:
                self._effects.append(ReplaceWorker(other.number, other.pid, reason))

    def _lagging(self, worker: Worker) -> str:
        """Describe which ranks have not done the step that is due."""
        if worker.ranks == 1 or worker.group is None:
            return ""
        team = self._teams[worker.name]
        return f" (rank {', '.join(map(str, team.lagging(worker.group.sent[0].step_id)))} of {team.count})"

    def _note_end(self, worker: Worker, how: str) -> None:
        self.ended.pop(worker.name, None)
        self.ended[worker.name] = how
        if len(self.ended) > self._ended_max:
            del self.ended[next(iter(self.ended))]

    def _count_crash(self, request: Request, worker: str) -> None:
        """Count that a worker died while running the request.

        After several deaths in a row without a token in between, the request counts as the cause and fails.
        """
        length = request.prompt.size + request.tokens.size
        request.crashes = 1 if length > request.crash_length else request.crashes + 1
        request.crash_length = length
        if request.crashes >= self._crashes_max:
            problem = f"request {request.id}: {request.crashes} workers died while running it, the last {worker}"
            self._log("error", f"{problem}: it fails")
            error = WorkerError(problem, request_id=request.id, crashes=request.crashes)
            self._finisher.end(request, "fail", "failed", error)

    def _log(self, level: str, text: str, event: str = "", worker: Worker | None = None, **facts: Field) -> None:
        self._effects.append(log_of(level, text, event, worker, **facts))
