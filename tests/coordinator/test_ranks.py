"""A worker of several ranks: all execute every step, a step ends when all have, and all end with the first."""

from __future__ import annotations

from typing import Any

import msgspec
import numpy as np
import pytest

from kvforge.coordinator.core.events import (
    DropWorker,
    Effect,
    FromWorker,
    ReplaceWorker,
    Restarted,
    ToWorker,
    WorkerGone,
)
from kvforge.protocol.errors import GpuError
from kvforge.protocol.messages import (
    ErrorInfo,
    Message,
    PoolRegistered,
    Refused,
    Rendezvous,
    Step,
    StepResult,
    WorkerFailed,
    WorkerHello,
    WorkerReady,
)
from tests.coordinator.driver import PROMPT, Driver, FakeWorker, continuation, model_info, submit
from tests.coordinator.test_drafts import Drafter

STEP_TIMEOUT_US = 60_000_000


class Ranks(Driver):
    """`ranks` processes of one worker, each with its own KV memory."""

    def __init__(self, ranks: int = 2, **limits: Any) -> None:
        super().__init__(step_timeout_us=STEP_TIMEOUT_US, **limits)
        self.effects: list[Effect] = []
        self.count = ranks

    def apply(self, event: Any) -> list[Effect]:
        effects = super().apply(event)
        self.effects += effects
        return effects

    def hello(self, rank: int, blocks: int = 16, **fields: Any) -> FakeWorker:
        """Connect a rank."""
        self._numbers += 1
        worker = self.worker_type(self.machine, self._numbers, "w", blocks, model_info())
        self.workers.append(worker)
        ours = {"rank": rank, "ranks": self.count} | fields
        self.apply(FromWorker(worker.number, WorkerHello(rid=1, name="w", pid=100 + self._numbers, **ours)))
        return worker

    def serve(self) -> list[FakeWorker]:
        """Connect all ranks and register their pool."""
        ranks = [self.hello(rank) for rank in range(self.count)]
        for worker in ranks:
            self.apply(FromWorker(worker.number, self.ready(worker)))
        return ranks

    def heard(self, worker: FakeWorker, kind: type[Message]) -> list[Any]:
        """The messages of a type that the rank received."""
        return [
            each.message
            for each in self.effects
            if isinstance(each, ToWorker) and each.worker == worker.number and isinstance(each.message, kind)
        ]

    def dropped(self, worker: FakeWorker) -> tuple[bool, bool]:
        """Whether the rank was dropped, and whether its process is replaced."""
        dropped = any(isinstance(each, DropWorker) and each.worker == worker.number for each in self.effects)
        return dropped, any(isinstance(each, ReplaceWorker) and each.worker == worker.number for each in self.effects)


def test_nobody_meets_before_all_are_there() -> None:
    d = Ranks(3)
    first, third = d.hello(0), d.hello(2)
    assert not d.heard(first, Rendezvous) and not d.heard(third, Rendezvous)
    assert [worker.health(0).phase for worker in d.machine.workers.values()] == ["waiting for rank 1 of 3"] * 2
    second = d.hello(1)
    names = [d.heard(worker, Rendezvous)[0].name for worker in (first, second, third)]
    assert len(set(names)) == 1 and names[0].startswith("boot-")
    assert [(each.rank, each.ranks) for each in (w.health(0) for w in d.machine.workers.values())] == [
        (0, 3),
        (2, 3),
        (1, 3),
    ]


def test_a_rank_that_leaves_before_they_meet_leaves_the_others_waiting() -> None:
    d = Ranks(3)
    first, second = d.hello(0), d.hello(1)
    d.lose(second)
    assert d.dropped(first) == (False, False)
    assert d.machine.workers[first.number].phase == "waiting for rank 1, 2 of 3"
    d.lose(first)
    assert d.machine.workers == {}
    assert len({d.heard(worker, Rendezvous)[0].name for worker in [d.hello(rank) for rank in range(3)]}) == 1


def test_the_pool_is_the_least_of_theirs_and_each_is_told() -> None:
    d = Ranks()
    first, second = d.hello(0, blocks=16), d.hello(1, blocks=12)
    d.apply(FromWorker(first.number, d.ready(first)))
    assert not d.machine.cache.groups and not d.heard(first, PoolRegistered)
    d.apply(FromWorker(second.number, d.ready(second)))
    (group,) = d.machine.cache.groups.values()
    assert group.pool.count == 12
    ((of_first,), (of_second,)) = d.heard(first, PoolRegistered), d.heard(second, PoolRegistered)
    assert (of_first.epoch, of_first.base_block) == (of_second.epoch, of_second.base_block)


