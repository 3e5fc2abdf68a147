"""A client that disconnects keeps its session, requests and sequences until its lease expires."""

from __future__ import annotations

import numpy as np
import pytest

from kvforge.coordinator.core.events import ClientCame, Restarted
from kvforge.coordinator.core.rights import Access
from kvforge.protocol.messages import (
    Append,
    Attach,
    CreateSequence,
    GetSequence,
    RefBlock,
)
from tests.coordinator.driver import (
    LEASE_US,
    PROMPT,
    REATTACH_US,
    Driver,
    continuation,
    int32,
    submit,
    waiting_driver,
)
from tools.simulation.digest import refusal_digest


def driver(client: int = 1, **limits: int) -> Driver:
    made = waiting_driver(**limits)
    made.add_worker(16)
    came(made, client)
    return made


def came(d: Driver, client: int, owner: str = "") -> None:
    d.apply(ClientCame(client, f"{owner}\nsession {client}", Access(owner)))


def cut(d: Driver, client: int = 1) -> None:
    """End the client's connection and drop its undelivered messages."""
    d._due.clear()
    d.gone(client)


def test_one_that_comes_back_in_time_has_all_that_it_had() -> None:
    d = driver()
    request = submit(d).request_id
    own = d.ask(CreateSequence(rid=101, tokens=int32(PROMPT))).sequence_id
    for _ in range(4):
        d.step()
    block = int(d.machine.cache.sequences.table[d.machine.requests.live[request].slot, 0])
    d.ask(RefBlock(rid=102, block_id=block, holder="mine"))
    cut(d)
    assert (d.wake_us(), d.stats().clients) == (LEASE_US, 0)
    d.advance(LEASE_US - 1)
    d.run_until_idle()
    came(d, 1)
    d.advance(LEASE_US)
    d.turn()
    assert d.ask(GetSequence(rid=103, sequence_id=own)).length == len(PROMPT)
    assert "mine" in [holder.name for holder in d.block(block).holders]
    d.ask(Attach(rid=104, request_id=request, offset=2, resume=True))
    d.run_until_idle()
    assert d.tokens_read(1, request) == dict(enumerate(continuation(PROMPT, 12)[2:], 2))


def test_what_was_asked_is_answered_as_before_and_done_once() -> None:
    d = driver()
    accepted = submit(d, rid=7)
    create = CreateSequence(rid=8, tokens=int32(PROMPT))
    created = d.ask(create)
    append = Append(rid=9, sequence_ids=np.array([created.sequence_id]), counts=int32([1]), tokens=int32([4]))
    appended = d.ask(append)
    cut(d)
    came(d, 1)
    state = refusal_digest(d.machine)
    assert (d.ask(create), d.ask(append)) == (created, appended)
    assert refusal_digest(d.machine) == state
    assert submit(d, rid=7).request_id == accepted.request_id
    assert d.machine.requests.accepted_total == 1


def test_one_that_does_not_come_back_loses_all_with_its_lease() -> None:
    d = driver()
    request = submit(d, max_tokens=40).request_id
    kept = submit(d, rid=101, detached=True).request_id
    own = d.ask(CreateSequence(rid=102, tokens=int32(PROMPT))).sequence_id
    lasting = d.ask(CreateSequence(rid=103, tokens=int32(PROMPT), idle_ttl_ms=60_000)).sequence_id
    cut(d)
    d.step()
    d.advance(LEASE_US - 1)
    d.turn()
    assert d.machine.requests.live[request].state == "running" and own in d.machine.cache.sequences.slot_of
    d.advance(1)
    d.turn()
    assert d.machine.requests.finished[request].state == "cancelled", "the lease has expired and is not renewed"
    assert set(d.machine.cache.sequences.slot_of) >= {lasting} and own not in d.machine.cache.sequences.slot_of
    assert not d.machine.clients and d.machine.sessions.number("\nsession 1") is None
    d.run_until_idle()
    assert d.machine.requests.finished[kept].state == "finished"
    assert d.ask(GetSequence(rid=1, sequence_id=lasting), 2).length == len(PROMPT)


@pytest.mark.parametrize("how", ["goodbye", "no session", "no lease"])
def test_who_cannot_or_will_not_come_back_is_not_waited_for(how: str) -> None:
    d = Driver(lease_us=0) if how == "no lease" else driver()
    client = 2 if how == "no session" else 1
    if how == "no session":
        d.apply(ClientCame(2))
    elif how == "no lease":
        came(d, 1)
    own = d.ask(CreateSequence(rid=1, tokens=int32(PROMPT)), client).sequence_id
    d.gone(client, goodbye=how == "goodbye")
    assert own not in d.machine.cache.sequences.slot_of
    assert client not in d.machine.clients and not d.machine.sessions.away


def test_another_may_take_its_request_meanwhile_and_keeps_it() -> None:
    d = driver()
    request = submit(d, max_tokens=40).request_id
    d.step()
    cut(d)
    d.attach(request, 0, client=2)
    d.advance(LEASE_US)
    d.run_until_idle()
    assert d.tokens_read(2, request) == dict(enumerate(continuation(PROMPT, 40)))


def test_a_restart_meanwhile_gives_it_the_time_that_all_others_have() -> None:
    d = driver()
    own = d.ask(CreateSequence(rid=1, tokens=int32(PROMPT))).sequence_id
    cut(d)
    d.advance(LEASE_US // 2)
    d.apply(Restarted())
    assert d.wake_us() == REATTACH_US
    came(d, 1)
    assert own in d.machine.cache.sequences.slot_of and not d.machine.sessions.away


def test_who_leaves_after_a_restart_is_given_up_before_those_who_never_came() -> None:
    d = driver()
    came(d, 2)
    d.apply(Restarted())
    came(d, 2)
    cut(d, 2)
    assert d.wake_us() == LEASE_US < REATTACH_US
    d.advance(LEASE_US)
    d.turn()
    assert set(d.machine.clients) == {1} and d.wake_us() == REATTACH_US - LEASE_US
    d.advance(REATTACH_US - LEASE_US)
    d.turn()
    assert not d.machine.clients


def test_so_many_are_waited_for_and_who_has_the_most_of_them_loses_its_first() -> None:
    d = driver(away_max=3)
    own = d.ask(CreateSequence(rid=1, tokens=int32(PROMPT))).sequence_id
    cut(d)
    for client in (10, 11, 12, 13):
        came(d, client, "flood")
        cut(d, client)
        d.turn()
    assert set(d.machine.clients) == {1, 12, 13}
    assert own in d.machine.cache.sequences.slot_of
