"""Client sequences: their tokens, their blocks, forks and copies."""

from __future__ import annotations

import numpy as np
import pytest

from kvforge.protocol.errors import (
    CapacityExceeded,
    InvalidRequest,
    RequestNotFound,
    SequenceBusy,
    SequenceNotFound,
)
from kvforge.protocol.messages import Append, Cancel, Explain, Fork, GetRequest, GetSequence, GetTokens
from tests.coordinator.conftest import MakePool
from tests.coordinator.driver import Driver, continuation, fingerprint, int32
from tools.simulation.digest import digest

UNKNOWN = 4711


# behaviour 6
def test_three_tokens_are_read_back_in_order_from_one_block(make_pool: MakePool) -> None:
    driver, _ = make_pool()
    sequence = driver.create()
    assert driver.info(sequence).blocks == 0
    assert driver.append((sequence, [5])) == [1]
    assert driver.info(sequence).blocks == 1
    assert driver.append((sequence, [3])) == [2]
    assert driver.append((sequence, [9])) == [3]
    assert driver.tokens(sequence) == [5, 3, 9]
    assert (driver.info(sequence).length, driver.info(sequence).blocks) == (3, 1)


# behaviour 7
@pytest.mark.parametrize(("length", "blocks"), [(1, 1), (4, 1), (5, 2), (8, 2), (9, 3), (16, 4), (17, 5)])
def test_blocks_held_are_the_length_over_the_block_size_rounded_up(
    make_pool: MakePool, length: int, blocks: int
) -> None:
    driver, _ = make_pool(block_size=4)
    at_once = driver.create(range(length))
    one_by_one = driver.create()
    for token in range(length):
        driver.append((one_by_one, [token]))
    assert driver.info(at_once).blocks == driver.info(one_by_one).blocks == blocks
    assert driver.free() == 16 - 2 * blocks


# behaviour 7
def test_a_position_is_a_block_index_and_an_offset(make_pool: MakePool) -> None:
    driver, worker = make_pool(block_size=16, step_tokens_max=64)
    sequence = driver.create(range(32))
    driver.submit(sequence_id=sequence, max_tokens=1)
    driver.run_until_idle()
    table = driver.blocks_of(sequence)
    context, written = 1, {}
    for position in range(32):
        context = fingerprint(context, position)
        written[position] = context
    assert worker.kv[table[1], 0] == written[16]
    assert worker.kv[table[1], 4] == written[20]
    assert (table[2], 0) not in worker.kv  # position 32 was generated and has no KV yet
    assert driver.info(sequence).computed_tokens == 32


# behaviour 8
def test_crossing_a_block_boundary_adds_one_token(make_pool: MakePool) -> None:
    driver, _ = make_pool(block_size=4)
    sequence = driver.create([1, 2, 3, 4])
    assert driver.append((sequence, [5])) == [5]
    info = driver.info(sequence)
    assert (info.length, info.blocks) == (5, 2)
    assert driver.stats().pools[0].live_tokens == 5
    for length in range(6, 14):
        assert driver.append((sequence, [length])) == [length]
        assert driver.stats().pools[0].live_tokens == length
    assert driver.tokens(sequence) == list(range(1, 14))


# behaviour 9
def test_a_sequence_at_its_limit_is_refused_and_unchanged(make_pool: MakePool) -> None:
    driver, _ = make_pool(blocks_per_sequence_max=2)
    full, other = driver.create(range(8)), driver.create([1])
    error = driver.refused(driver.append_message((full, [8])), CapacityExceeded)
    assert (error.resource, error.needed, error.available) == ("context", 9, 8)
    driver.refused(driver.append_message((other, [2]), (full, [8])), CapacityExceeded)
    driver.refused(driver.create_message(range(9)), CapacityExceeded)
    assert driver.tokens(full) == list(range(8))
    assert driver.tokens(other) == [1]


