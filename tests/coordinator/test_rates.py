"""Rates of an [access] entry (messages and tokens per second): excess waits, or is refused with a retry delay."""

from __future__ import annotations

import numpy as np
import pytest

from kvforge.coordinator import access
from kvforge.coordinator.config import CoordinatorConfig
from kvforge.coordinator.core.rights import ADMIN, READ, SUBMIT, Access
from kvforge.coordinator.transport.outbox import PeerIdentity
from kvforge.coordinator.transport.rate_limit import BURST_S, Rate
from kvforge.protocol import keys
from kvforge.protocol.configuration import convert
from kvforge.protocol.errors import InvalidConfiguration, NotAllowed, QueueFull, RateExceeded
from kvforge.protocol.messages import Append, Cancel, CreateSequence, FinishAt, GetStats
from tests.coordinator.driver import Driver, continuation, int32
from tests.coordinator.net import Net, short_lived_net, until
from tools.simulation.digest import refusal_digest

S_NS = 10**9
NEVER = 1e-3  # per second: after the first, the next message is due in a quarter of an hour
ALICE, OTHER, BOB = 21, 22, 23


# ------------------------------------------------------------------------------------------------------------- messages


def test_a_rate_allows_a_second_of_messages_at_once_and_then_one_after_the_other() -> None:
    rate = Rate(10)
    now_ns = 5 * S_NS
    assert [rate.consume(now_ns) for _ in range(12)] == [True] * 10 + [False] * 2
    assert rate.ready_ns == now_ns + S_NS // 10
    assert not rate.consume(rate.ready_ns - 1)
    assert rate.consume(rate.ready_ns)
    later_ns = now_ns + int(100 * BURST_S * S_NS)
    assert sum(rate.consume(later_ns) for _ in range(99)) == 10, "unused allowance expires"


def test_less_than_one_a_second_is_one_at_a_time() -> None:
    rate = Rate(0.5)
    assert [rate.consume(S_NS), rate.consume(S_NS), rate.consume(3 * S_NS - 1), rate.consume(3 * S_NS)] == [
        True,
        False,
        False,
        True,
    ]


def taken(net: Net, turns: int = 20) -> list[bytes]:
    """The messages of this many turns."""
    heard = []
    for _ in range(turns):
        while (message := net.peers.receive()) is not None:
            heard.append(bytes(message[2][0]))
        net.peers.note_ends()
    return heard


