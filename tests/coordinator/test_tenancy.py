"""Clients of one tenant: another tenant's resources look nonexistent, and errors name a missing right."""

from __future__ import annotations

import typing
from typing import Any

import msgspec
import numpy as np
import pytest

from kvforge.coordinator.core.commands.guard import RIGHT_FOR
from kvforge.coordinator.core.events import FromClient, ToClient
from kvforge.coordinator.core.rights import ADMIN, EVERY_TENANT, READ, RIGHTS, SUBMIT, Access
from kvforge.protocol.errors import (
    AlreadyHolder,
    BlockNotFound,
    NotAHolder,
    NotAllowed,
    NotFound,
    QueueFull,
    RequestNotFound,
    SequenceNotFound,
)
from kvforge.protocol.messages import (
    CLIENT_MESSAGES,
    Append,
    Attach,
    Cancel,
    CreateSequence,
    Drain,
    Explain,
    FinishAt,
    Fork,
    GetBlock,
    GetHealth,
    GetRequest,
    GetSequence,
    GetStats,
    GetTokens,
    Goodbye,
    Hello,
    ListRequests,
    PurgeFinished,
    RefBlock,
    RemoveSequences,
    Submit,
    UnrefBlock,
)
from tests.coordinator.driver import Driver, continuation, int32

ALICE, BOB, ROOT, GATEWAY = 11, 12, 13, 14
UNKNOWN = 999_999


def both() -> Driver:
    """Two tenants with a client each, an administrator, and a client that acts for all tenants."""
    driver = Driver()
    driver.add_worker(32)
    driver.come(ALICE, Access("alice", "a", (SUBMIT, READ)))
    driver.come(BOB, Access("bob", "b", (SUBMIT, READ)))
    driver.come(ROOT, Access("root", "r", (ADMIN,)))
    driver.come(GATEWAY, Access("gateway", EVERY_TENANT, (SUBMIT, READ)))
    return driver


def on_request(request: int) -> list[Any]:
    return [
        Attach(rid=1, request_id=request),
        Cancel(rid=1, request_id=request),
        FinishAt(rid=1, request_id=request, tokens=0),  # the error must not reveal that the argument is wrong
        GetRequest(rid=1, request_id=request, with_tokens=True),
        Explain(rid=1, request_id=request),
    ]


def on_sequence(sequence: int) -> list[Any]:
    ids = np.array([sequence])
    return [
        Fork(rid=1, sequence_id=sequence, count=0),
        GetSequence(rid=1, sequence_id=sequence),
        GetTokens(rid=1, sequence_id=sequence),
        RemoveSequences(rid=1, sequence_ids=ids),
        Append(rid=1, sequence_ids=ids, counts=int32([1]), tokens=int32([1])),
        Append(rid=1, sequence_ids=ids, counts=int32([1, 2]), tokens=int32([1])),
        Submit(rid=1, sequence_id=sequence, max_tokens=0),
        Explain(rid=1, sequence_id=sequence),
    ]


def on_block(block: int) -> list[Any]:
    return [
        GetBlock(rid=1, block_id=block),
        RefBlock(rid=1, block_id=block, holder="h", generation=7),
        UnrefBlock(rid=1, block_id=block, holder="h", generation=7),
        Explain(rid=1, block_id=block),
    ]


def same_words(
    driver: Driver, there: list[Any], nowhere: list[Any], ids: tuple[int, int], error: type[NotFound]
) -> None:
    """Check that Bob's errors about Alice's ids equal his errors about nonexistent ids, except for the id."""
    for real, unreal in zip(there, nowhere, strict=True):
        told, expected = (driver.refused(message, error, BOB) for message in (real, unreal))
        assert str(told) == str(expected).replace(str(ids[1]), str(ids[0])), real
        assert told.fields.keys() == expected.fields.keys()


def test_requests_of_another_tenant_do_not_exist() -> None:
    driver = both()
    request = driver.submit([1, 2, 3], 40, client=ALICE)
    driver.step()
    same_words(driver, on_request(request), on_request(UNKNOWN), (request, UNKNOWN), RequestNotFound)
    assert driver.ask(GetRequest(rid=1, request_id=request), ALICE).tenant == "a"
    ended = driver.submit([4, 5], 2, client=ALICE)
    driver.run_until_idle()
    same_words(driver, on_request(ended), on_request(UNKNOWN), (ended, UNKNOWN), RequestNotFound)
    assert driver.answer_of(request) == continuation([1, 2, 3], 40)


def test_sequences_of_another_tenant_do_not_exist() -> None:
    driver = both()
    sequence = driver.create([1, 2, 3], client=ALICE)
    same_words(driver, on_sequence(sequence), on_sequence(UNKNOWN), (sequence, UNKNOWN), SequenceNotFound)
    assert driver.ask(GetTokens(rid=1, sequence_id=sequence), ALICE).tokens.tolist() == [1, 2, 3]


