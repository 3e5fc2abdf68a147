"""Log-probabilities of prompts in the core: chunks, prefix hits, preemption, losses, streams and limits."""

from __future__ import annotations

from collections import deque
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest

from kvforge.coordinator.core.limits import Quota
from kvforge.coordinator.core.requests.prompt_logprobs import PromptLogprobs, ScoredTokens
from kvforge.coordinator.core.requests.top_logprobs import TopLogprobs
from kvforge.coordinator.core.scheduling import scheduler
from kvforge.coordinator.journal import snapshot
from kvforge.protocol.codec import FRAME_BYTES_MAX
from kvforge.protocol.errors import InvalidRequest
from kvforge.protocol.messages import TOP_LOGPROBS_MAX, SamplingParams, Step, Stream
from tests.coordinator.driver import Driver, Score, continuation, int32, scores_of
from tests.coordinator.journal.files import head_of

PROMPT = [3, 1, 4, 1, 5, 9, 2, 6, 5, 3, 5, 8, 9, 7, 9, 3, 2, 3, 8, 4, 6, 2, 6]
LAST = len(PROMPT) - 1


class ScoringDriver(Driver):
    """A driver that records the rows of prompts apart from the answers, and checks the order of their offsets."""

    def __init__(self, **limits: Any) -> None:
        super().__init__(**limits)
        self.prompts: dict[int, dict[int, tuple[int, Score]]] = {}

    def _stream(self, message: Stream) -> None:
        ranks = message.ranks.tolist() or [0] * message.tokens.size
        counts = message.top_counts.tolist() or [0] * message.tokens.size
        pairs = deque(zip(message.top_tokens.tolist(), message.top_logprobs.tolist(), strict=True))
        columns = (message.request_ids, message.offsets, message.tokens, message.logprobs)
        for (request, offset, token, logprob), rank, count in zip(
            zip(*(column.tolist() for column in columns), strict=True), ranks, counts, strict=True
        ):
            tops = tuple(pairs.popleft() for _ in range(count))
            assert (rank > 0) == (offset < 0), "only prompt tokens have ranks"
            if offset < 0:
                got = self.prompts.setdefault(request, {})
                assert not got or offset in (max(got) + 1, *got), "a prompt token is missing"
                got[offset] = (token, (logprob, rank, tops))
        answers = np.flatnonzero(message.offsets >= 0)
        names = ("request_ids", "offsets", "tokens", "logprobs")
        super()._stream(msgspec.structs.replace(message, **{name: getattr(message, name)[answers] for name in names}))

    def score(self, prompt: list[int] = PROMPT, width: int = 2, max_tokens: int = 0, **fields: Any) -> int:
        """Submit a request that wants the log-probabilities of its prompt."""
        return self.submit(prompt, max_tokens, sampling=SamplingParams(temperature=0, prompt_logprobs=width), **fields)

    def scored(self, request: int) -> list[tuple[int, Score]]:
        """Return the tokens and log-probabilities of a prompt that were streamed."""
        got = self.prompts.get(request, {})
        assert list(got) == sorted(got)
        return list(got.values())


def expected(prompt: list[int] = PROMPT, width: int = 2) -> list[tuple[int, Score]]:
    return list(zip(prompt[1:], scores_of(prompt, width), strict=True))


def steps_of(d: Driver) -> list[Step]:
    return [step for worker in d.workers for step in worker.steps]


@pytest.mark.parametrize("max_tokens", [0, 3])
@pytest.mark.parametrize("width", [0, 2])
@pytest.mark.parametrize("chunk", [5, 64])
def test_each_prompt_token_but_the_first_is_scored(chunk: int, width: int, max_tokens: int) -> None:
    d = ScoringDriver(step_tokens_max=chunk)
    d.add_worker(16)
    request = d.score(width=width, max_tokens=max_tokens)
    d.run_until_idle()
    assert d.scored(request) == expected(width=width)
    assert d.answer_of(request) == continuation(PROMPT, max_tokens)
    ended = d.ended[request]
    assert (ended.reason, ended.generated_tokens) == ("length", max_tokens)
    assert not d.machine.cache.sequences.running.any() and d.free_or_cached() == 16