# behaviour 9
@pytest.mark.parametrize("policy", ["none", "lru"])
def test_a_pool_without_a_free_or_evictable_block_refuses_and_changes_nothing(make_pool: MakePool, policy: str) -> None:
    driver, _ = make_pool(3, policy=policy)
    one = driver.create(range(4))
    two = driver.create(range(5))
    for block in {*driver.blocks_of(one), *driver.blocks_of(two)}:
        driver.ref(block, "pin")
    error = driver.refused(driver.append_message((one, [4])), CapacityExceeded)
    assert (error.resource, error.needed, error.available) == ("blocks", 1, 0)
    driver.refused(driver.create_message([1]), CapacityExceeded)
    assert driver.tokens(one) == list(range(4))
    assert driver.tokens(two) == list(range(5))


# behaviour 9
def test_a_bulk_append_is_all_or_nothing(make_pool: MakePool) -> None:
    driver, _ = make_pool(4, policy="none")
    sequences = [driver.create(range(4)) for _ in range(3)]
    message = driver.append_message(*((sequence, [9]) for sequence in sequences))
    error = driver.refused(message, CapacityExceeded)
    assert (error.needed, error.available) == (3, 1)
    assert [driver.info(sequence).length for sequence in sequences] == [4, 4, 4]
    assert driver.append((sequences[1], [9])) == [5]


def test_one_command_appends_different_counts_to_many_sequences(make_pool: MakePool) -> None:
    driver, _ = make_pool()
    one, two, three = driver.create([1]), driver.create(range(4)), driver.create()
    assert driver.append((three, [7, 8, 9]), (one, [2]), (two, [4, 5, 6, 7, 8])) == [3, 2, 9]
    assert driver.tokens(one) == [1, 2]
    assert driver.tokens(two) == list(range(9))
    assert driver.tokens(three) == [7, 8, 9]
    assert driver.append((one, [3]), (two, [9])) == [3, 10]


def test_a_malformed_append_names_the_field(make_pool: MakePool) -> None:
    driver, _ = make_pool()
    one, two = driver.create([1], tenant="a"), driver.create([1], tenant="b")

    def refusal(ids: list[int], counts: list[int], tokens: list[int]) -> str:
        message = Append(rid=1, sequence_ids=np.array(ids), counts=int32(counts), tokens=int32(tokens))
        return str(driver.refused(message, InvalidRequest).field)

    assert refusal([one], [1, 1], [1, 2]) == "counts"
    assert refusal([one], [0], []) == "counts"
    assert refusal([one], [-1], []) == "counts"
    assert refusal([one], [2], [1]) == "tokens"
    assert refusal([one], [1], [1000]) == "tokens"
    assert refusal([one], [1], [-1]) == "tokens"
    assert refusal([one, one], [1, 1], [1, 2]) == "sequence_ids"
    assert refusal([one, two], [1, 1], [1, 2]) == "sequence_ids"


def test_a_command_in_bulk_is_bounded(make_pool: MakePool) -> None:
    driver, _ = make_pool(bulk_max=2)
    ids = [driver.create([1]) for _ in range(3)]
    assert driver.refused(driver.remove_message(*ids), InvalidRequest).field == "sequence_ids"
    assert driver.refused(Fork(rid=1, sequence_id=ids[0], count=3), InvalidRequest).field == "count"
    assert driver.refused(Fork(rid=1, sequence_id=ids[0], count=0), InvalidRequest).field == "count"
    assert driver.remove(*ids[:2]) == 2


# behaviour 10
def test_an_unknown_sequence_is_sequence_not_found_in_every_command(make_pool: MakePool) -> None:
    driver, _ = make_pool()
    known = driver.create([1])
    for message in (
        GetSequence(rid=1, sequence_id=UNKNOWN),
        GetTokens(rid=1, sequence_id=UNKNOWN),
        Fork(rid=1, sequence_id=UNKNOWN),
        Explain(rid=1, sequence_id=UNKNOWN),
        driver.append_message((known, [1]), (UNKNOWN, [1])),
        driver.remove_message(known, UNKNOWN),
        driver.submit_message(sequence_id=UNKNOWN),
    ):
        error = driver.refused(message, SequenceNotFound)
        assert (error.sequence_id, error.code) == (UNKNOWN, "sequence_not_found")


# behaviour 10
def test_an_unknown_request_is_request_not_found_in_every_command(make_pool: MakePool) -> None:
    driver, _ = make_pool()
    for message in (
        GetRequest(rid=1, request_id=UNKNOWN),
        Cancel(rid=1, request_id=UNKNOWN),
        Explain(rid=1, request_id=UNKNOWN),
    ):
        error = driver.refused(message, RequestNotFound)
        assert (error.request_id, error.code) == (UNKNOWN, "request_not_found")


