"""A request continues the sequence that an earlier one left: nothing is computed again, whatever was generated."""

from __future__ import annotations

import pytest

from kvforge.coordinator.core.rights import READ, SUBMIT, Access
from kvforge.protocol.errors import InvalidRequest, SequenceNotFound
from kvforge.protocol.messages import GENERATED, Explain, Fork, GetSequence, Submit
from tests.coordinator.driver import Driver, FakeWorker, continuation

PROMPT = [10, 11, 12, 13, 20, 21, 22, 23, 30]
ANSWER = continuation(PROMPT, 6)
TALK = [*PROMPT, *ANSWER, 40, 41]
MINUTE_MS = 60_000


def pool(kinds: bool = True, blocks: int = 32, **limits: object) -> tuple[Driver, FakeWorker]:
    driver = Driver(**limits)
    driver.wants_kinds = kinds
    return driver, driver.add_worker(blocks)


def kept(driver: Driver, prompt: list[int] = PROMPT, **fields: object) -> int:
    """Run a request of six tokens, and return the sequence that it leaves."""
    request = driver.submit(prompt, 6, keep_ms=MINUTE_MS, **fields)
    driver.run_until_idle()
    return driver.ended[request].sequence_id


def fed(worker: FakeWorker, since: int = 0) -> list[int]:
    return [token for step in worker.steps[since:] for token in step.tokens.tolist()]


@pytest.mark.parametrize("kinds", [True, False])
def test_the_next_turn_computes_its_own_tokens_alone(kinds: bool) -> None:
    driver, worker = pool(kinds)
    sequence = kept(driver)
    assert driver.info(sequence).length == len(PROMPT) + len(ANSWER)
    before = len(worker.steps)
    request = driver.submit(TALK, 2, continues=sequence)
    driver.run_until_idle()
    # The last token of an answer is sampled and not computed with it. Where it is computed as a decode, a step behind
    # the answer has done that; elsewhere it is one more token of the prompt.
    own = [40, 41] if kinds else [ANSWER[-1], 40, 41]
    assert fed(worker, before)[: len(own)] == own
    assert driver.request(request).cached_tokens == len(TALK) - len(own)
    assert driver.answer_of(request) == continuation(TALK, 2)


def test_without_the_sequence_an_answer_is_computed_again() -> None:
    driver, _ = pool()
    kept(driver)
    request = driver.submit(TALK, 2)
    driver.run_until_idle()
    assert driver.request(request).cached_tokens == 8


def test_an_evicted_sequence_still_knows_which_tokens_were_generated() -> None:
    driver, worker = pool()
    sequence = kept(driver)
    driver.lose(worker)
    worker = driver.add_worker(32)
    request = driver.submit(TALK, 2, continues=sequence)
    driver.run_until_idle()
    marked = [*PROMPT, *(token + GENERATED for token in ANSWER), 40, 41]
    assert fed(worker)[: len(marked)] == marked
    assert driver.answer_of(request) == continuation(TALK, 2)


@pytest.mark.parametrize("common", [0, 5, 8, 9, 11, 14])
def test_a_prompt_that_differs_shares_what_comes_before(common: int) -> None:
    driver, _ = pool()
    sequence = kept(driver)
    other = [*TALK[:common], 60, 61, 62]
    request = driver.submit(other, 3, continues=sequence)
    driver.run_until_idle()
    assert driver.request(request).cached_tokens == common
    assert driver.answer_of(request) == continuation(other, 3)
    assert driver.tokens(sequence) == TALK[:-2], "the sequence stays as it is"


def test_a_prompt_that_the_sequence_begins_with_computes_its_last_token() -> None:
    driver, _ = pool()
    sequence = kept(driver)
    request = driver.submit(TALK[:12], 2, continues=sequence)
    driver.run_until_idle()
    assert driver.request(request).cached_tokens == 11
    assert driver.answer_of(request) == ANSWER[3:5]


def test_turns_and_branches_continue_each_other() -> None:
    driver, _ = pool(blocks=64)
    first = kept(driver)
    second = kept(driver, TALK, continues=first)
    whole = [*TALK, *continuation(TALK, 6)]
    for text in ([*whole, 50], [*TALK[:-2], 51]):
        request = driver.submit(text, 2, continues=second)
        driver.run_until_idle()
        assert driver.request(request).cached_tokens == len(text) - 1
        assert driver.answer_of(request) == continuation(text, 2)


def test_another_tenant_or_salt_shares_nothing() -> None:
    driver, _ = pool(kinds=False)
    sequence = kept(driver, tenant="a")
    for fields in ({"tenant": "b"}, {"tenant": "a", "salt": "mine"}):
        request = driver.submit(TALK, 2, continues=sequence, **fields)
        driver.run_until_idle()
        assert driver.request(request).cached_tokens == 0


def test_a_client_of_another_tenant_cannot_see_it() -> None:
    driver, _ = pool()
    sequence = kept(driver, tenant="a")
    driver.come(2, Access(tenant="b", rights=frozenset((READ, SUBMIT))))
    for message in (
        GetSequence(rid=1, sequence_id=sequence),
        Fork(rid=2, sequence_id=sequence),
        Explain(rid=3, sequence_id=sequence),
    ):
        driver.refused(message, SequenceNotFound, client=2)


def test_a_request_that_does_not_finish_keeps_nothing() -> None:
    driver, _ = pool()
    request = driver.submit(PROMPT, 6, keep_ms=MINUTE_MS)
    driver.step()
    driver.cancel(request)
    driver.run_until_idle()
    assert driver.ended[request].sequence_id == 0
    assert not driver.machine.cache.sequences.slot_of