@pytest.mark.parametrize("field", ["bytes_per_block", "kv_dtype", "wants_kinds"])
def test_ranks_that_differ_are_refused_by_what_they_differ_in(field: str) -> None:
    d = Ranks()
    first, second = d.hello(0), d.hello(1)
    d.apply(FromWorker(first.number, d.ready(first)))
    ready = d.ready(second)
    other = {"bytes_per_block": 1, "kv_dtype": "int8", "wants_kinds": True}[field]
    values = {name: getattr(ready, name) for name in WorkerReady.__struct_fields__} | {field: other}
    d.apply(FromWorker(second.number, WorkerReady(**values)))
    (refused,) = d.heard(second, Refused)
    assert f"disagree: {field} is" in refused.error.message
    assert not d.machine.workers and not d.machine.cache.groups
    assert d.dropped(first) == (True, True)


def test_a_hello_that_cannot_be_is_refused() -> None:
    d = Ranks()
    d.hello(0)
    for fields, words in (
        ({"rank": 2}, "rank 2 of 2"),
        ({"rank": -1}, "rank -1 of 2"),
        ({"rank": 1, "ranks": 65}, "rank 1 of 65"),
        ({"rank": 0}, "rank 0 of worker 'w' is connected already"),
        ({"rank": 1, "ranks": 3}, "has 2 ranks, but one that connected announces 3"),
        ({"rank": 0, "ranks": 1}, "has 2 ranks, but one that connected announces 1"),
    ):
        worker = d.hello(**fields)
        (refused,) = d.heard(worker, Refused)
        assert words in refused.error.message
        assert len(d.machine.workers) == 1


def test_a_step_counts_when_all_have_done_it() -> None:
    d = Ranks(3)
    ranks = d.serve()
    request = submit(d, max_tokens=3).request_id
    d.turn()
    assert all(len(worker.inbox) == len(ranks[0].inbox) > 0 for worker in ranks)
    for worker in ranks[:2]:
        d.answer(worker)
    d.turn()
    assert d.streamed.get(request, []) == []
    d.answer(ranks[2])
    d.turn()
    assert d.streamed[request] == continuation(PROMPT, 3)[:1]
    d.run_until_idle()
    assert d.streamed[request] == continuation(PROMPT, 3)
    assert [worker.steps for worker in ranks[1:]] == [ranks[0].steps] * 2


def test_ranks_that_disagree_end_and_nothing_of_it_is_told() -> None:
    d = Ranks()
    first, second = d.serve()
    request = submit(d, max_tokens=3).request_id
    d.turn()
    d.answer(first)
    result = second.execute(second.inbox.popleft())
    wrong = StepResult(
        result.step_id, result.epoch, (), 0, result.slots, (result.tokens + 1).astype(np.int32), result.logprobs
    )
    d.report(second, wrong)
    d.turn()
    assert d.streamed.get(request, []) == [] and not d.machine.workers
    assert "rank 1 disagrees with rank 0 in step 1: slot" in d.heard(second, Refused)[0].error.message
    assert d.dropped(first) == (True, True)
    d.serve()
    d.run_until_idle()
    assert d.streamed[request] == continuation(PROMPT, 3)


@pytest.mark.parametrize(("cut", "words"), [(1, "other rows were sampled"), (0, "slot 0, token")])
def test_ranks_that_accept_other_drafts_end(cut: int, words: str) -> None:
    """A rank that accepts one draft fewer, or samples another token behind the drafts, has another KV."""
    d = Ranks(drafts_max=4, step_rows_max=16, steps_in_flight_max=1, block_size=16)
    d.worker_type = Drafter
    first, second = d.serve()
    request = submit(d, max_tokens=12).request_id
    d.turn()
    d.answer(first)
    proposed = second.execute(second.inbox.popleft())
    assert proposed.draft_slots.size
    d.report(second, msgspec.structs.replace(proposed, draft_tokens=proposed.draft_tokens + 1))  # a hint: it may differ
    d.turn()
    d.answer(first)
    result = second.execute(second.inbox.popleft())
    kept, before = result.tokens.size - cut, d.streamed[request][:]
    assert kept > 1
    tokens = result.tokens[:kept].copy()
    tokens[-1] += not cut
    wrong = StepResult(
        result.step_id, result.epoch, (), 0, result.slots[:kept], tokens.astype(np.int32), result.logprobs[:kept]
    )
    d.report(second, wrong)
    d.turn()
    assert d.streamed[request] == before and not d.machine.workers
    assert f"rank 1 disagrees with rank 0 in step 2: {words}" in d.heard(second, Refused)[0].error.message
    d.serve()
    d.run_until_idle()
    assert d.streamed[request] == continuation(PROMPT, 12)


def test_what_is_left_out_or_said_twice() -> None:
    d = Ranks()
    first, second = d.serve()
    submit(d, max_tokens=8)
    d.turn()
    result = second.execute(second.inbox.popleft())
    d.report(second, result)
    d.report(second, result)
    assert "stale result of step 1 of rank 1" in d.logs[-1].text
    d.report(second, StepResult(step_id=9, epoch=result.epoch))
    assert "step 2 is due of rank 1, not step 9" in d.heard(second, Refused)[0].error.message
    assert d.dropped(first) == (True, True)


