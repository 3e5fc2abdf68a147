"""Answers to operators: the holders of a block, the cause of a wait, the usage of a tenant."""

from __future__ import annotations

import pytest

from kvforge.coordinator.core.limits import Quota
from kvforge.protocol.errors import InvalidRequest, NotFound
from kvforge.protocol.messages import Explain
from tests.coordinator.conftest import MakePool
from tests.coordinator.driver import BYTES_PER_BLOCK, Driver


@pytest.mark.parametrize(
    "subject",
    [{}, {"block_id": 0, "request_id": 1}, {"sequence_id": 1, "tenant": "a"}, {"request_id": 1, "tenant": "a"}],
)
def test_exactly_one_subject_is_asked_about(make_pool: MakePool, subject: dict[str, object]) -> None:
    driver, _ = make_pool()
    assert driver.refused(Explain(rid=1, **subject), InvalidRequest).field == "subject"


# ------------------------------------------------------------------------------------------------------------- blocks


def test_who_holds_a_block_and_since_when(make_pool: MakePool) -> None:
    driver, _ = make_pool()
    sequence = driver.create([1, 2, 3], tenant="a")
    (block,) = driver.blocks_of(sequence)
    driver.advance(1_000_000)
    (fork,) = driver.fork(sequence)
    driver.advance(500_000)
    driver.ref(block, "debugger", tenant="b")
    driver.advance(250_000)
    holders = driver.block(block).holders
    assert [(h.kind, h.name, h.id, h.since_us) for h in holders] == [
        ("sequence", f"sequence {sequence}", sequence, 1_750_000),
        ("sequence", f"sequence {fork}", fork, 750_000),
        ("external", "debugger", 0, 250_000),
    ]
    told = driver.explain(block_id=block)
    assert told.subject == f"block {block}"
    assert told.sentences == (
        f"block {block} of worker w1 is referenced, generation 0",
        f"held by sequence {sequence} for 1.75 s",
        f"held by sequence {fork} for 0.75 s",
        "held by debugger for 0.25 s",
        "charged to tenant 'b'",
    )
    assert told.facts == {
        "state": "referenced",
        "worker": "w1",
        "holders": 3,
        "refcount": 3,
        "generation": 0,
        "tenant": "b",
        "indexed": False,
    }


def test_a_block_says_whether_a_request_the_cache_or_a_step_keeps_it(make_pool: MakePool) -> None:
    driver, worker = make_pool()
    request = driver.submit([1, 2, 3, 4, 5], max_tokens=4)
    driver.turn()
    first, second = driver.machine.cache.sequences.table[worker.steps[0].slots[0], :2].tolist()
    assert [(h.kind, h.id) for h in driver.block(first).holders] == [("request", request)]
    driver.answer(worker)
    driver.cancel(request)
    assert driver.explain(block_id=second).facts["state"] == "quarantined"
    assert "it has no holder; step 2 of w1 may still touch it" in driver.explain(block_id=second).sentences
    driver.run_until_idle()
    cached = driver.explain(block_id=first)
    assert (cached.facts["state"], cached.facts["indexed"], cached.facts["holders"]) == ("cached", True, 0)
    assert any("evicted when needed" in sentence for sentence in cached.sentences)
    assert driver.explain(block_id=second).sentences == ("block 1 of worker w1 is free, generation 1",)


# ------------------------------------------------------------------------------------------- why a request waits


def test_a_request_waits_for_a_worker(driver: Driver) -> None:
    request = driver.submit([1, 2, 3])
    driver.advance(2_000_000)
    told = driver.explain(request_id=request)
    assert told.facts == {"state": "pending", "age_us": 2_000_000, "place": 0, "limit": "workers"}
    assert told.sentences[0] == "it is pending since 2 s; it is the first in the queue"
    assert told.sentences[1] == "no worker is ready: it starts when one has registered its pool"


def test_a_request_waits_for_a_sequence_slot(make_pool: MakePool) -> None:
    driver, _ = make_pool(sequences_max=1)
    sequence = driver.create([1])
    request = driver.submit([1, 2, 3])
    told = driver.explain(request_id=request)
    assert told.facts["limit"] == "sequences_max"
    assert "all 1 sequence slots are taken: it starts when one is freed" in told.sentences
    driver.remove(sequence)
    assert driver.explain(request_id=request).facts["limit"] == ""