def test_the_sequence_of_a_request_is_not_a_client_sequence(make_pool: MakePool) -> None:
    driver, _ = make_pool()
    driver.submit([1, 2, 3], max_tokens=5)
    driver.turn()
    (internal,) = driver.machine.cache.sequences.slot_of
    assert driver.refused(GetTokens(rid=1, sequence_id=internal), SequenceNotFound).sequence_id == internal
    assert driver.refused(driver.remove_message(internal), SequenceNotFound).sequence_id == internal


# behaviour 11
def test_removing_returns_every_block_it_alone_held_as_if_it_had_never_been(make_pool: MakePool) -> None:
    driver, _ = make_pool(tenants_max=1)
    keep = driver.create([1, 2, 3])
    before = driver.stats().pools[0]
    sequence = driver.create(range(9))
    assert driver.stats().pools[0].free == before.free - 3
    assert driver.remove(sequence) == 3
    after = driver.stats().pools[0]
    for name in ("free", "cached", "referenced", "quarantined", "live_tokens", "sequences"):
        assert getattr(after, name) == getattr(before, name), name
    assert driver.stats().sequences == 1
    assert driver.remove(keep) == 1
    driver.refused(driver.remove_message(keep), SequenceNotFound)


# behaviour 11
def test_slots_and_blocks_are_reused_and_nothing_grows() -> None:
    driver = Driver(sequences_max=1, finished_max=4)
    driver.add_worker(3)
    sizes = []
    for i in range(300):
        sequence = driver.create([i % 7] * 8)
        driver.append((sequence, [1, 2]))
        assert driver.remove(sequence) == 3
        driver.turn()
        if i % 100 == 99:
            machine = driver.machine
            machine.cache.blocks.changed.clear()
            machine.cache.sequences.changed_rows.clear()
            machine.cache.sequences.changed_lengths.clear()
            machine.cache.sequences.changed_cells.clear()
            pool = machine.cache.groups[0].pool
            sizes.append((len(machine.cache.sequences), len(pool.quarantine), len(pool.index)))
    assert sizes == [(0, 0, 0)] * 3
    assert driver.free() == 3
    assert driver.stats().pools[0].allocated_total == driver.stats().pools[0].freed_total == 900


def test_the_number_of_sequences_is_bounded(make_pool: MakePool) -> None:
    driver, _ = make_pool(sequences_max=3)
    first = driver.create([1])
    driver.create([1])
    error = driver.refused(Fork(rid=1, sequence_id=first, count=2), CapacityExceeded)
    assert (error.resource, error.needed, error.available) == ("sequences", 2, 1)
    driver.create([1])
    driver.refused(driver.create_message([1]), CapacityExceeded)
    driver.remove(first)
    assert driver.create([1]) == 4


# behaviours 12 and 18 (in the core: clients interleaved command by command)
def test_ten_interleaved_clients_with_a_hundred_appends_each_lose_nothing() -> None:
    driver = Driver(block_size=4, blocks_per_sequence_max=32, blocks_max=256)
    driver.add_worker(256)
    sequences = {client: driver.create(client=client, tenant=f"t{client % 3}") for client in range(1, 11)}
    for i in range(100):
        for client, sequence in sequences.items():
            message = driver.append_message((sequence, [client * 10 + i % 10]))
            assert driver.ask(message, client).lengths.tolist() == [i + 1]
    tables = [driver.blocks_of(sequence) for sequence in sequences.values()]
    assert [len(table) for table in tables] == [25] * 10
    assert len({block for table in tables for block in table}) == 250
    for client, sequence in sequences.items():
        assert driver.tokens(sequence) == [client * 10 + i % 10 for i in range(100)]
    assert driver.stats().pools[0].live_tokens == 1000
    assert len(set(sequences.values())) == 10