def test_no_order_of_sequences_in_a_command_tells_which_exist() -> None:
    driver = both()
    hers, his = driver.create([1], client=ALICE), driver.create([1], client=BOB)
    for first in (hers, UNKNOWN):
        for second in (hers + 1000, hers):
            message = RemoveSequences(rid=1, sequence_ids=np.array([his, first, second]))
            assert driver.refused(message, SequenceNotFound, BOB).sequence_id == first


def test_why_a_sequence_is_gone_is_its_own_tenants_to_know() -> None:
    driver = both()
    sequence = driver.create([1], client=ALICE, idle_ttl_ms=1)
    driver.advance(2000)
    driver.turn()
    assert "time to live" in str(driver.refused(GetSequence(rid=1, sequence_id=sequence), SequenceNotFound, ALICE))
    assert "time to live" not in str(driver.refused(GetSequence(rid=1, sequence_id=sequence), SequenceNotFound, BOB))


def test_blocks_that_a_tenant_neither_pays_for_nor_holds_do_not_exist() -> None:
    driver = both()
    sequence = driver.create(range(40), client=ALICE)
    block = driver.blocks_of(sequence)[0]
    same_words(driver, on_block(block), on_block(UNKNOWN), (block, UNKNOWN), BlockNotFound)
    free = next(b for b in range(32) if driver.block(b).state == "free")
    same_words(driver, on_block(free), on_block(UNKNOWN), (free, UNKNOWN), BlockNotFound)
    assert driver.ask(GetBlock(rid=1, block_id=block), ALICE).tenant == "a"


def test_of_a_block_that_is_shared_each_sees_its_own_holders() -> None:
    """A gateway acts for both tenants, so they share the block."""
    driver = both()
    text = list(range(1, 41))
    driver.submit(text, 1, client=GATEWAY, tenant="a", salt="s")
    driver.run_until_idle()
    hers, his = (driver.create(text, client=GATEWAY, tenant=tenant, salt="s") for tenant in ("a", "b"))
    block = driver.blocks_of(hers)[0]
    assert driver.blocks_of(his)[0] == block
    driver.ref(block, "hers", client=ALICE)
    seen = driver.ask(GetBlock(rid=1, block_id=block), BOB)
    assert (seen.refcount, [holder.id for holder in seen.holders], seen.tenant) == (1, [his], "")
    told = driver.ask(Explain(rid=1, block_id=block), BOB).sentences
    assert [sentence for sentence in told if "held by" in sentence] == [f"held by sequence {his} for 0 s"]
    assert not [sentence for sentence in told if "more" in sentence]
    driver.refused(UnrefBlock(rid=1, block_id=block, holder="hers"), NotAHolder, BOB)
    assert driver.unref(block, "hers", client=ALICE).refcount == 1
    assert driver.ask(GetBlock(rid=1, block_id=block), ROOT).refcount == 2


def test_a_name_on_a_block_is_its_tenants_own() -> None:
    """A name that another tenant uses is not reported as taken."""
    driver = both()
    text = list(range(1, 41))
    driver.submit(text, 1, client=GATEWAY, tenant="a", salt="s")
    driver.run_until_idle()
    hers, _ = (driver.create(text, client=GATEWAY, tenant=tenant, salt="s") for tenant in ("a", "b"))
    block = driver.blocks_of(hers)[0]
    for client, others in ((ALICE, 0), (BOB, 1)):
        assert driver.ref(block, "name", client=client).refcount == 2
        driver.refused(RefBlock(rid=1, block_id=block, holder="name"), AlreadyHolder, client)
        holders = driver.ask(GetBlock(rid=1, block_id=block), client).holders
        assert [holder.name for holder in holders if holder.kind == "external"] == ["name"]
        assert driver.ask(GetBlock(rid=1, block_id=block), ROOT).refcount == 3 + others
    driver.unref(block, "name", client=ALICE)
    driver.refused(UnrefBlock(rid=1, block_id=block, holder="name"), NotAHolder, ALICE)
    driver.refused(RefBlock(rid=1, block_id=block, holder="name"), AlreadyHolder, BOB)
    driver.ref(block, "name", client=ALICE)
    driver.gone(BOB, goodbye=True)
    assert [h.name for h in driver.ask(GetBlock(rid=1, block_id=block), ROOT).holders if h.kind == "external"] == [
        "name"
    ]
    driver.unref(block, "name", client=ROOT)
    driver.refused(UnrefBlock(rid=1, block_id=block, holder="name"), NotAHolder, ROOT)


