"""A coordinator that stood still does not count that time against clients and workers."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from kvforge.coordinator.core.events import FromWorker, ToWorker, WorkerGone
from kvforge.coordinator.host.replacing import Replacer
from kvforge.protocol.messages import CreateSequence, PoolRegistered, Refused, Submit, WorkerHello
from tests.coordinator.driver import PROMPT, REATTACH_US, Driver, FakeWorker, continuation, submit
from tests.coordinator.net import short_lived_net, until
from tests.coordinator.test_ranks import Ranks
from tests.coordinator.test_restart import come_back, driver
from tests.coordinator.test_server import Bench
from tests.coordinator.test_turn import Bench as TurnBench
from tests.standstill import Standstill


@pytest.fixture
def bench(monkeypatch: pytest.MonkeyPatch) -> Iterator[tuple[Bench, Standstill]]:
    folder = Path(tempfile.mkdtemp(prefix="kvf-", dir="/tmp"))  # a socket path must be short
    standstill = Standstill(monkeypatch)
    try:
        with closing(Bench(folder)) as made:
            yield made, standstill
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def test_no_deadline_lease_or_silence_is_over_because_the_coordinator_stood_still(
    bench: tuple[Bench, Standstill],
) -> None:
    made, standstill = bench
    client, worker = made.client(), made.worker()
    tokens = np.array([1, 2], np.int32)
    made.ask(client, CreateSequence(rid=2, tokens=tokens, idle_ttl_ms=5_000))
    made.ask(client, Submit(rid=3, prompt=tokens, max_tokens=1, deadline_ms=5_000))
    standstill.stand_still()
    for _ in range(3):
        made.server.turn()
    machine = made.server.machine
    assert len(machine.requests.live) == 1 and len(machine.cache.sequences) == 1
    assert len(made.server.clients) == 1
    assert made.server.workers._table.by_identity, "a pending handshake must keep its full time"
    client.answers = 0
    made.ask(client, Submit(rid=4, prompt=tokens, max_tokens=1))
    assert len(machine.requests.live) == 2
    assert worker.socket.closed is False


def test_silent_peers_are_dropped_for_their_own_silence_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    standstill = Standstill(monkeypatch)
    with short_lived_net() as net:
        net.connect()
        standstill.stand_still()
        net.peers.note_ends()
        assert len(net.peers) == 1 and net.silent == []


# ------------------------------------------------------------------------------------- workers that disconnected


def test_the_end_of_a_connection_after_a_standstill_is_told_from_a_death(tmp_path: Path) -> None:
    bench = TurnBench(tmp_path)
    with closing(bench.tables):
        for number in (4, 5, 6):
            bench.workers.known.add(number)
        bench.workers.end(3)
        bench.turn()
        bench.loop.stood_still(bench.now_us)
        bench.workers.end(4)
        bench.processes.dead.add(5)
        bench.workers.end(5)
        bench.turn()
        bench.now_us += 3_600_000_000
        bench.workers.end(6)
        bench.turn()
        ends = [event for event in bench.machine.events if isinstance(event, WorkerGone)]
    assert ends == [
        WorkerGone(3, False, False),
        WorkerGone(4, False, True),
        WorkerGone(5, False, False),
        WorkerGone(6, False, False),
    ]


def test_a_worker_that_was_cut_off_comes_back_with_its_pool() -> None:
    d = driver()
    worker = d.add_worker(16)
    request = submit(d).request_id
    for _ in range(4):
        d.step()
    d.turn()
    under_way, worker.inbox = list(worker.inbox), type(worker.inbox)()
    d.apply(WorkerGone(worker.number, away=True))
    d.turn()
    assert d.machine.cache.groups, "the pool is kept"
    registered, *again = come_back(d, worker)
    assert isinstance(registered, PoolRegistered) and registered.epoch == worker.epoch
    assert [step.step_id for step in again] == [step.step_id for step in under_way]  # type: ignore[attr-defined]
    d.run_until_idle()
    assert d.answer_of(request) == continuation(PROMPT, 12)
    assert d.machine.requests.recomputed_tokens_total == 0


def test_a_worker_that_was_cut_off_and_does_not_come_back_is_given_up_in_time() -> None:
    d = driver()
    worker = d.add_worker(16)
    request = submit(d).request_id
    for _ in range(3):
        d.step()
    d.workers.remove(worker)
    d.apply(WorkerGone(worker.number, away=True))
    d.turn()
    assert d.wake_us() == REATTACH_US
    d.advance(REATTACH_US)
    d.turn()
    assert not d.machine.cache.groups and d.machine.requests.live[request].state == "preempted"


def test_a_worker_without_a_pool_that_was_cut_off_is_gone() -> None:
    d = Driver()
    d.apply(FromWorker(9, WorkerHello(rid=1, name="loads", pid=1)))
    d.apply(WorkerGone(9, away=True))
    assert not d.machine.workers


@pytest.mark.parametrize(("pid", "crashes"), [(1, 0), (2, 1)])
def test_a_process_that_comes_back_without_its_pool_has_not_died(pid: int, crashes: int) -> None:
    """Its registration and the steps after it were in transit when the connection broke: no request is blamed."""
    d = driver()
    worker = d.add_worker(16)
    request = submit(d).request_id
    d.turn()
    d.apply(WorkerGone(worker.number, away=True))
    (known,) = d.machine.workers.values()
    known.pid = 1
    come_back(d, worker, epoch=0, pid=pid)
    assert d.machine.requests.live[request].crashes == crashes


def test_ranks_that_were_cut_off_come_back_one_by_one() -> None:
    d = Ranks(2)
    ranks = d.serve()
    request = submit(d).request_id
    d.step()
    d.turn()
    for worker in ranks:
        worker.inbox.clear()
    d.apply(WorkerGone(ranks[1].number, away=True))
    assert d.machine.cache.groups
    effects = _rank_hello(d, ranks[1], 77)
    assert isinstance(effects[0].message, PoolRegistered)
    (group,) = d.machine.cache.groups.values()
    assert not group.away and d.machine.requests.live[request].state == "running"


@pytest.mark.parametrize("lost", [0, 1])
def test_the_others_are_replaced_when_a_rank_that_was_cut_off_does_not_come_back(lost: int) -> None:
    """A process that is not told would wait for steps for ever, and its successor for it."""
    d = Ranks(2, reattach_us=REATTACH_US)
    ranks = d.serve()
    d.apply(WorkerGone(ranks[lost].number, away=True))
    d.advance(REATTACH_US)
    d.turn()
    assert not d.machine.workers
    assert d.dropped(ranks[1 - lost]) == (True, True) and d.heard(ranks[1 - lost], Refused)


@pytest.mark.parametrize("lost", [0, 1])
def test_the_others_are_replaced_when_a_worker_of_more_ranks_takes_the_place(lost: int) -> None:
    d = Ranks(2)
    ranks = d.serve()
    d.apply(WorkerGone(ranks[lost].number, away=True))
    d.hello(2, ranks=3)
    assert d.dropped(ranks[1 - lost]) == (True, True)


def _rank_hello(d: Ranks, worker: FakeWorker, number: int) -> list[Any]:
    worker.number = number
    hello = WorkerHello(rid=1, name="w", pid=1, boot="boot", epoch=worker.epoch, rank=1, ranks=2)
    return [effect for effect in d.apply(FromWorker(number, hello)) if isinstance(effect, ToWorker)]


def test_a_process_that_has_ended_is_known_to_have() -> None:
    process = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
    replacer = Replacer()
    try:
        replacer._pidfds[1] = os.pidfd_open(process.pid)
        assert not replacer.ended(1) and not replacer.ended(2)
        process.kill()
        until(_ended(replacer))
    finally:
        process.kill()
        process.communicate()
        replacer.close()


def _ended(replacer: Replacer) -> Callable[[], bool]:
    return lambda: replacer.ended(1)
