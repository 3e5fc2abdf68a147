"""After a restart of the coordinator: peers reconnect and continue, or are dropped in time."""

from __future__ import annotations

from collections import deque
from functools import partial
from pathlib import Path

import numpy as np
import pytest

from kvforge.coordinator.core.events import ClientCame, FromWorker, Restarted, ToWorker
from kvforge.coordinator.publish import all_changed, publish
from kvforge.protocol.errors import Draining, RequestNotFound
from kvforge.protocol.layout import Geometry
from kvforge.protocol.messages import (
    Append,
    Attach,
    CreateSequence,
    Drain,
    GetHealth,
    GetSequence,
    PoolRegistered,
    RefBlock,
    Step,
    WorkerHello,
)
from kvforge.protocol.tables import TablesReader, TablesWriter
from tests.coordinator.driver import (
    PROMPT,
    REATTACH_US,
    Driver,
    FakeWorker,
    continuation,
    int32,
    submit,
    waiting_driver,
)
from tools.simulation.digest import refusal_digest

BACK = 50  # the number of a worker's next connection
NOT_ENDED = 1 << 60
TIMEOUT_US = 60_000


def driver(**limits: int) -> Driver:
    made = waiting_driver(**limits)
    made.apply(ClientCame(1, "a session"))
    return made


def restart(d: Driver) -> list[deque[Step]]:
    """Drop every connection and all undelivered messages; return the steps that workers had not executed."""
    left = [worker.inbox for worker in d.workers]
    for worker in d.workers:
        worker.inbox = deque()
    d._due.clear()
    d.apply(Restarted())
    return left


def come_back(d: Driver, worker: FakeWorker, number: int = BACK, **changed: object) -> list[object]:
    """Reconnect the worker to the new process; return what it was sent."""
    worker.number = number
    hello = {"rid": 1, "name": worker.name, "pid": 1, "boot": "boot", "epoch": worker.epoch, **changed}
    effects = d.apply(FromWorker(number, WorkerHello(**hello)))  # type: ignore[arg-type]
    return [effect.message for effect in effects if isinstance(effect, ToWorker)]


@pytest.mark.parametrize("done", ["nothing", "first", "both"])
def test_a_worker_that_comes_back_goes_on_with_what_it_has(done: str) -> None:
    """The coordinator resends its steps; the worker reports its saved results for those it has executed."""
    d = driver()
    worker = d.add_worker(16)
    request = submit(d).request_id
    for _ in range(4):
        d.step()
    d.turn()
    computed = d.machine.requests.computed_tokens_total
    (under_way,) = restart(d)
    assert len(under_way) == 2 and d.machine.due_us() == d.now_us + REATTACH_US
    results = {
        step.step_id: worker.execute(step) for step in list(under_way)[: ["nothing", "first", "both"].index(done)]
    }
    d.turn()
    registered, *again = come_back(d, worker)
    assert isinstance(registered, PoolRegistered) and registered.epoch == worker.epoch
    assert [step.step_id for step in again] == [step.step_id for step in under_way]  # type: ignore[attr-defined]
    d.attach(request, 0)
    while worker.inbox:
        step = worker.inbox.popleft()
        d.report(worker, results.get(step.step_id) or worker.execute(step))
    d.run_until_idle()
    assert d.answer_of(request) == d.streamed[request] == continuation(PROMPT, 12)
    assert d.machine.requests.computed_tokens_total == len(PROMPT) + 12 - 1 > computed
    assert d.machine.requests.recomputed_tokens_total == 0


@pytest.mark.parametrize("changed", [{"epoch": 0}, {"boot": "other"}, {"epoch": 7}])
def test_a_worker_that_holds_nothing_of_this_life_is_a_new_one(changed: dict[str, object]) -> None:
    d = driver()
    worker = d.add_worker(16)
    request = submit(d).request_id
    for _ in range(4):
        d.step()
    restart(d)
    assert come_back(d, worker, **changed) == [], "no step is sent before its new pool is registered"
    assert d.machine.cache.groups == {} and d.machine.requests.live[request].state == "preempted"
    worker.kv.clear()
    d.report(worker, d.ready(worker))
    d.attach(request, 0)
    d.run_until_idle()
    assert d.streamed[request] == continuation(PROMPT, 12)