def test_a_prompt_of_one_token_has_nothing_to_score() -> None:
    d = ScoringDriver()
    d.add_worker(4)
    request = d.score([7])
    d.run_until_idle()
    assert d.scored(request) == [] and d.ended[request].reason == "length"


def test_a_request_that_only_scores_may_fill_the_context_and_samples_nothing() -> None:
    d = ScoringDriver()
    d.add_worker(64)
    limits = d.machine.limits
    prompt = [1 + i % 7 for i in range(limits.context_tokens_max)]
    request = d.score(prompt)
    d.refused(d.submit_message(prompt, 1), InvalidRequest)
    d.run_until_idle()
    assert d.scored(request) == expected(prompt)
    assert not any(step.samples.any() for step in steps_of(d))


@pytest.mark.parametrize("beside", [False, True])
def test_a_request_that_only_scores_may_fill_its_tenants_ceiling(beside: bool) -> None:
    """It needs no room for a first token."""
    d = ScoringDriver(quotas={"ant": Quota(floor=0, ceiling=2)})
    d.add_worker(2 if not beside else 16)
    if beside:
        d.submit(PROMPT, 8)
    request = d.score(PROMPT[:8], tenant="ant")
    d.run_until_idle()
    assert d.scored(request) == expected(PROMPT[:8])


def test_cached_blocks_are_not_shared_for_positions_without_a_log_probability() -> None:
    d = ScoringDriver()
    d.add_worker(32)
    d.submit(PROMPT, 2)
    d.run_until_idle()
    scored, plain = d.score(max_tokens=1), d.submit(PROMPT, 1)
    d.run_until_idle()
    assert d.scored(scored) == expected()
    assert d.request(scored).cached_tokens == 0
    assert d.request(plain).cached_tokens > 0


def test_others_share_the_blocks_of_a_scored_prompt() -> None:
    d = ScoringDriver()
    d.add_worker(32)
    d.score()
    d.run_until_idle()
    request = d.submit(PROMPT, 1)
    d.run_until_idle()
    assert d.request(request).cached_tokens > 0


def test_known_log_probabilities_survive_the_loss_of_a_worker() -> None:
    """What was scored is neither computed nor streamed again where its blocks are cached."""
    d = ScoringDriver(step_tokens_max=8)
    first = d.add_worker(16)
    request = d.score(max_tokens=2)
    d.step()
    d.turn()
    assert 0 < len(d.scored(request)) < LAST
    d.lose(first)
    second = d.add_worker(16)
    d.run_until_idle()
    assert d.scored(request) == expected()
    assert sum(step.scored.size for step in second.steps) < LAST
    assert d.answer_of(request) == continuation(PROMPT, 2)


def test_a_moved_request_shares_blocks_only_up_to_what_is_known() -> None:
    """The other pool has the whole prompt, but the log-probabilities of its end are still to be computed."""
    d = ScoringDriver(step_tokens_max=8)
    second = d.add_worker(16)
    d.submit(PROMPT, 1)
    d.run_until_idle()
    before = len(second.steps)
    first = d.add_worker(32)
    request = d.score(max_tokens=1)
    d.step()
    assert first.steps and len(second.steps) == before
    d.turn()
    known = len(d.scored(request))
    assert 0 < known < LAST
    d.lose(first)
    d.run_until_idle()
    assert d.scored(request) == expected()
    (start,) = second.steps[before].starts.tolist()
    assert 0 < start <= known, "cached blocks with known log-probabilities are shared"


def test_rows_of_one_step_are_distinguished() -> None:
    d = ScoringDriver(step_tokens_max=24)
    d.add_worker(64)
    requests = [d.score([*PROMPT[i:], i], width=i % 3, max_tokens=i % 2) for i in range(4)]
    plain = d.submit(PROMPT, 5)
    d.run_until_idle()
    for i, request in enumerate(requests):
        assert d.scored(request) == expected([*PROMPT[i:], i], i % 3)
    assert d.answer_of(plain) == continuation(PROMPT, 5)


def test_a_failed_row_leaves_the_others_their_log_probabilities() -> None:
    d = ScoringDriver(step_tokens_max=64)
    worker = d.add_worker(64)
    worker.poison = {42}
    bad, good = d.score([1, 2, 42, 3]), d.score(PROMPT)
    d.run_until_idle()
    assert d.ended[bad].reason == "failed" and not d.scored(bad)
    assert d.scored(good) == expected()