def test_a_request_waits_for_a_row(make_pool: MakePool) -> None:
    driver, _ = make_pool(step_rows_max=2)
    for i in range(2):
        driver.submit([i], max_tokens=9)
    driver.turn()
    request = driver.submit([3])
    told = driver.explain(request_id=request)
    assert told.facts["limit"] == "step_rows_max"
    assert "every worker runs its limit of 2 requests: it starts when one ends" in told.sentences


# 16 - 12 of the running request are free; needed: 7 blocks for 28 tokens, and 2 for the rows to grow
def test_a_request_is_short_of_an_exact_number_of_blocks_and_is_told_what_would_free_them(make_pool: MakePool) -> None:
    driver, _ = make_pool(16, policy="none")
    running = driver.submit([1] * 38, max_tokens=8)
    driver.step()
    driver.step()
    driver.step()
    idle = driver.create([9] * 5)
    driver.ref(driver.blocks_of(idle)[0], "pin")
    waiting = driver.submit([2] * 28, max_tokens=2)
    driver.turn()
    pool = driver.machine.cache.groups[0].pool
    told = driver.explain(request_id=waiting)
    assert told.facts["state"] == "pending"
    assert told.facts["limit"] == "blocks"
    assert told.facts["blocks_short"] == 7 + 2 - (pool.free + pool.cached)
    assert told.facts["worker"] == "w1"
    left = 8 - driver.request(running).generated_tokens
    held = driver.machine.cache.sequences.used[driver.machine.requests.live[running].slot]
    assert f"request {running} holds {held} blocks and ends within {left} tokens" in told.sentences
    assert f"sequence {idle} is idle and holds 2 blocks" in told.sentences
    assert "'pin' holds 1 block by name" in told.sentences


@pytest.mark.parametrize("pinned", [6, 7, 9])
def test_the_shortage_is_exact_freeing_one_less_is_not_enough(make_pool: MakePool, pinned: int) -> None:
    driver, _ = make_pool(10, policy="none")
    sequences = [driver.create([i]) for i in range(pinned)]
    request = driver.submit(range(18), max_tokens=1)
    driver.turn()
    short = driver.explain(request_id=request).facts["blocks_short"]
    assert short == 5 - (10 - pinned)
    for _ in range(short):
        assert driver.request(request).state == "pending"
        driver.remove(sequences.pop())
        driver.turn()
    assert driver.request(request).state == "running"


def test_a_request_waits_for_its_tenants_ceiling() -> None:
    driver = Driver(quotas={"a": Quota(ceiling=4)}, policy="none")
    driver.add_worker(16)
    driver.create(range(12), tenant="a")
    request = driver.submit(range(50, 58), max_tokens=1, tenant="a")
    driver.turn()
    told = driver.explain(request_id=request)  # the prompt fills two blocks, its first token needs a third; one is free
    assert (told.facts["limit"], told.facts["blocks_short"]) == ("tenant ceiling", 2)
    assert any("its ceiling is 4" in sentence for sentence in told.sentences)


def test_a_request_knows_its_place_in_the_queue_and_whom_it_waits_for(make_pool: MakePool) -> None:
    driver, _ = make_pool(step_rows_max=1)
    running, head, *behind = [driver.submit([i], max_tokens=5) for i in range(4)]
    driver.turn()
    assert driver.explain(request_id=running).facts["state"] == "running"
    assert driver.explain(request_id=head).facts["place"] == 0
    for place, request in enumerate(behind, 1):
        told = driver.explain(request_id=request)
        assert (told.facts["place"], told.facts["limit"]) == (place, "step_rows_max")
        assert f"{place} requests are before it in the queue" in told.sentences[0]
        assert told.sentences[1] == f"it waits behind request {head}"
    driver.cancel(head)
    assert driver.explain(request_id=behind[0]).facts["place"] == 0


def test_blocks_in_quarantine_are_told_to_come_back(make_pool: MakePool) -> None:
    driver, worker = make_pool(3)
    first = driver.submit(range(9), max_tokens=2)
    driver.turn()
    driver.cancel(first)
    second = driver.submit(range(50, 59), max_tokens=2)
    driver.turn()
    told = driver.explain(request_id=second)
    assert (told.facts["limit"], told.facts["blocks_short"]) == ("blocks", 3)
    assert f"3 blocks come back when step {worker.steps[-1].step_id} is done" in told.sentences
    driver.run_until_idle()
    assert driver.request(second).state == "finished"


