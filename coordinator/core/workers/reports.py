"""What workers say, and what follows from it: they come, load, register their pool, return results, and go."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from kvforge.protocol.errors import Conflict, Field, KvforgeError, ProtocolError, WorkerError, restore
from kvforge.protocol.messages import (
    ERROR_TEXT_MAX,
    ErrorInfo,
    Message,
    PoolRegistered,
    Refused,
    StepResult,
    WorkerFailed,
    WorkerHealth,
    WorkerHello,
    WorkerLoading,
    WorkerReady,
)
from kvforge.protocol.meters import NAME_LENGTH_MAX, WorkerFacts

from ..cache.cache import Cache
from ..cache.groups import Group
from ..commands import validate
from ..commands.requests import RequestCommands
from ..events import DropWorker, Effect, FromWorker, Log, ReplaceWorker, ToWorker
from ..limits import microseconds
from ..requests.lifecycle import NO_SLOT, Request, RequestTable
from ..scheduling.admission import Admission
from ..scheduling.endings import Endings
from .results import StepResults


class Worker:
    """A connected worker process, from its hello to its end."""

    def __init__(self, number: int, name: str, pid: int) -> None:
        self.number, self.name, self.pid = number, name, pid
        self.phase, self.progress = "connecting", 0.0
        self.device_bytes: dict[str, int] = {}
        self.kernels: dict[str, str] = {}
        self.group: Group | None = None
        self.away_until_us = 0  # where its group is away

    def health(self, now_us: int) -> WorkerHealth:
        """What `kvforge status` shows."""
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
        )

    def facts(self) -> WorkerFacts:
        """What monitors are told."""
        group = self.group
        told = self.health(0)
        return WorkerFacts(
            name=self.name[:NAME_LENGTH_MAX],
            pid=self.pid,
            state="away" if group is not None and group.away else told.state,
            pool=group.number if group is not None else -1,
            block_bytes=group.bytes_per_block if group is not None else 0,
            kv_dtype=group.kv_dtype[:NAME_LENGTH_MAX] if group is not None else "",
            device_bytes=self.device_bytes,
        )


class WorkerReports:
    """Handlers of the worker messages. A worker that breaks the rules is refused and dropped; nobody else notices."""

    def __init__(
        self,
        cache: Cache,
        requests: RequestTable,
        admission: Admission,
        endings: Endings,
        results: StepResults,
        commands: RequestCommands,
        effects: list[Effect],
        boot: str,
    ) -> None:
        self._cache, self._requests, self._admission = cache, requests, admission
        self._endings, self._results, self._commands = endings, results, commands
        self._clock, self._crashes_max = cache.clock, cache.limits.schedule.crashes_max
        self._timeout_us = microseconds(cache.limits.schedule.step_timeout_s)
        self._boot, self._reattach_us = boot, microseconds(cache.limits.bounds.reattach_s)
        self.workers: dict[int, Worker] = {}
        self.ended: dict[str, str] = {}  # by name: how a worker went, who is not back; the last one is last
        self._ended_max = cache.limits.bounds.pools_max
        self.registered_total = self.returned_total = self.left_total = self.lost_total = 0
        self.changed: set[int] = set()  # of what is told of these workers
        self._effects = effects
        self._reports: dict[type[Message], Callable[[Worker, Any], None]] = {
            WorkerLoading: self._worker_loading,
            WorkerReady: self._worker_ready,
            StepResult: self._step_result,
            WorkerFailed: self._worker_failed,
        }

    def pass_time(self) -> None:
        """Workers that have worked on one step for too long are given up, and their processes ended."""
        for worker in list(self.workers.values()):
            if worker.group is not None and worker.group.away:
                if worker.away_until_us <= self._clock.now_us:
                    self.gone(worker.number, False)
                continue
            since_us = working_us(worker.group, self._clock.now_us)
            if since_us > self._timeout_us:
                reason = f"worker {worker.name} has done no step for {since_us / 1e6:.3g} s while one was due"
                self._log("error", f"{reason}: it is replaced", "worker_hung", worker)
                self._drop_worker(worker.number, reason)
                self._effects.append(ReplaceWorker(worker.number, worker.pid, reason))

    def due_us(self) -> int | None:
        """When the first worker will have worked too long on a step; None where none works."""
        first_us = None
        for worker in self.workers.values():
            group = worker.group
            if group is None or not (group.sent or group.away):
                continue
            if group.away:
                until_us = worker.away_until_us
            else:
                until_us = max(group.sent[0].sent_us, group.result_us) + self._timeout_us + 1
            first_us = until_us if first_us is None else min(first_us, until_us)
        return first_us

    def totals(self) -> tuple[int, int, int, int]:
        """Workers that registered a pool, came back to theirs, left, and were lost, since the service began."""
        return self.registered_total, self.returned_total, self.left_total, self.lost_total

    def apply(self, event: FromWorker) -> None:
        """Applies one message of a worker."""
        message: Any = event.message
        try:
            if isinstance(message, WorkerHello):
                self._worker_hello(event.worker, message)
            else:
                worker = self.workers.get(event.worker)
                if worker is None:
                    raise ProtocolError("a worker's first message is worker_hello")
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
        same = next((worker for worker in self.workers.values() if worker.name == message.name), None)
        if same is not None and same.group is not None and same.group.away:
            if message.boot == self._boot and message.epoch == same.group.epoch:
                self._come_back(same, same.group, number, message.rid)
                return
            self.gone(same.number, False)  # this is its successor, and has nothing of what it held
        elif same is not None:
            raise Conflict(f"a worker named {message.name!r} is connected already: give each worker its own name")
        worker = self.workers[number] = Worker(number, message.name, message.pid)
        self.changed.add(number)
        self.ended.pop(message.name, None)
        self._log("info", "worker connected", "worker_connected", worker, pid=message.pid)

    def restarted(self, gone_us: int) -> None:
        """No worker is connected any more. Those that hold a pool may come back with all that is in it.

        gone_us: since when there was no coordinator.
        """
        for request in self._requests.live.values():
            request.phases.restart(request.slot != NO_SLOT, gone_us, self._clock.now_us)
            if request.slot != NO_SLOT:
                self._admission.rows.set_fresh(request.slot, True)
        for worker in list(self.workers.values()):
            if worker.group is None:
                self.gone(worker.number, False)
            else:
                worker.group.away, worker.away_until_us = True, self._clock.now_us + self._reattach_us
                self.changed.add(worker.number)

    def _come_back(self, worker: Worker, group: Group, number: int, rid: int) -> None:
        """It goes on under another number. What it was to do may not have reached it, and is sent again."""
        del self.workers[worker.number]
        self.workers[number] = worker
        worker.number = group.worker = number
        group.away, group.result_us = False, self._clock.now_us
        self.returned_total += 1
        self.changed.add(number)
        self._cache.waits.wake_all()
        self._log("info", "worker is back", "worker_back", worker, steps=len(group.sent))
        self._effects.append(ToWorker(number, _registered(group, rid)))
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
                f"the others serve {model.name!r} ({model.fingerprint[:12]}): all must serve the same"
            )
        group = worker.group = self._cache.add_group(worker.number, worker.name, message)
        worker.phase, worker.progress = "ready", 1.0
        self.registered_total += 1
        self.changed.add(worker.number)
        worker.device_bytes, worker.kernels = message.device_bytes, message.kernels
        self._effects.append(ToWorker(worker.number, _registered(group, message.rid)))
        facts: dict[str, Field] = {"blocks": message.blocks, "model": message.model.name, "device": message.device}
        self._log("info", "worker ready", "worker_ready", worker, **facts)
        if model is None:
            self._commands.recheck()

    def _step_result(self, worker: Worker, message: StepResult) -> None:
        group = worker.group
        if group is None or message.epoch != group.epoch:
            self._log("warning", f"worker {worker.name}: result of step {message.step_id} of another epoch ignored")
            return
        if not group.sent or message.step_id < group.sent[0].step_id:
            self._log("warning", f"worker {worker.name}: stale result of step {message.step_id} ignored")
            return
        if message.step_id != group.sent[0].step_id:
            raise ProtocolError(f"step {group.sent[0].step_id} is due, the result names step {message.step_id}")
        sent = group.sent[0]
        self._results.apply(group, message)
        group.step_took(sent.prefill_tokens, message.duration_us)
        group.result_us = self._clock.now_us

    def _worker_failed(self, worker: Worker, message: WorkerFailed) -> None:
        error = restore(message.error.code, message.error.message, message.error.fields)
        self._log("error", f"worker {worker.name} failed: {error}", "worker_failed", worker, error=error.code)
        self._drop_worker(worker.number, str(error))

    def _drop_worker(self, number: int, reason: str) -> None:
        self.gone(number, False, f" ({reason[:ERROR_TEXT_MAX]})")
        self._effects.append(DropWorker(number, reason))

    def gone(self, number: int, goodbye: bool, why: str = "") -> None:
        """A worker's connection ended: its blocks are gone, its requests wait for another place.

        goodbye: it left on purpose. why: what it said, or why it was given up.
        """
        worker = self.workers.pop(number, None)
        if worker is None:
            return
        self.changed.add(number)
        self.left_total += goodbye
        self.lost_total += not goodbye
        requests = worker.group.running if worker.group is not None else 0
        how = "worker left" if goodbye else "worker lost"
        self._note_end(worker, f"{'left' if goodbye else 'was lost'}, process {worker.pid}{why}")
        self._log("info" if goodbye else "warning", how, how.replace(" ", "_"), worker, running=requests)
        group, s = worker.group, self._cache.sequences
        if group is None:
            return
        active = np.flatnonzero(s.running & (s.pool == group.number))
        running = [self._requests.live[request] for request in s.request[active].tolist()]
        suspects = set() if goodbye else self._in_steps(group)
        self._admission.note_computed(running)
        self._cache.drop_group(group)
        for request in sorted(running, key=lambda r: -r.admitted_order):
            suspected = request.slot in suspects
            request.phases.lose_worker(self._clock.now_us)
            self._admission.requeue(request)
            if suspected:
                self._count_crash(request, worker.name)

    def _note_end(self, worker: Worker, how: str) -> None:
        self.ended.pop(worker.name, None)
        self.ended[worker.name] = how
        if len(self.ended) > self._ended_max:
            del self.ended[next(iter(self.ended))]

    def _in_steps(self, group: Group) -> set[int]:
        """Slots whose present run is part of a step that the worker has not answered."""
        run = self._admission.rows.run
        rows = [sent.slots[run[sent.slots] == sent.runs] for sent in group.sent]
        return {slot for part in rows for slot in part.tolist()}

    def _count_crash(self, request: Request, worker: str) -> None:
        """A worker died while the request was under way. If that happens again and again, without a token in between,
        the request is taken to be the cause."""
        length = request.prompt.size + request.tokens.size
        request.crashes = 1 if length > request.crash_length else request.crashes + 1
        request.crash_length = length
        if request.crashes >= self._crashes_max:
            problem = f"request {request.id}: {request.crashes} workers died while running it, the last {worker}"
            self._log("error", f"{problem}: it fails")
            error = WorkerError(problem, request_id=request.id, crashes=request.crashes)
            self._endings.end(request, "fail", "failed", error)

    def _log(self, level: str, text: str, event: str = "", worker: Worker | None = None, **facts: Field) -> None:
        name: dict[str, Field] = {"worker": worker.name} if worker is not None else {}
        self._effects.append(Log(level, text, event, {**name, **facts}))


def _registered(group: Group, rid: int) -> PoolRegistered:
    done = group.sent[0].step_id - 1 if group.sent else group.last_step
    return PoolRegistered(rid=rid, epoch=group.epoch, base_block=group.pool.base, pool=group.number, done=done)


def working_us(group: Group | None, now_us: int) -> int:
    """How long the worker of a group has worked on the step that is due; 0 where none is."""
    if group is None or not group.sent or group.away:
        return 0
    return now_us - max(group.sent[0].sent_us, group.result_us)