def test_a_step_with_failed_rows_alone_has_nothing_to_record() -> None:
    d = ScoringDriver()
    d.add_worker(64).poison = {42}
    bad = d.score([1, 42, 3])
    d.run_until_idle()
    assert d.ended[bad].reason == "failed" and not d.scored(bad)


def test_a_reader_behind_the_prompt_gets_nothing_of_it() -> None:
    d = ScoringDriver(step_tokens_max=8)
    d.add_worker(16)
    request = d.score(max_tokens=2)
    d.step()
    d.turn()
    before = d.scored(request)
    assert 0 < len(before) < LAST
    d.attach(request, client=2)
    d.run_until_idle()
    assert d.scored(request) == before
    assert list(d.tokens_read(2, request).values()) == continuation(PROMPT, 2)


def test_an_offset_before_which_log_probabilities_are_due_is_refused() -> None:
    d = ScoringDriver(step_tokens_max=8)
    d.add_worker(16)
    request = d.score(max_tokens=2)
    d.step()
    d.turn()
    known = len(d.scored(request)) - LAST
    d.refused(d.attach_message(request, known + 1), InvalidRequest)
    assert d.ask(d.attach_message(request, known)).offset == known


def test_only_the_first_answer_scores_the_prompt() -> None:
    d = ScoringDriver()
    d.add_worker(64)
    first = d.score(max_tokens=2, count=3)
    d.run_until_idle()
    assert d.scored(first) == expected()
    assert d.scored(first + 1) == d.scored(first + 2) == []
    assert sum(step.scored.size for step in steps_of(d)) == LAST


def test_without_a_stream_they_come_before_the_answer() -> None:
    d = ScoringDriver(step_tokens_max=8)
    d.add_worker(16)
    request = d.score(max_tokens=2, stream=False)
    d._due[1, request] = 0
    d.run_until_idle()
    assert d.scored(request) == expected()


def test_a_slow_client_resumes_in_the_middle_of_a_prompt() -> None:
    d = ScoringDriver(step_tokens_max=8)
    d.add_worker(16)
    request = d.score(max_tokens=2)
    d.step()
    d.turn()
    known = len(d.scored(request))
    assert 0 < known < LAST
    d.full.add(1)
    d.step()
    d.turn()
    d.full.clear()
    d.turn()
    assert (1, "paused", request) in d.notices
    d.ask(d.attach_message(request, known - LAST))
    d._due[1, request] = 0
    d.run_until_idle()
    assert d.scored(request) == expected()


def test_an_ended_request_is_read_again_from_its_prompt() -> None:
    d = ScoringDriver()
    d.add_worker(16)
    request = d.score(max_tokens=1)
    d.run_until_idle()
    before = d.prompts.pop(request)
    d.ask(d.attach_message(request, -LAST), client=2)
    d._due[2, request] = 0
    d.turn()
    assert d.prompts[request] == before
    error = d.refused(d.attach_message(request, -LAST - 1), InvalidRequest)
    assert "must be -22 to 1" in str(error)


def test_a_repeated_key_gives_the_prompt_again() -> None:
    d = ScoringDriver()
    d.add_worker(16)
    request = d.score(key="once")
    d.run_until_idle()
    del d.prompts[request]
    again = d.score(key="once")
    d.turn()
    assert again == request and d.scored(request) == expected()


def test_a_snapshot_keeps_what_is_known(tmp_path: Path) -> None:
    d = ScoringDriver(step_tokens_max=8)
    d.add_worker(16)
    request = d.score(max_tokens=1)
    d.score(PROMPT[::-1], width=0)
    d.step()
    path = tmp_path / "state-0000000000000001"
    snapshot.write(path, d.machine, head_of(1))
    machine = snapshot.Snapshot(path).machine()
    machine.check_invariants()
    mine, kept = d.machine.requests.live[request].prompt_logprobs, machine.requests.live[request].prompt_logprobs
    assert mine is not None and kept is not None and 0 < kept.size == mine.size < LAST
    assert kept.known()[1].logprobs.tolist() == mine.known()[1].logprobs.tolist()
    assert machine.admission.rows.scores_count == 2