def test_a_running_request_says_where_it_is_and_an_ended_one_how_it_ended(make_pool: MakePool) -> None:
    driver, worker = make_pool(step_tokens_max=4, steps_in_flight_max=1)
    request = driver.submit(range(10), max_tokens=5)
    driver.turn()
    told = driver.explain(request_id=request)
    assert (told.facts["worker"], told.facts["blocks"], told.facts["tokens_left_max"]) == ("w1", 3, 5)
    assert "6 tokens of its prompt are still to be computed" in told.sentences
    driver.run_until_idle()
    assert driver.explain(request_id=request).sentences[0] == "it has ended (finished, reason length)"
    worker.poison = {666}
    bad = driver.submit([666], max_tokens=1)
    driver.run_until_idle()
    assert driver.explain(request_id=bad).sentences[0] == "it has ended (failed, reason failed): a poisoned token"


# --------------------------------------------------------------------------------------------- sequences and tenants


def test_a_sequence_tells_its_length_its_blocks_and_what_is_shared(make_pool: MakePool) -> None:
    driver, _ = make_pool()
    sequence = driver.create(range(9), idle_ttl_ms=10_000)
    (fork,) = driver.fork(sequence)
    driver.append((fork, [1]))
    driver.advance(4_000_000)
    told = driver.explain(sequence_id=sequence)
    assert told.facts == {
        "length": 9,
        "computed_tokens": 0,
        "blocks": 3,
        "shared_blocks": 2,
        "worker": "w1",
        "request_id": 0,
        "resident": True,
        "pinned": False,
    }
    assert told.sentences[0] == "9 tokens, 0 with KV, last used 4 s ago"
    assert told.sentences[2] == "it is removed in 6 s if it stays unused"


def test_an_evicted_sequence_says_that_it_holds_nothing(make_pool: MakePool) -> None:
    driver, _ = make_pool(2)
    sequence = driver.create(range(5))
    driver.advance(1)
    driver.create(range(5))
    told = driver.explain(sequence_id=sequence)
    assert (told.facts["resident"], told.facts["blocks"], told.facts["length"]) == (False, 0, 5)
    assert "its KV was evicted" in told.sentences[1]


# behaviour 17
def test_a_tenants_bytes_and_byte_seconds_are_exact(make_pool: MakePool) -> None:
    driver, _ = make_pool()
    sequence = driver.create(range(5), tenant="a")  # 2 blocks
    driver.advance(3_000_000)
    driver.append((sequence, [1, 2, 3, 4]))  # 3 blocks
    driver.advance(500_000)
    assert driver.explain(tenant="a").facts["bytes"] == 3 * BYTES_PER_BLOCK
    assert driver.explain(tenant="a").facts["byte_seconds"] == (2 * 3 + 3 * 0.5) * BYTES_PER_BLOCK
    driver.remove(sequence)
    driver.advance(60_000_000)
    facts = driver.explain(tenant="a").facts
    assert (facts["bytes"], facts["byte_seconds"]) == (0, 7.5 * BYTES_PER_BLOCK)
    row = next(row for row in driver.stats().tenants if row.tenant == "a")
    assert (row.bytes, row.byte_seconds, row.blocks) == (0, 7.5 * BYTES_PER_BLOCK, 0)


def test_a_tenant_tells_its_quota_its_live_tokens_and_its_hits() -> None:
    driver = Driver(quotas={"a": Quota(floor=2, ceiling=6)})
    driver.add_worker(16)
    driver.submit(range(9), max_tokens=1, tenant="a")
    driver.run_until_idle()
    driver.create(range(9), tenant="a")
    driver.create(range(9), tenant="b")
    told = driver.explain(tenant="a")
    assert told.facts == {
        "bytes": 3 * BYTES_PER_BLOCK,
        "byte_seconds": 0.0,
        "live_tokens": 9,
        "floor": 2,
        "ceiling": 6,
        "prefix_queried_tokens": 18,
        "prefix_hit_tokens": 8,
    }
    assert told.sentences == (
        f"3 of 16 blocks on w1 ({3 * BYTES_PER_BLOCK} bytes): 75% of their token slots are live",
        "prefix cache: 8 of 18 tokens were there (44.4%)",
    )
    error = driver.refused(Explain(rid=1, tenant="nobody"), NotFound)
    assert error.tenant == "nobody"


def test_byte_seconds_of_a_tenant_survive_the_end_of_its_worker(make_pool: MakePool) -> None:
    driver, worker = make_pool()
    driver.create(range(5), tenant="a")
    driver.advance(1_000_000)
    driver.lose(worker)
    assert driver.explain(tenant="a").facts["byte_seconds"] == 2 * BYTES_PER_BLOCK
