"""A request preempted at any position gives the same tokens as alone, whatever its sampling parameters."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest

from kvforge.protocol.messages import RowStart, SamplingParams
from kvforge.worker.loading.model import LoadedModel
from tests.worker.step.test_runner import BLOCK_SIZE, PROMPTS, Bench, i4

COUNT = 10
SAMPLINGS = {
    "greedy": SamplingParams(temperature=0.0),
    "random": SamplingParams(temperature=1.2),
    "filtered": SamplingParams(temperature=1.1, top_k=30, top_p=0.9, min_p=0.01),
    "penalties": SamplingParams(temperature=0.0, repetition_penalty=1.4, presence_penalty=0.5, frequency_penalty=0.7),
    "everything": SamplingParams(
        temperature=1.3,
        top_k=40,
        top_p=0.95,
        repetition_penalty=1.2,
        frequency_penalty=1.5,
        logit_bias=((4, 3.0), (9, -5.0)),
        logprobs=5,
    ),
}


def start(slot: int, sampling: SamplingParams, prompt: list[int], answer: list[int]) -> tuple[RowStart, list[int]]:
    """Return the start and history of a row as the coordinator sends them."""
    counts = sampling.counts_answer
    begin = RowStart(
        slot=slot,
        request_id=1,
        sampling=sampling,
        seed=2**63 + 5,
        generated=len(answer),
        prompt_history=len(prompt) if counts else 0,
        generated_history=len(answer) if counts else 0,
    )
    return begin, [*prompt, *answer] if counts else []


@pytest.mark.parametrize("sampling", SAMPLINGS.values(), ids=SAMPLINGS)
def test_preempted_at_every_position(sampling: SamplingParams, tiny: Callable[..., LoadedModel]) -> None:
    bench, prompt = Bench(tiny("llama", block_size=BLOCK_SIZE)), PROMPTS[3]
    begin, history = start(0, sampling, prompt, [])
    outcome = bench.run([(0, 0, prompt, 1)], begins=(begin,), history=i4(*history))
    whole, tops = outcome.tokens.tolist(), [outcome.top_tokens.tolist()]
    for index in range(COUNT - 1):
        outcome = bench.run([(0, len(prompt) + index, [-1], 1)])
        whole += outcome.tokens.tolist()
        tops.append(outcome.top_tokens.tolist())
    assert [len(top) for top in tops] == [sampling.logprobs] * COUNT
    other = SAMPLINGS["everything"]
    for done in range(COUNT):  # preempted after `done` tokens; comes back to another slot, in another batch
        slot = 1 + done % 6
        begin, history = start(slot, sampling, prompt, whole[:done])
        neighbour, beside = start(7, other, PROMPTS[0], [])
        rows = [(7, 0, PROMPTS[0], 1), (slot, 0, prompt + whole[:done], 1)]
        outcome = bench.run(rows, begins=(neighbour, begin), history=i4(*beside, *history))
        assert outcome.errors == ()
        got = [int(outcome.tokens[1])]
        for index in range(COUNT - 1 - done):
            rows = [(slot, len(prompt) + done + index, [-1], 1), (7, len(PROMPTS[0]) + index, [-1], 1)]
            got.append(int(bench.run(rows).tokens[0]))
        assert got == whole[done:], f"after {done} tokens"


def test_penalties_without_their_history_would_differ(tiny: Callable[..., LoadedModel]) -> None:
    """Shows that the test above can fail."""
    bench, prompt, sampling = Bench(tiny("llama", block_size=BLOCK_SIZE)), PROMPTS[3], SAMPLINGS["penalties"]
    begin, history = start(0, sampling, prompt, [])
    whole = bench.run([(0, 0, prompt, 1)], begins=(begin,), history=i4(*history)).tokens.tolist()
    for index in range(COUNT - 1):
        whole += bench.run([(0, len(prompt) + index, [-1], 1)]).tokens.tolist()
    plain = bench.generate(1, prompt, COUNT)
    assert plain != whole
    bare = RowStart(slot=2, request_id=1, sampling=sampling, seed=2**63 + 5, generated=5)
    got = bench.run([(2, 0, prompt + whole[:5], 1)], begins=(bare,)).tokens.tolist()
    for index in range(4):
        got += bench.run([(2, len(prompt) + 5 + index, [-1], 1)]).tokens.tolist()
    assert got != whole[5:]


def test_a_banned_vocabulary_and_wrong_starts_fail_their_rows(tiny: Callable[..., LoadedModel]) -> None:
    bench = Bench(tiny("llama", block_size=BLOCK_SIZE))
    banned = SamplingParams(logit_bias=tuple((token, -np.inf) for token in range(97)))
    wrong = {
        "sampling.top_p": SamplingParams(top_p=0.0),
        "sampling.logit_bias": SamplingParams(logit_bias=((97, 1.0),)),
        "sampling.logprobs": SamplingParams(logprobs=21),
    }
    begins = [RowStart(slot=0, request_id=1, sampling=banned, seed=1)]
    begins += [RowStart(slot=i, request_id=1, sampling=s, seed=1) for i, s in enumerate(wrong.values(), 1)]
    outcome = bench.run(
        [(0, 0, [1, 2], 1), (1, 0, [1], 1), (4, 0, [3], 1)], begins=(*begins, start(4, SamplingParams(), [], [])[0])
    )
    errors = {error.slot: error.error for error in outcome.errors}
    assert outcome.slots.tolist() == [4]
    assert (errors[0].code, errors[0].fields["field"]) == ("invalid_request", "sampling.logit_bias")
    assert [errors[slot].fields["field"] for slot in (1, 2, 3)] == list(wrong)
    later = bench.run([(2, 0, [1], 1), (4, 1, [-1], 1)])  # its start came a step before its first row
    assert [(error.slot, error.error.fields["field"]) for error in later.errors] == [(2, "sampling.logit_bias")]
    good = RowStart(slot=2, request_id=1, sampling=SamplingParams(), seed=1)
    assert bench.run([(2, 0, [1], 1)], begins=(good,)).errors == ()


def test_a_history_that_does_not_add_up_is_malformed(tiny: Callable[..., LoadedModel]) -> None:
    bench = Bench(tiny("llama", block_size=BLOCK_SIZE))
    sampling = SamplingParams(presence_penalty=1.0)
    for history, counts in ((i4(1, 2), (0, 1)), (i4(1), (2, -1)), (i4(97), (0, 1))):
        begin = RowStart(
            slot=0, request_id=1, sampling=sampling, seed=1, prompt_history=counts[0], generated_history=counts[1]
        )
        outcome = bench.run([(0, 0, [1], 1)], begins=(begin,), history=history)
        assert [error.error.fields["field"] for error in outcome.errors] == ["history"]