def test_nothing_is_planned_for_a_worker_that_is_away_and_it_is_given_up_in_time() -> None:
    d = driver()
    worker = d.add_worker(16)
    d.add_worker(16)
    request = submit(d).request_id
    for _ in range(3):
        d.step()
    assert worker.steps, "the request must run on the first worker"
    restart(d)
    other = d.workers[1]
    come_back(d, other)
    d.apply(ClientCame(1, "a session"))
    d.workers.remove(worker)
    for _ in range(3):
        d.step()
    assert d.machine.requests.live[request].slot >= 0 and d.wake_us() == REATTACH_US
    d.advance(REATTACH_US - 1)
    d.step()
    assert len(d.machine.cache.groups) == 2
    d.advance(1)
    d.attach(request, 0)
    d.run_until_idle()
    assert len(d.machine.cache.groups) == 1 and other.steps
    assert d.streamed[request] == continuation(PROMPT, 12)


def test_a_client_that_comes_back_has_all_that_it_had() -> None:
    d = driver()
    d.add_worker(16)
    request = submit(d).request_id
    sequence = d.ask(CreateSequence(rid=101, tokens=int32(PROMPT))).sequence_id
    for _ in range(4):
        d.step()
    block = int(d.machine.cache.sequences.table[d.machine.requests.live[request].slot, 0])
    d.ask(RefBlock(rid=102, block_id=block, holder="mine"))
    restart(d)
    worker = d.workers[0]
    come_back(d, worker)
    d.apply(ClientCame(1, "a session"))
    while worker.inbox:
        d.answer(worker)
    d.advance(REATTACH_US * 2)
    d.step()
    assert d.ask(GetSequence(rid=103, sequence_id=sequence)).length == len(PROMPT)
    assert "mine" in [holder.name for holder in d.block(block).holders]
    d.ask(Attach(rid=104, request_id=request, offset=2, resume=True))
    d.run_until_idle()
    assert d.tokens_read(1, request) == dict(enumerate(continuation(PROMPT, 12)[2:], 2))


def test_clients_that_do_not_come_back_are_given_up_in_time_and_those_without_a_session_at_once() -> None:
    d = driver()
    d.add_worker(16)
    own = d.ask(CreateSequence(rid=1, tokens=int32(PROMPT))).sequence_id
    d.apply(ClientCame(2, ""))
    nameless = d.ask(CreateSequence(rid=2, tokens=int32(PROMPT)), 2).sequence_id
    restart(d)
    assert nameless not in d.machine.cache.sequences.slot_of and own in d.machine.cache.sequences.slot_of
    assert set(d.machine.clients) == {1} and d.machine.sessions.number("a session") == 1
    come_back(d, d.workers[0])
    d.advance(REATTACH_US)
    d.turn()
    assert own not in d.machine.cache.sequences.slot_of
    assert not d.machine.clients and d.machine.sessions.number("a session") is None


def test_a_command_that_is_sent_again_is_done_once_and_answered_as_before() -> None:
    d = driver()
    d.add_worker(16)
    accepted = submit(d, rid=7)
    create = CreateSequence(rid=8, tokens=int32(PROMPT))
    created = d.ask(create)
    ids = np.array([created.sequence_id])
    append = Append(rid=9, sequence_ids=ids, counts=int32([2]), tokens=int32([1, 2]))
    appended = d.ask(append)
    restart(d)
    come_back(d, d.workers[0])
    d.apply(ClientCame(1, "a session"))
    before = d.machine.requests.accepted_total
    again = submit(d, rid=7)
    assert (again.request_id, again.seed, again.repeated) == (accepted.request_id, accepted.seed, True)
    assert d.machine.requests.accepted_total == before
    state = refusal_digest(d.machine)
    assert d.ask(create) is created
    assert d.ask(append) is appended
    assert refusal_digest(d.machine) == state, "the repeated command was executed again"
    d.run_until_idle()
    assert d.tokens_read(1, accepted.request_id) == dict(enumerate(continuation(PROMPT, 12))), (
        "streamed from the first token on"
    )
    later = d.ask(CreateSequence(rid=10, tokens=int32(PROMPT)))
    assert later.sequence_id != created.sequence_id


def test_so_many_answers_are_kept_and_no_more() -> None:
    d = driver(answers_kept_max=3)
    d.add_worker(16)
    made = [d.ask(CreateSequence(rid=rid)).sequence_id for rid in range(1, 6)]
    assert [d.ask(CreateSequence(rid=rid)).sequence_id for rid in (3, 4, 5)] == made[2:]
    assert d.ask(CreateSequence(rid=2)).sequence_id not in made, "a command older than the session is a new command"
    d.gone(1, goodbye=True)
    with pytest.raises(RequestNotFound):
        d.ask(Attach(rid=5, request_id=NOT_ENDED))