def test_who_sends_more_is_read_later_with_all_its_connections_and_nobody_else_is() -> None:
    with short_lived_net() as net:
        rate = Rate(NEVER)
        slowed, others = [net.connect() for _ in range(2)], [net.connect()]
        for _, number in slowed:
            net.peers._table.by_number[number].rate = rate
        for dealer, number in slowed + others:
            for i in range(50):
                dealer.send(b"%d of %d" % (i, number))
        heard: list[bytes] = []
        until(lambda: bool(heard.extend(taken(net)) or len(heard) >= 51))
        heard += taken(net)
        of_others = [b"%d of %d" % (i, others[0][1]) for i in range(50)]
        assert [message for message in heard if message in of_others] == of_others
        (first,) = (message for message in heard if message not in of_others)
        assert first.startswith(b"0 of ")
        assert net.peers.pop_disconnected() == []
        assert not net.peers.waiting, "a throttled message must not make a turn due at once"
        assert net.peers.again_us is not None and abs(net.peers.again_us - rate.ready_ns // 1000) <= 1
        rate._paid_ns = 0  # a quarter of an hour later
        assert len(taken(net)) == 1
        for _, number in slowed:
            net.peers._table.by_number[number].rate = None
        rest = [message for _ in range(20) for message in taken(net)]
        assert len(rest) == 98, "a message was lost"


def test_who_waits_and_goes_is_noticed_when_its_time_has_come() -> None:
    with short_lived_net() as net:
        dealer, number = net.connect()
        rate = net.peers._table.by_number[number].rate = Rate(NEVER)
        dealer.send(b"1")
        dealer.send(b"2")
        heard: list[bytes] = []
        until(lambda: bool(heard.extend(taken(net, 1)) or net.peers._queue.throttled.connections))
        assert heard == [b"1"]
        dealer.close(0)
        gone: list[int] = []

        def over() -> bool:
            rate._paid_ns = 0
            heard.extend(taken(net, 1))
            gone.extend(net.peers.pop_disconnected())
            return bool(gone)

        until(over)
        assert (heard, gone) == ([b"1", b"2"], [number])


# -------------------------------------------------------------------------------------------------------- configuration


def test_rates_are_an_entrys_own() -> None:
    a, b = keys.make().public, keys.make().public
    entry = {"tenant": "a", "rights": ["submit"]}
    clients = {
        "alice": {**entry, "key": a, "messages_per_s": 5, "tokens_per_s": 100.5},
        "bob": {**entry, "key": b},
    }
    gate = access.Gate("", convert({"access": {"clients": clients}}, CoordinatorConfig).access)
    alice, bob = (PeerIdentity(key=keys.bytes_of(key, "key")) for key in (a, b))
    assert gate.client(alice) == Access("alice", "a", ("submit",), 0, 100.5, 5)
    assert gate.rate(alice) is gate.rate(alice) is not None
    assert gate.rate(bob) is gate.rate(PeerIdentity(user=0)) is None
    for name, value in (("messages_per_s", 1e10), ("tokens_per_s", 1e-9)):
        with pytest.raises(InvalidConfiguration) as caught:
            convert({"access": {"local": {name: value}}}, CoordinatorConfig)
        assert caught.value.field == f"access.local.{name}"


def test_a_list_that_is_read_again_says_who_must_go() -> None:
    a, b, c, w = (keys.make().public for _ in range(4))
    before = {
        "clients": {name: {"key": key, "tenant": "a", "rights": ["read"]} for name, key in (("a", a), ("b", b))},
        "workers": {"w": {"key": w}},
    }
    gate = access.Gate("", convert(before, access.AccessSection))
    doors = gate.client_keys, gate.worker_keys
    rate = gate.rate
    after = {
        "clients": {
            "a": {"key": a, "tenant": "a", "rights": ["read", "submit"]},
            "c": {"key": c, "tenant": "c", "rights": ["read"], "messages_per_s": 3},
        },
        "local": {"rights": ["read"]},
    }
    of_client, of_worker = gate.reread(convert(after, access.AccessSection))
    by_key = [of_client(PeerIdentity(key=keys.bytes_of(key, "key"))) for key in (a, b, c)]
    assert [words.partition(" ")[2] for words in by_key[:2]] == [
        "entry in [access] has changed",
        "key is not in [access] any more",
    ]
    assert "has changed" in of_client(PeerIdentity(user=1000)), "local users have fewer rights now"
    assert (
        of_worker(PeerIdentity(key=keys.bytes_of(w, "key"))) == access.NOT_LISTED
        and of_worker(PeerIdentity(user=1000)) == ""
    )
    assert doors[0] is gate.client_keys == {keys.bytes_of(key, "key") for key in (a, c)} and doors[1] == set()
    assert rate(PeerIdentity(key=keys.bytes_of(c, "key"))) is not None
    with pytest.raises(NotAllowed):
        gate.client(PeerIdentity(key=keys.bytes_of(b, "key")))
    of_client, of_worker = gate.reread(convert(after, access.AccessSection))
    assert [of_client(PeerIdentity(user=1000)), of_client(PeerIdentity(key=keys.bytes_of(a, "key")))] == ["", ""], (
        "these entries are unchanged"
    )


# --------------------------------------------------------------------------------------------------------------- tokens


def limited(tokens_per_s: float = 100.0) -> Driver:
    """Two connections of one entry, and one of another tenant."""
    driver = Driver(start_us=50_000_000, blocks_max=512, blocks_per_sequence_max=512)
    driver.add_worker(512)
    for client in (ALICE, OTHER):
        driver.come(client, Access("alice", "a", (SUBMIT, READ), 0, tokens_per_s))
    driver.come(BOB, Access("bob", "b", (SUBMIT, READ)))
    return driver


def test_who_has_used_more_than_its_time_allows_is_told_when_to_try_again() -> None:
    driver = limited()
    first = driver.submit(range(1, 31), 20, client=ALICE, detached=True)
    driver.submit(range(1, 31), 20, client=BOB)
    driver.submit(range(1, 31), 30, client=OTHER)
    before = refusal_digest(driver.machine)
    refused = driver.refused(driver.submit_message([9], 1), RateExceeded, ALICE)
    assert isinstance(refused, QueueFull), "a client that retries on a full queue also retries here"
    assert (refused.limit, refused.retry_after_ms) == (100.0, 100)
    assert str(refused) == "alice has used more than its 100 tokens a second; try again in 100 ms"
    driver.refused(driver.submit_message([9], 1), RateExceeded, OTHER)
    assert refusal_digest(driver.machine) == before
    driver.advance(99_999)
    driver.refused(driver.submit_message([9], 1), RateExceeded, ALICE)
    driver.ask(Cancel(rid=90, request_id=driver.submit([1], 1, client=BOB)), BOB)
    driver.advance(1)
    driver.submit([9], 1, client=ALICE)
    assert first in driver.machine.requests.live


def test_what_was_not_generated_is_given_back_when_the_request_ends() -> None:
    driver = limited()
    request = driver.submit(range(1, 11), 1000, client=ALICE)
    assert driver.refused(driver.submit_message([9], 1), RateExceeded, ALICE).retry_after_ms == 9100
    while len(driver.streamed.get(request, ())) < 5:
        driver.step()
    driver.ask(FinishAt(rid=91, request_id=request, tokens=5), ALICE)
    assert driver.answer_of(request) == continuation(list(range(1, 11)), 5)
    driver.submit([9], 1, client=ALICE)


def test_tokens_that_are_sent_without_a_request_count_too() -> None:
    driver = limited()
    made = driver.ask(CreateSequence(rid=92, tenant="a", tokens=int32(list(range(1, 41)))), ALICE)
    ids = np.array([made.sequence_id])
    append = Append(rid=93, sequence_ids=ids, counts=int32([20]), tokens=int32([7] * 20))
    for _ in range(4):  # 40 and 60 are one second's allowance; the fourth is paid later
        driver.ask(append, ALICE)
    assert driver.refused(append, RateExceeded, ALICE).retry_after_ms == 200
    create = CreateSequence(rid=94, tenant="a", tokens=int32([1]))
    assert driver.refused(create, RateExceeded, ALICE).retry_after_ms == 200


def test_the_same_command_again_costs_nothing_and_is_not_refused() -> None:
    driver = limited()
    first = driver.submit(range(1, 31), 300, client=ALICE, key="k")
    assert driver.submit(range(1, 31), 300, client=OTHER, key="k") == first
    assert driver.refused(driver.submit_message([9], 1), RateExceeded, ALICE).retry_after_ms == 2300


def test_who_may_do_everything_but_is_limited_is_limited() -> None:
    driver = limited()
    driver.come(24, Access("root", "*", (ADMIN,), 0, 10.0))
    driver.submit([1, 2, 3], 30, client=24)
    driver.refused(driver.submit_message([9], 1), RateExceeded, 24)
    driver.ask(GetStats(rid=95), 24)


def test_a_connection_that_is_taken_off_the_list_ends_and_is_reported() -> None:
    with short_lived_net() as net:
        (_, first), (_, second) = net.connect(), net.connect()
        first_asked = iter(["it is not in the list", ""])
        net.peers.end_where(lambda who: next(first_asked))
        assert net.peers.pop_disconnected() == [first]
        assert net.peers.number(net.peers._table.by_number[second].identity) == second