def test_it_expires_when_idle_and_outlives_its_client() -> None:
    driver, _ = pool()
    sequence = kept(driver)
    driver.gone(1, goodbye=True)
    driver.advance(MINUTE_MS * 1000 - 1)
    driver.turn()
    assert driver.info(sequence).length == len(TALK) - 2
    driver.advance(1_000_000)
    driver.turn()
    assert "time to live" in str(driver.refused(GetSequence(rid=driver.rid(), sequence_id=sequence), SequenceNotFound))
    assert driver.free_or_cached() == 32
    request = driver.submit(TALK, 2, continues=sequence)  # what is gone is an ordinary prompt
    driver.run_until_idle()
    assert driver.answer_of(request) == continuation(TALK, 2)


def test_each_tenant_keeps_a_bounded_number() -> None:
    driver, _ = pool(blocks=64, kept_per_tenant_max=2)
    other = kept(driver, tenant="b")
    first, second = kept(driver), kept(driver, [1, 2, 3])
    driver.advance(10)
    driver.tokens(first)
    third = kept(driver, [4, 5, 6])
    slots = driver.machine.cache.sequences.slot_of
    assert set(slots) == {other, first, third}, "the least recently used one is dropped"
    error = driver.refused(GetSequence(rid=driver.rid(), sequence_id=second), SequenceNotFound)
    assert "its tenant kept others" in str(error)


def test_a_kept_sequence_makes_place_for_requests_and_sequences() -> None:
    driver, _ = pool(blocks=64, sequences_max=2)
    first, second = kept(driver), kept(driver, [1, 2, 3])
    mine = driver.create([7, 8])
    slots = driver.machine.cache.sequences.slot_of
    assert set(slots) == {second, mine} and first not in slots
    request = driver.submit([1, 2, 3, 4], 2)
    driver.run_until_idle()
    assert driver.answer_of(request) == continuation([1, 2, 3, 4], 2)
    assert set(slots) == {mine}


def test_the_only_place_can_be_that_of_the_sequence_itself() -> None:
    driver, _ = pool(sequences_max=1)
    sequence = kept(driver)
    request = driver.submit(TALK, 2, continues=sequence)
    driver.run_until_idle()
    assert driver.answer_of(request) == continuation(TALK, 2)
    assert driver.request(request).cached_tokens == 12, "its full blocks are cached, with their kinds"


@pytest.mark.parametrize("policy", ["lru", "none"])
def test_its_blocks_serve_others_when_they_are_needed(policy: str) -> None:
    driver, _ = pool(blocks=8, policy=policy)
    sequence = kept(driver)
    assert driver.info(sequence).resident
    big = list(range(100, 124))
    request = driver.submit(big, 2)
    driver.run_until_idle()
    assert driver.answer_of(request) == continuation(big, 2)
    assert not driver.info(sequence).resident
    again = driver.submit(TALK, 2, continues=sequence)
    driver.run_until_idle()
    assert driver.answer_of(again) == continuation(TALK, 2)


def test_without_room_beside_the_sequence_its_own_blocks_are_taken() -> None:
    driver, _ = pool(blocks=5)
    sequence = kept(driver)  # 15 tokens in 4 blocks
    text = [*PROMPT, *ANSWER[:1], 50, 51, 52, 53, 54, 55]
    request = driver.submit(text, 2, continues=sequence)
    driver.run_until_idle()
    assert driver.answer_of(request) == continuation(text, 2)


def test_several_answers_continue_and_keep_one_each() -> None:
    driver, _ = pool(blocks=64)
    sequence = kept(driver)
    first = driver.submit(TALK, 3, continues=sequence, keep_ms=MINUTE_MS, count=3)
    driver.run_until_idle()
    assert driver.request(first).cached_tokens == len(TALK) - 2
    ids = {driver.ended[first + i].sequence_id for i in range(3)}
    assert len(ids) == 3 and 0 not in ids


def test_a_request_that_is_preempted_or_loses_its_worker_goes_on() -> None:
    driver, worker = pool()
    sequence = kept(driver)
    request = driver.submit(TALK, 4, continues=sequence)
    while len(driver.answer_of(request)) < 2:
        driver.step()
    driver.lose(worker)
    worker = driver.add_worker(32)
    driver.run_until_idle()
    marked = [*PROMPT, *(token + GENERATED for token in ANSWER), 40, 41]
    assert fed(worker)[: len(marked)] == marked
    assert driver.answer_of(request) == continuation(TALK, 4)


def test_a_repeated_key_may_name_another_sequence() -> None:
    driver, _ = pool()
    sequence = kept(driver)
    request = driver.submit(TALK, 2, key="k", continues=sequence, keep_ms=MINUTE_MS)
    assert driver.submit(TALK, 2, key="k") == request
    driver.run_until_idle()


@pytest.mark.parametrize("fields", [{"keep_ms": -1}, {"keep_ms": 1 << 40}])
def test_a_time_out_of_range_is_refused(fields: dict[str, int]) -> None:
    driver, _ = pool()
    assert driver.refused(driver.submit_message(PROMPT, **fields), InvalidRequest).field == "keep_ms"


@pytest.mark.parametrize("field", ["continues", "keep_ms"])
def test_a_request_on_a_sequence_continues_no_other(field: str) -> None:
    driver, _ = pool()
    sequence = driver.create(PROMPT)
    message = Submit(rid=driver.rid(), max_tokens=1, sequence_id=sequence, **{field: 1})  # type: ignore[arg-type]
    assert driver.refused(message, InvalidRequest).field == field