# behaviour 18
def test_ten_clients_on_a_pool_that_is_too_small_get_exact_totals() -> None:
    driver = Driver(policy="none", sequences_max=64)
    driver.add_worker(20)
    created, refused = [], 0
    for i in range(40):
        try:
            created.append(driver.create([i] * 9, client=1 + i % 10))
        except CapacityExceeded:
            refused += 1
    assert (len(created), refused, driver.free()) == (6, 34, 2)
    tables = [block for sequence in created for block in driver.blocks_of(sequence)]
    assert len(tables) == len(set(tables)) == 18


# behaviour 12
def test_interleaved_sequences_never_share_a_block_or_a_token(make_pool: MakePool) -> None:
    driver, _ = make_pool()
    one, two = driver.create(), driver.create()
    for i in range(9):
        driver.append((one, [i]))
        driver.append((two, [100 + i]))
    assert not set(driver.blocks_of(one)) & set(driver.blocks_of(two))
    assert driver.tokens(one) == list(range(9))
    assert driver.tokens(two) == list(range(100, 109))


# behaviour 15
def test_a_fork_shares_every_block_until_one_side_writes(make_pool: MakePool) -> None:
    driver, _ = make_pool()
    sequence = driver.create(range(9))
    (fork,) = driver.fork(sequence)
    assert driver.blocks_of(fork) == driver.blocks_of(sequence)
    assert driver.counts_of(fork) == [2, 2, 2]
    assert driver.free() == 13
    driver.append((fork, [50]))
    assert driver.counts_of(sequence) == [2, 2, 1]
    assert driver.blocks_of(fork)[:2] == driver.blocks_of(sequence)[:2]
    assert driver.blocks_of(fork)[2] != driver.blocks_of(sequence)[2]
    driver.append((sequence, [60]))
    assert driver.tokens(sequence) == [*range(9), 60]
    assert driver.tokens(fork) == [*range(9), 50]
    assert driver.free() == 12
    assert driver.remove(sequence) == 1
    assert driver.counts_of(fork) == [1, 1, 1]


# behaviour 15
def test_at_a_block_boundary_a_fork_writes_without_a_copy(make_pool: MakePool) -> None:
    driver, worker = make_pool()
    sequence = driver.create(range(8))
    (fork,) = driver.fork(sequence)
    driver.append((fork, [50]))
    assert driver.counts_of(sequence) == [2, 2]
    assert driver.info(fork).blocks == 3
    driver.turn()
    assert not worker.steps


# behaviour 15: the worker copies, and the other sequence's KV is untouched
def test_both_sides_of_a_fork_continue_from_the_same_kv(make_pool: MakePool) -> None:
    driver, worker = make_pool()
    sequence = driver.create([1, 2, 3, 4, 5])
    driver.submit(sequence_id=sequence, max_tokens=2)
    driver.run_until_idle()
    text = [1, 2, 3, 4, 5, *continuation([1, 2, 3, 4, 5], 2)]
    (fork,) = driver.fork(sequence)
    shared = driver.blocks_of(sequence)[1]
    kept = {offset: worker.kv[shared, offset] for offset in range(2)}
    request = driver.submit([77], sequence_id=fork, max_tokens=3)
    driver.run_until_idle()
    assert driver.answer_of(request) == continuation([*text, 77], 3)
    (copy,) = [step for step in worker.steps if step.copies.size]
    assert copy.copies.tolist() == [shared, driver.blocks_of(fork)[1], 2]
    assert {offset: worker.kv[shared, offset] for offset in range(2)} == kept
    assert driver.tokens(sequence) == text
    again = driver.submit([88], sequence_id=sequence, max_tokens=3)
    driver.run_until_idle()
    assert driver.answer_of(again) == continuation([*text, 88], 3)
    assert driver.request(again).cached_tokens == 6


# behaviour 15
def test_many_forks_and_forks_of_forks_are_independent(make_pool: MakePool) -> None:
    driver, _ = make_pool(32)
    sequence = driver.create([1, 2, 3, 4, 5, 6])
    forks = driver.fork(sequence, 3)
    (grandchild,) = driver.fork(forks[0])
    assert driver.counts_of(sequence) == [5, 5]
    everyone = [sequence, *forks, grandchild]
    requests = [driver.submit([100 + i], sequence_id=s, max_tokens=4) for i, s in enumerate(everyone)]
    driver.run_until_idle()
    for i, (s, request) in enumerate(zip(everyone, requests, strict=True)):
        text = [1, 2, 3, 4, 5, 6, 100 + i]
        assert driver.answer_of(request) == continuation(text, 4)
        assert driver.tokens(s) == text + continuation(text, 4)
    driver.remove(*everyone)
    assert driver.free_or_cached() == 32


