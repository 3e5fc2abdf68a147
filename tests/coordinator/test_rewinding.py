"""A sequence is cut off behind a token, and continues from there."""

from __future__ import annotations

import pytest

from kvforge.coordinator.core.rights import READ, SUBMIT, Access
from kvforge.protocol.errors import InvalidRequest, NotAllowed, SequenceBusy, SequenceNotFound
from kvforge.protocol.messages import GENERATED, KeepSequence, Rewind
from tests.coordinator.driver import Driver, continuation

PROMPT = [10, 11, 12, 13, 20, 21, 22, 23, 30]
ANSWER = continuation(PROMPT, 6)
WHOLE = [*PROMPT, *ANSWER]


def continued() -> tuple[Driver, int]:
    """A sequence of 15 tokens with KV, in blocks of 4."""
    driver = Driver()
    driver.wants_kinds = True
    driver.add_worker(32)
    sequence = driver.create(PROMPT)
    driver.submit(sequence_id=sequence, max_tokens=6)
    driver.run_until_idle()
    return driver, sequence


def rewind(driver: Driver, sequence: int, length: int) -> None:
    reply = driver.ask(Rewind(rid=driver.rid(), sequence_id=sequence, length=length))
    assert (reply.sequence_id, reply.length) == (sequence, length)


@pytest.mark.parametrize("length", [0, 1, 4, 6, 8, 11, 14, 15])
def test_it_continues_from_there_with_the_kv_that_it_has(length: int) -> None:
    driver, sequence = continued()
    (worker,) = driver.workers
    before = len(worker.steps)
    rewind(driver, sequence, length)
    assert driver.tokens(sequence) == WHOLE[:length]
    assert driver.info(sequence).blocks == -(-length // 4)
    driver.append((sequence, [50, 51]))
    request = driver.submit(sequence_id=sequence, max_tokens=3)
    driver.run_until_idle()
    text = [*WHOLE[:length], 50, 51]
    assert driver.answer_of(request) == continuation(text, 3)
    fed = [token for step in worker.steps[before:] for token in step.tokens.tolist()]
    assert [token % GENERATED for token in fed[: len(text) - length]] == text[length:], "nothing is computed again"


def test_forks_keep_their_tokens_and_blocks() -> None:
    driver, sequence = continued()
    (fork,) = driver.fork(sequence)
    rewind(driver, sequence, 6)
    driver.append((sequence, [50, 51, 52]))
    assert driver.tokens(fork) == WHOLE
    for one, text in ((fork, WHOLE), (sequence, [*WHOLE[:6], 50, 51, 52])):
        request = driver.submit(sequence_id=one, max_tokens=2)
        driver.run_until_idle()
        assert driver.answer_of(request) == continuation(text, 2)


def test_a_sequence_without_kv_is_cut_too() -> None:
    driver, sequence = continued()
    driver.lose(driver.workers[0])
    rewind(driver, sequence, 11)
    worker = driver.add_worker(32)
    request = driver.submit(sequence_id=sequence, max_tokens=2)
    driver.run_until_idle()
    assert driver.answer_of(request) == ANSWER[2:4]
    fed = [token for step in worker.steps for token in step.tokens.tolist()]
    assert fed[:11] == [*PROMPT, *(token + GENERATED for token in ANSWER[:2])]


def test_a_step_in_flight_does_no_harm() -> None:
    driver, sequence = continued()
    request = driver.submit([60, 61], 5, sequence_id=sequence)
    driver.turn()  # sent, and not answered
    driver.cancel(request)
    rewind(driver, sequence, 9)
    driver.append((sequence, [70, 71]))
    after = driver.submit(sequence_id=sequence, max_tokens=3)
    driver.run_until_idle()
    assert driver.answer_of(after) == continuation([*PROMPT, 70, 71], 3)


@pytest.mark.parametrize("length", [-1, 16])
def test_it_cannot_be_longer_than_it_is(length: int) -> None:
    driver, sequence = continued()
    error = driver.refused(Rewind(rid=driver.rid(), sequence_id=sequence, length=length), InvalidRequest)
    assert error.field == "length" and "0 to 15" in str(error)


def test_a_running_request_is_not_cut() -> None:
    driver, sequence = continued()
    driver.submit(sequence_id=sequence, max_tokens=5)
    driver.refused(Rewind(rid=driver.rid(), sequence_id=sequence, length=3), SequenceBusy)
    driver.run_until_idle()


def test_a_restricted_client_rewinds_and_keeps_its_own_alone() -> None:
    driver, sequence = continued()
    driver.come(2, Access(tenant="b", rights=frozenset((READ, SUBMIT))))
    driver.come(3, Access(tenant="default", rights=frozenset((READ,))))
    for message in (
        Rewind(rid=1, sequence_id=sequence, length=3),
        KeepSequence(rid=2, sequence_id=sequence, idle_ttl_ms=1000),
    ):
        driver.refused(message, SequenceNotFound, client=2)
        driver.refused(message, NotAllowed, client=3)


def test_a_time_to_live_can_be_set_later() -> None:
    driver, sequence = continued()
    reply = driver.ask(KeepSequence(rid=driver.rid(), sequence_id=sequence, idle_ttl_ms=5000))
    assert reply.idle_ttl_ms == 5000
    driver.gone(1, goodbye=True)
    driver.advance(4_999_000)
    driver.turn()
    assert driver.tokens(sequence) == WHOLE
    driver.advance(5_000_000)
    driver.turn()
    driver.refused(Rewind(rid=driver.rid(), sequence_id=sequence, length=3), SequenceNotFound)


def test_a_sequence_with_a_time_of_its_own_is_not_dropped_for_its_place() -> None:
    driver = Driver(sequences_max=1)
    driver.add_worker(32)
    first = driver.submit(PROMPT, 2, keep_ms=1000)
    driver.run_until_idle()
    sequence = driver.ended[first].sequence_id
    driver.ask(KeepSequence(rid=driver.rid(), sequence_id=sequence, idle_ttl_ms=60_000))
    waiting = driver.submit([1, 2], 2)
    driver.step()
    assert driver.request(waiting).state == "pending"
    driver.remove(sequence)
    driver.run_until_idle()


@pytest.mark.parametrize("ttl_ms", [0, -1, 1 << 50])
def test_a_time_out_of_range_is_refused(ttl_ms: int) -> None:
    driver, sequence = continued()
    message = KeepSequence(rid=driver.rid(), sequence_id=sequence, idle_ttl_ms=ttl_ms)
    assert driver.refused(message, InvalidRequest).field == "idle_ttl_ms"