@pytest.mark.parametrize("salt", ["", "s", "b\ns"])
def test_what_a_tenant_has_cached_is_no_hit_for_another_who_guesses_its_salt(salt: str) -> None:
    driver = both()
    text = list(range(1, 41))
    driver.submit(text, 1, client=ALICE, salt="s")
    driver.run_until_idle()
    blocks = driver.stats().pools[0].cached
    assert driver.info(driver.create(text, client=BOB, salt=salt)).computed_tokens == 0
    his = driver.submit(text, 1, client=BOB, salt=salt)
    driver.run_until_idle()
    assert driver.request(his).cached_tokens == 0
    assert driver.stats().pools[0].cached > blocks
    hers = driver.submit(text, 1, client=ALICE, salt="s")
    driver.run_until_idle()
    assert driver.request(hers).cached_tokens > 0


@pytest.mark.parametrize(
    "message", [Submit(rid=1, max_tokens=1, prompt=int32([1])), RefBlock(rid=1, block_id=1, holder="x")]
)
def test_nobody_acts_for_another_tenant(message: Any) -> None:
    driver = both()
    message = msgspec.structs.replace(message, tenant="a")
    refused = driver.refused(message, NotAllowed, BOB)
    assert refused.right == ADMIN
    assert str(refused) == str(
        driver.refused(msgspec.structs.replace(message, tenant="nobody"), NotAllowed, BOB)
    ).replace("'nobody'", "'a'")


def test_who_names_no_tenant_acts_for_its_own() -> None:
    driver = both()
    request, sequence = driver.submit([1, 2], 2, client=ALICE), driver.create([1], client=ALICE)
    assert driver.request(request).tenant == driver.info(sequence).tenant == "a"
    assert driver.request(driver.submit([1], 2, client=GATEWAY)).tenant == "default"
    assert driver.request(driver.submit([1], 2, client=GATEWAY, tenant="c")).tenant == "c"
    assert driver.request(driver.submit([1], 2, client=ROOT)).tenant == "r"
    assert driver.request(driver.submit([1], 2, client=ROOT, tenant="c")).tenant == "c"


def test_lists_purges_and_statistics_are_of_ones_own_tenant() -> None:
    driver = both()
    hers = [driver.submit([i, 2], 2, client=ALICE) for i in range(3)]
    his = driver.submit([7], 2, client=BOB)
    driver.create([1], client=ALICE)
    driver.run_until_idle()
    listed = driver.ask(ListRequests(rid=1), BOB)
    assert ([row.request_id for row in listed.requests], listed.total) == ([his], 1)
    assert driver.ask(ListRequests(rid=1), ROOT).total == driver.ask(ListRequests(rid=1), GATEWAY).total == 4
    stats = driver.ask(GetStats(rid=1), BOB)
    assert (stats.requests.finished_total, stats.requests.generated_tokens_total, stats.sequences) == (1, 2, 0)
    assert (stats.pools, [tenant.tenant for tenant in stats.tenants]) == ((), ["b"])
    assert driver.ask(GetStats(rid=1), ALICE).sequences == 1
    assert len(driver.ask(GetStats(rid=1), ROOT).pools) == 1
    assert driver.ask(PurgeFinished(rid=1), BOB).count == 1
    assert [driver.request(request).state for request in hers] == ["finished"] * 3
    assert driver.ask(PurgeFinished(rid=1), ROOT).count == 3


def test_who_waits_is_not_told_whom_others_are() -> None:
    driver = both()
    for i in range(3):
        driver.submit(range(i, i + 40), 20, client=ALICE)
    driver.create(range(8), client=ALICE)
    driver.turn()
    request = driver.submit(range(50, 90), 20, client=BOB)
    driver.turn()
    told = driver.ask(Explain(rid=1, request_id=request), BOB)
    assert told.facts["limit"] == "blocks"
    assert any(sentence.startswith("other tenants hold") for sentence in told.sentences)
    assert not [sentence for sentence in told.sentences if "request 1 " in sentence or "sequence " in sentence]
    assert [s for s in driver.ask(Explain(rid=1, request_id=request), ROOT).sentences if "request 1 holds" in s]
    behind = driver.submit([1], 1, client=BOB, priority=-50)
    assert "request" in str(driver.ask(Explain(rid=1, request_id=behind), BOB).sentences)
    driver.refused(Explain(rid=1, tenant="a"), NotFound, BOB)
    assert driver.ask(Explain(rid=1, tenant="b"), BOB).subject == "tenant b"


def test_a_request_that_cannot_go_on_is_not_told_whom_others_are() -> None:
    driver = Driver()
    driver.add_worker(12)
    driver.come(ALICE, Access("alice", "a", (SUBMIT, READ)))
    driver.come(BOB, Access("bob", "b", (SUBMIT, READ)))
    request = driver.submit(range(8), 40, client=BOB)
    driver.step()
    hers = driver.create(range(32), client=ALICE)
    for block in driver.blocks_of(hers):
        driver.ref(block, "alices secret", client=ALICE)
    driver.run_until_idle()
    error = driver.request(request).error
    assert error is not None
    assert "other tenants hold" in error.message
    assert "secret" not in error.message