def test_a_running_sequence_can_be_forked_in_the_middle_of_a_step(make_pool: MakePool) -> None:
    driver, worker = make_pool()
    sequence = driver.create([1, 2, 3, 4, 5])
    request = driver.submit(sequence_id=sequence, max_tokens=6)
    driver.turn()
    driver.answer(worker)
    driver.turn()
    assert worker.inbox
    (fork,) = driver.fork(sequence)
    text = driver.tokens(fork)
    assert text == [1, 2, 3, 4, 5, *continuation([1, 2, 3, 4, 5], 1)]
    other = driver.submit([9], sequence_id=fork, max_tokens=3)
    driver.run_until_idle()
    assert driver.answer_of(request) == continuation([1, 2, 3, 4, 5], 6)
    assert driver.answer_of(other) == continuation([*text, 9], 3)


def test_a_fork_in_the_middle_of_a_step_trusts_only_what_was_acknowledged(make_pool: MakePool) -> None:
    driver, worker = make_pool()
    prompt = [1, 2, 3, 4, 5, 666, 7, 8, 9]
    sequence = driver.create(prompt)
    request = driver.submit(sequence_id=sequence)
    driver.turn()
    (fork,) = driver.fork(sequence)
    assert driver.info(fork).computed_tokens == 0, "the step is in flight and may still fail"
    worker.poison = {666}
    driver.run_until_idle()
    assert driver.request(request).state == "failed"
    worker.poison = set()
    other = driver.submit(sequence_id=fork, max_tokens=3)
    driver.run_until_idle()
    assert driver.answer_of(other) == continuation(prompt, 3)


def test_a_fork_that_does_not_fit_is_refused_when_it_writes_not_when_it_is_made(make_pool: MakePool) -> None:
    driver, _ = make_pool(2, policy="none")
    sequence = driver.create(range(6))
    (fork,) = driver.fork(sequence)
    error = driver.refused(driver.append_message((fork, [1])), CapacityExceeded)
    assert (error.needed, error.available) == (1, 0)
    driver.remove(sequence)
    assert driver.append((fork, [1])) == [7]


# behaviour 20
def test_a_sequence_that_a_request_extends_is_busy(make_pool: MakePool) -> None:
    driver, _ = make_pool()
    sequence = driver.create([1, 2, 3])
    request = driver.submit(sequence_id=sequence, max_tokens=5)
    for when in ("pending", "running"):
        assert driver.request(request).state == when
        for message in (driver.append_message((sequence, [4])), driver.submit_message([4], sequence_id=sequence)):
            error = driver.refused(message, SequenceBusy)
            assert (error.sequence_id, error.request_id) == (sequence, request)
        assert driver.info(sequence).request_id == request
        driver.turn()
    driver.cancel(request)
    assert driver.append((sequence, [4]))[0] >= 4


# behaviour 20
@pytest.mark.parametrize("turns", [0, 1, 2])
def test_removing_a_sequence_in_use_cancels_its_request(make_pool: MakePool, turns: int) -> None:
    driver, worker = make_pool()
    sequence = driver.create([1, 2, 3])
    request = driver.submit(sequence_id=sequence, max_tokens=5)
    for _ in range(turns):
        driver.turn()
    driver.remove(sequence)
    assert driver.request(request).state == "cancelled"
    driver.run_until_idle()
    assert driver.ended[request].reason == "cancelled"
    assert driver.free_or_cached() == 16
    assert not worker.inbox


# behaviour 20
def test_a_cancelled_sequence_is_extended_while_its_old_step_is_still_under_way(make_pool: MakePool) -> None:
    driver, worker = make_pool()
    sequence = driver.create([1, 2, 3, 4])
    first = driver.submit(sequence_id=sequence, max_tokens=5)
    driver.turn()
    driver.turn()
    assert len(worker.inbox) == 2
    driver.cancel(first)
    driver.append((sequence, [7]))
    second = driver.submit([8], sequence_id=sequence, max_tokens=4)
    driver.run_until_idle()
    assert driver.answer_of(first) == []
    assert driver.answer_of(second) == continuation([1, 2, 3, 4, 7, 8], 4)
    assert driver.tokens(sequence) == [1, 2, 3, 4, 7, 8, *continuation([1, 2, 3, 4, 7, 8], 4)]