@pytest.mark.parametrize(
    ("fields", "named"),
    [
        ({"sampling": SamplingParams(prompt_logprobs=21)}, "sampling.prompt_logprobs"),
        ({"sampling": SamplingParams(prompt_logprobs=-1)}, "sampling.prompt_logprobs"),
        ({"sampling": SamplingParams(), "max_tokens": 0}, "max_tokens"),
        ({"sampling": SamplingParams(prompt_logprobs=0), "max_tokens": -1}, "max_tokens"),
        ({"sampling": SamplingParams(prompt_logprobs=0), "max_tokens": 0, "count": 2}, "count"),
    ],
)
def test_what_is_refused(fields: dict[str, Any], named: str) -> None:
    d = Driver()
    d.add_worker(16)
    assert d.refused(d.submit_message(PROMPT, **{"max_tokens": 4, **fields}), InvalidRequest).fields["field"] == named


def test_a_kept_sequence_is_not_scored() -> None:
    d = Driver()
    d.add_worker(16)
    message = d.submit_message(PROMPT, sequence_id=d.create([1, 2]), sampling=SamplingParams(prompt_logprobs=1))
    assert "sequence" in str(d.refused(message, InvalidRequest))


@pytest.mark.parametrize(
    "wrong",
    [
        {"prompt_logprobs": np.zeros(3, np.float32)},
        {"prompt_logprobs": np.full(LAST, np.nan, np.float32)},
        {"prompt_ranks": np.zeros(LAST, np.int32)},
        {"prompt_ranks": np.full(LAST, 1 << 20, np.int32)},
        {"prompt_top_counts": np.full(LAST, 3, np.int32)},
        {"prompt_top_tokens": np.full(2 * LAST, -1, np.int32)},
        {"prompt_top_logprobs": np.zeros(1, np.float32)},
    ],
)
def test_impossible_values_end_the_workers_connection(wrong: dict[str, Any]) -> None:
    d = ScoringDriver()
    worker = d.add_worker(16)
    d.score()
    d.turn()
    d.report(worker, msgspec.structs.replace(worker.execute(worker.inbox.popleft()), **wrong))
    assert "prompt_" in worker.dropped or "top" in worker.dropped


def test_values_that_were_not_asked_for_end_the_workers_connection() -> None:
    d = ScoringDriver()
    worker = d.add_worker(16)
    d.submit(PROMPT)
    d.turn()
    result = worker.execute(worker.inbox.popleft())
    d.report(worker, msgspec.structs.replace(result, prompt_logprobs=np.zeros(1, np.float32), prompt_ranks=int32([1])))
    assert "prompt_logprobs" in worker.dropped


def test_a_step_scores_a_bounded_number_of_tokens(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(scheduler, "SCORED_TOKENS_MAX", 5)
    d = ScoringDriver(step_tokens_max=32)
    d.add_worker(64)
    requests = [d.score(), d.score(PROMPT[::-1])]
    d.run_until_idle()
    assert max(step.scored.size for step in steps_of(d)) == 5
    assert [d.scored(request) for request in requests] == [expected(), expected(PROMPT[::-1])]


def test_the_largest_result_fits_a_message() -> None:
    each = 3 * 4 + TOP_LOGPROBS_MAX * 8  # log-probability, rank, number of top tokens, and these
    assert scheduler.SCORED_TOKENS_MAX * each <= FRAME_BYTES_MAX // 16


def test_a_record_grows_with_what_is_known() -> None:
    record = PromptLogprobs(int32([0] * 1000), 2)
    assert record.bytes == 4000
    for count in (1, 5, 200, 793):
        tops = TopLogprobs(np.full(count, 2, np.int32), int32(range(2 * count)), np.zeros(2 * count, np.float32))
        record.add(ScoredTokens(np.full(count, -count, np.float32), np.full(count, count, np.int32), tops))
    tokens, known = record.known(3)
    assert tokens.size == 996 and known.ranks[[0, 2, 3, 202, 203]].tolist() == [5, 5, 200, 200, 793]
    assert known.tops.tokens[:4].tolist() == [4, 5, 6, 7]