def test_another_connection_of_a_session_takes_the_place_of_one_that_is_still_there() -> None:
    d = driver()
    d.add_worker(16)
    request = submit(d).request_id
    for _ in range(3):
        d.step()
    d._due.clear()
    d.apply(ClientCame(1, "a session"))
    d.step()
    assert (1, request) not in d._due, "nothing is streamed to the new connection before it attaches"
    d.ask(Attach(rid=200, request_id=request, offset=1, resume=True))
    d.run_until_idle()
    assert d.tokens_read(1, request) == dict(enumerate(continuation(PROMPT, 12)[1:], 1))


def test_a_drain_ends_with_the_process_that_was_told_to() -> None:
    """Requests that were not handed back continue, and new ones are admitted, as the refusal promised."""
    d = driver()
    worker = d.add_worker(16)
    running = submit(d).request_id
    d.step()
    d.ask(Drain(rid=101, deadline_ms=250))
    assert "after its restart" in str(d.refused(d.submit_message(PROMPT), Draining))
    (under_way,) = restart(d)
    d.advance(1_000_000)
    come_back(d, worker)
    worker.inbox = under_way
    health = d.ask(GetHealth(rid=102))
    assert (health.ready, health.draining) == (True, False)
    after = submit(d, rid=103).request_id
    d.run_until_idle()
    assert [d.request(r).state for r in (running, after)] == ["finished", "finished"]


def test_a_row_that_ended_under_way_is_published_anew_with_the_blocks_that_its_step_writes(tmp_path: Path) -> None:
    """Otherwise the worker would read block 0 there and write into another sequence's block."""
    d = driver()
    d.add_worker(blocks=8)
    kept, ended = d.submit(PROMPT, max_tokens=8), d.submit(PROMPT[::-1], max_tokens=8)
    d.turn()
    (group,) = d.machine.cache.groups.values()
    sent = group.sent[0]
    slot = d.machine.requests.live[ended].slot
    held = d.machine.cache.sequences.blocks_of(slot)
    assert slot in sent.slots
    d.cancel(ended)
    d.turn()
    assert group.sent[0] is sent, "the step must still be in flight"
    assert d.machine.requests.live[kept].slot != slot
    restart(d)
    all_changed(d.machine)
    bounds = d.machine.limits.bounds
    geometry = Geometry(
        slots=bounds.sequences_max,
        blocks=bounds.blocks_max,
        blocks_per_sequence=bounds.blocks_per_sequence_max,
        block_size=d.machine.limits.cache.block_size,
        pools=bounds.pools_max,
    )
    tables = TablesWriter(tmp_path / "tables", geometry, "boot", partial(publish, d.machine, now_us=d.now_us))
    try:
        read = TablesReader(tables.path, "boot").rows(np.array([slot]), held.size)[0]
        assert read[0].tolist() == held.tolist()
    finally:
        tables.close()


def test_what_begins_after_a_restart_begins_where_a_worker_is() -> None:
    """A longer prefix on an absent worker is of no use; a request that runs on a present one continues there."""
    d = driver()
    first = d.add_worker(blocks=16)
    runs = d.submit(PROMPT, max_tokens=8)
    d.step()
    second = d.add_worker(blocks=8)
    restart(d)
    come_back(d, second)
    there, like_it = d.submit([1, 2], max_tokens=2), d.submit(PROMPT, max_tokens=2)
    d.turn()
    assert d.request(there).worker == d.request(like_it).worker == second.name
    assert d.request(runs).worker == first.name
    (told,) = [each for each in d.explain(request_id=runs).sentences if "reconnect after a restart" in each]
    assert "it continues then, or elsewhere" in told


def test_who_waits_for_those_that_are_away_is_told_so_and_begins_when_one_is_back() -> None:
    d = driver()
    worker = d.add_worker(blocks=8)
    d.turn()
    restart(d)
    waits = d.submit(PROMPT, max_tokens=2)
    d.turn()
    assert d.request(waits).state == "pending"
    assert d.explain(request_id=waits).facts["limit"] == "away"
    come_back(d, worker)
    d.turn()
    assert d.request(waits).state == "running"
    assert "limit" not in d.explain(request_id=waits).facts


def test_a_worker_that_is_back_may_hang_while_another_is_still_away() -> None:
    d = driver(step_timeout_us=TIMEOUT_US)
    d.add_worker(blocks=8)
    second = d.add_worker(blocks=8)
    restart(d)
    come_back(d, second)
    d.turn()
    assert d.machine.due_us() == d.now_us + REATTACH_US, "neither has a step, and the first is away"
    d.submit(PROMPT, max_tokens=2, deadline_ms=1000)  # before the end of the first one's time, after a step's timeout
    d.turn()
    assert second.inbox
    assert d.machine.due_us() == d.now_us + TIMEOUT_US + 1