# behaviour 23
def test_a_removed_sequence_refuses_everything_and_its_id_is_not_used_again(make_pool: MakePool) -> None:
    driver, _ = make_pool()
    sequence = driver.create([1])
    driver.remove(sequence)
    driver.refused(driver.append_message((sequence, [2])), SequenceNotFound)
    driver.refused(GetTokens(rid=1, sequence_id=sequence), SequenceNotFound)
    assert driver.create([1]) == sequence + 1


def test_a_sequence_is_continued_several_times_and_only_new_tokens_are_computed(make_pool: MakePool) -> None:
    driver, worker = make_pool()
    sequence = driver.create([1, 2, 3, 4, 5, 6, 7])
    text = [1, 2, 3, 4, 5, 6, 7]
    for i in range(3):
        request = driver.submit([100 + i], sequence_id=sequence, max_tokens=4)
        before = len(worker.steps)
        driver.run_until_idle()
        text.append(100 + i)
        assert driver.answer_of(request) == continuation(text, 4)
        # every token except the last generated one has KV
        assert worker.steps[before].counts.tolist() == [8 if i == 0 else 2]
        text += continuation(text, 4)
    assert driver.tokens(sequence) == text


def test_a_sequence_without_a_worker_keeps_its_tokens_and_gets_blocks_when_it_runs(driver: Driver) -> None:
    sequence = driver.create(range(6))
    assert not driver.info(sequence).resident
    driver.append((sequence, [6]))
    (fork,) = driver.fork(sequence)
    driver.add_worker(16)
    request = driver.submit(sequence_id=fork, max_tokens=2)
    driver.run_until_idle()
    assert driver.answer_of(request) == continuation(range(7), 2)
    assert driver.info(fork).resident
    assert not driver.info(sequence).resident
    assert driver.tokens(sequence) == list(range(7))


def test_reading_commands_change_nothing_but_the_access(make_pool: MakePool) -> None:
    driver, _ = make_pool()
    sequence = driver.create([1, 2, 3])
    before = digest(driver.machine)
    driver.info(sequence)
    driver.block(0)
    driver.stats()
    assert digest(driver.machine) == before
    driver.tokens(sequence)
    assert digest(driver.machine) != before


@pytest.mark.parametrize("computed", [False, True], ids=["no KV", "with KV"])
@pytest.mark.parametrize("policy", ["lru", "none"])
def test_of_all_that_share_a_block_and_are_appended_to_together_one_keeps_it(
    make_pool: MakePool, policy: str, computed: bool
) -> None:
    driver, _ = make_pool(4, policy=policy, partial_tokens_min=100)
    sequence = driver.create(range(1, 7))
    if computed:
        driver.submit(sequence_id=sequence, max_tokens=1)
        driver.run_until_idle()
    text = driver.tokens(sequence)
    forks = driver.fork(sequence, 2)
    assert driver.free() == 2, "every fork but one takes a block"
    appended = [[9], [10], [11]]
    driver.append(*zip((sequence, *forks), appended, strict=True))
    assert driver.free() == 0
    for one, more in zip((sequence, *forks), appended, strict=True):
        assert driver.tokens(one) == [*text, *more]
    for other in forks:
        driver.remove(other)
    request = driver.submit(sequence_id=sequence, max_tokens=3)
    driver.run_until_idle()
    assert driver.answer_of(request) == continuation([*text, 9], 3)


def test_a_shared_block_that_a_name_holds_too_is_copied_by_all(make_pool: MakePool) -> None:
    driver, _ = make_pool(5, policy="none")
    sequence = driver.create(range(1, 7))
    (fork,) = driver.fork(sequence)
    driver.ref(driver.blocks_of(sequence)[1], "pin")
    driver.append((sequence, [9]), (fork, [10]))
    assert driver.free() == 1
    assert driver.block(1).refcount == 1