def test_every_command_asks_for_a_right_or_is_harmless() -> None:
    harmless = {Hello, Goodbye, GetHealth}
    assert set(typing.get_args(CLIENT_MESSAGES)) - harmless == RIGHT_FOR.keys()
    assert set(RIGHT_FOR.values()) == set(RIGHTS)


@pytest.mark.parametrize("right", RIGHTS)
def test_a_right_that_is_missing_is_named(right: str) -> None:
    driver = both()
    others = tuple(other for other in RIGHTS if other not in (right, ADMIN))
    driver.come(20, Access("x", "a", others))
    asked = [Drain(rid=1)] if right == ADMIN else []
    asked += (
        [Submit(rid=1, max_tokens=1, prompt=int32([1])), Cancel(rid=1, request_id=UNKNOWN)] if right == SUBMIT else []
    )
    asked += [ListRequests(rid=1), GetRequest(rid=1, request_id=UNKNOWN)] if right == READ else []
    for message in asked:
        refused = driver.refused(message, NotAllowed, 20)
        assert refused.right == right
        assert repr(right) in str(refused)
    driver.ask(GetHealth(rid=1), 20)


def test_who_may_drain_drains_and_nobody_else() -> None:
    driver = both()
    driver.refused(Drain(rid=1), NotAllowed, GATEWAY)
    driver.ask(Drain(rid=1), ROOT)
    assert driver.machine.draining


def test_requests_that_are_alive_at_once_are_limited_by_entry() -> None:
    driver = both()
    for client in (20, 21):  # two connections of one key
        driver.come(client, Access("x", "a", (SUBMIT, READ), requests_max=3))
    first = driver.submit([1, 2], 50, client=20, key="k")
    driver.submit([1, 3], 50, client=21, count=2)
    refused = driver.refused(driver.submit_message([9], 1), QueueFull, 20)
    assert (refused.limit, refused.retry_after_ms > 0) == (3, True)
    assert "x has its limit of 3 requests at once" in str(refused)
    assert driver.submit([1, 2], 50, client=21, key="k") == first, "repeating a command must not create another request"
    driver.submit([9], 1, client=ALICE)
    driver.cancel(first)
    driver.submit([9], 1, client=20)
    driver.run_until_idle()
    driver.submit([9], 1, client=20, count=3)


def told_to_bob(text_of_alice: list[int], salt: str, key: str, name: str) -> list[Any]:
    """Return all answers to Bob in a world that differs only in these texts of Alice."""
    driver = both()
    driver.submit(text_of_alice, 3, client=ALICE, salt=salt, key=key)
    driver.run_until_idle()
    hers = driver.create(text_of_alice, client=ALICE, salt=salt)
    driver.ref(driver.blocks_of(hers)[0], name, client=ALICE)
    running = driver.submit(text_of_alice, 9, client=ALICE, salt=salt)
    driver.step()
    text = list(range(1, 41))
    said: list[Any] = [
        driver.submit_message(text, 3, key="k", salt="s"),
        CreateSequence(rid=2, tokens=int32(text), salt="s"),
        CreateSequence(rid=3, tokens=int32(text)),
        *[message for block in range(32) for message in on_block(block)],
        *[message for request in range(1, running + 4) for message in on_request(request)],
        *[message for sequence in range(1, 12) for message in on_sequence(sequence)[1:3]],
        GetStats(rid=4),
        ListRequests(rid=5),
        Explain(rid=6, tenant="b"),
        driver.submit_message(text, 5, salt="s"),
    ]
    told = []
    for message in said:
        effects = driver.apply(FromClient(BOB, message, entropy=7))
        told += [repr(effect.message) for effect in effects if isinstance(effect, ToClient)]
        if isinstance(message, Submit):
            driver.step()
    driver.run_until_idle()
    last = driver.ask(ListRequests(rid=7), BOB).requests
    return told + [repr(driver.ask(GetRequest(rid=8, request_id=row.request_id), BOB)) for row in last]


def test_nothing_that_one_is_told_depends_on_what_another_has() -> None:
    """Two worlds differ only in the texts of another tenant; in one world Bob guesses these texts."""
    guessed = told_to_bob(list(range(1, 41)), "s", "k", "h")
    other = told_to_bob(list(range(101, 141)), "x", "y", "z")
    for first, second in zip(guessed, other, strict=True):
        assert first == second
    assert len({words.partition("(")[0] for words in guessed}) >= 8, "the answers must differ from each other"