@pytest.mark.parametrize("how", ["died", "failed", "left"])
@pytest.mark.parametrize("rank", [0, 1])
def test_with_one_rank_all_end_and_requests_go_on_with_their_successors(rank: int, how: str) -> None:
    d = Ranks()
    ranks = d.serve()
    request = submit(d, max_tokens=6).request_id
    for _ in range(2):
        d.step()
    d.turn()
    lost, other = ranks[rank], ranks[1 - rank]
    if how == "failed":
        d.report(lost, WorkerFailed(error=ErrorInfo.of(GpuError("gone"))))
    else:
        d.apply(WorkerGone(lost.number, goodbye=how == "left"))
        d.workers.remove(lost)
    assert not d.machine.workers and not d.machine.cache.groups
    assert d.dropped(other) == (True, how != "left")
    words = f"rank {rank} of 2 of worker w {'left' if how == 'left' else 'was lost'}"
    assert d.heard(other, Refused)[0].error.message.startswith(words)
    reports = d.machine._reports
    totals = (reports.registered_total, reports.returned_total, reports.left_total, reports.lost_total)
    assert totals == (1, 0, int(how == "left"), int(how != "left"))
    assert d.machine.requests.live[request].crashes == int(how != "left")
    d.serve()
    d.run_until_idle()
    assert d.streamed[request] == continuation(PROMPT, 6)


def test_one_that_hangs_is_named_and_all_are_replaced() -> None:
    d = Ranks()
    first, second = d.serve()
    submit(d, max_tokens=6)
    d.turn()
    d.answer(first)
    d.advance(STEP_TIMEOUT_US + 1)
    d.turn()
    assert "worker w (rank 1 of 2) has done no step for 60 s" in " ".join(each.text for each in d.logs)
    assert d.dropped(first) == d.dropped(second) == (True, True)


def test_after_a_restart_of_the_coordinator_all_have_to_be_back() -> None:
    d = Ranks(reattach_us=5_000_000)
    first, second = d.serve()
    request = submit(d, max_tokens=6, detached=True).request_id
    d.step()
    d.turn()
    done = [first.execute(first.inbox.popleft()), second.execute(second.inbox.popleft())]
    d.report(first, done[0])
    d.workers.clear()
    d.apply(Restarted())
    (group,) = d.machine.cache.groups.values()
    assert group.away
    known = {"boot": "boot", "epoch": group.epoch}
    back = d.hello(0, **known)
    d.turn()
    assert group.away and d.heard(back, PoolRegistered)[0].done == done[0].step_id
    assert d.heard(back, Step), "sent at once: rank 1 may be inside a step and cannot reconnect before"
    again = d.hello(0, **known)
    assert "rank 0 of worker 'w' is connected already" in d.heard(again, Refused)[0].error.message
    other = d.hello(1, **known)
    assert not group.away and d.heard(other, PoolRegistered)[0].done == done[1].step_id - 1
    for now, before in ((back, first), (other, second)):
        now.kv, now.last_token, now.begins, now.epoch = before.kv, before.last_token, before.begins, group.epoch
        now.inbox.popleft()  # done before
    d.report(other, done[1])
    assert d.heard(other, Step)[0].step_id == done[1].step_id, "steps that may not have arrived are sent again"
    d.attach(request)
    d.run_until_idle()
    assert list(d.tokens_read(1, request).values()) == continuation(PROMPT, 6)


def test_a_rank_that_has_lost_its_pool_ends_the_group_that_waits() -> None:
    d = Ranks(reattach_us=5_000_000)
    d.serve()
    submit(d, max_tokens=6)
    d.step()
    d.workers.clear()
    d.apply(Restarted())
    (group,) = d.machine.cache.groups.values()
    back = d.hello(0, boot="boot", epoch=group.epoch)
    new = d.hello(1)
    assert not d.machine.cache.groups
    assert d.dropped(back) == (True, True)
    assert d.machine.workers[new.number].phase == "waiting for rank 0 of 2"


def test_a_rank_that_does_not_come_back_in_time_ends_the_group() -> None:
    d = Ranks(reattach_us=5_000_000)
    d.serve()
    d.workers.clear()
    d.apply(Restarted())
    (group,) = d.machine.cache.groups.values()
    back = d.hello(1, boot="boot", epoch=group.epoch)
    d.advance(5_000_000)
    d.turn()
    assert not d.machine.cache.groups and d.dropped(back) == (True, True)


def test_monitors_are_told_of_one_worker() -> None:
    d = Ranks()
    first, second = d.hello(0), d.hello(1)
    for worker, size in ((first, 100), (second, 20)):
        values = {name: getattr(d.ready(worker), name) for name in WorkerReady.__struct_fields__}
        d.apply(FromWorker(worker.number, WorkerReady(**(values | {"device_bytes": {"weights": size}}))))
    d.machine.all_is_news()
    news = d.machine.news()
    assert news is not None
    assert [(each.name, each.device_bytes, each.pool) for each in news.workers] == [("w", {"weights": 120}, 0)]
    (group,) = d.machine.cache.groups.values()
    assert news.workers[0].block_bytes == 2 * group.bytes_per_block
