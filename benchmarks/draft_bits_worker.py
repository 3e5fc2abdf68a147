"""A worker that drafts with each result and is right with a chosen chance, for `benchmarks.draft_bits`.

    python -m benchmarks.draft_bits_worker ANSWERS.npy CHANCE MOST [--plant] --config FILE.toml

A request with the seed FIRST_SEED + n has row n of the answers, [n, tokens] int64, which a service without drafts gave.
Each token that a draft model or a head proposes is the recorded one with the chance CHANCE, and else a wrong one; their
passes run all the same. Without a draft model the same tokens are proposed where lookup finds nothing. The sampler is
that of the product.

A proposal has 1 to MOST tokens. All steps report no time, so that the coordinator verifies whatever is proposed.
--plant: a wrong draft is accepted now and then.
"""

from __future__ import annotations

import dataclasses
import sys
from collections.abc import Callable
from itertools import count
from typing import Any

import numpy as np

import kvforge.worker.__main__ as worker_main

from .drafts_worker import FIRST_SEED, replay_drafts

PLANTED_EVERY = 10  # verifications of several requests' drafts


def draft_always(most: int) -> None:
    """Make every worker of this process draft with each result, 1 to `most` tokens."""
    from kvforge.worker.drafts.drafter import NO_ENDS, Proposals, RowEnds
    from kvforge.worker.drafts.model import ModelDrafter
    from kvforge.worker.step.pending import PendingStep, StepOutcome
    from kvforge.worker.step.runner import ModelRunner

    finish: Callable[[ModelRunner, PendingStep], StepOutcome] = ModelRunner.finish
    propose: Callable[..., Proposals] = ModelDrafter.propose
    drawn = np.random.default_rng(0)

    def finish_at_once(self: ModelRunner, pending: PendingStep) -> StepOutcome:
        return dataclasses.replace(finish(self, pending), duration_us=0)

    def propose_some(self: ModelDrafter, slots: Any, ends: RowEnds = NO_ENDS, asked: int = 0) -> Proposals:
        return propose(self, slots, ends, min(asked, int(drawn.integers(1, most, endpoint=True))))

    ModelRunner.finish = finish_at_once  # type: ignore[method-assign]
    ModelDrafter.propose = propose_some  # type: ignore[method-assign]


def replay_lookup(answers: np.ndarray[Any, np.dtype[np.int64]], chance: float, most: int) -> None:
    """Propose recorded tokens where lookup, without a draft model beside it, finds nothing.

    Args:
        answers: [n, tokens] int64.
        chance: That a token is the recorded one, 0 to 1.
        most: The most tokens of a proposal.
    """
    from kvforge.worker.drafts.drafter import NO_ENDS, Proposals, RowEnds
    from kvforge.worker.drafts.lookup import LookupDrafter
    from kvforge.worker.step.row_starter import RowStarter

    numbers, generated, limits = dict[int, int](), dict[int, int](), dict[int, int]()  # by slot
    remember: Callable[..., None] = LookupDrafter.begin
    begin: Callable[..., None] = RowStarter.begin
    append: Callable[..., None] = LookupDrafter.append
    drawn = np.random.default_rng(0)

    def begin_noted(self: RowStarter, begins: Any, *rest: Any) -> None:
        numbers.update((start.slot, start.seed - FIRST_SEED) for start in begins)
        generated.update((start.slot, start.generated) for start in begins)
        begin(self, begins, *rest)

    def remember_noted(self: LookupDrafter, slot: int, prompt: Any, written: Any, limit: int, *rest: Any) -> None:
        limits[slot] = min(limit, most)
        remember(self, slot, prompt, written, limit, *rest)

    def append_noted(self: LookupDrafter, slot: int, tokens: Any) -> None:
        generated[slot] = generated.get(slot, 0) + len(tokens)
        append(self, slot, tokens)

    def proposed(number: int, slot: int) -> list[int]:
        at = generated[slot]
        recorded = answers[number, at : at + int(drawn.integers(1, limits[slot], endpoint=True))]
        right = drawn.random(len(recorded)) < chance
        return [int(token) if is_right else int(token == 0) for token, is_right in zip(recorded, right, strict=True)]

    def propose(
        self: LookupDrafter,
        slots: Any,
        ends: RowEnds = NO_ENDS,  # noqa: ARG001
        asked: int = 0,  # noqa: ARG001
    ) -> Proposals:
        found = self.found(slots)
        for slot in slots:
            number = numbers.get(slot, -1)
            if (
                slot not in found
                and 0 <= number < len(answers)
                and limits.get(slot)
                and (its := proposed(number, slot))
            ):
                found[slot] = its
        return Proposals.of(found)

    RowStarter.begin = begin_noted  # type: ignore[method-assign,assignment]
    LookupDrafter.begin = remember_noted  # type: ignore[method-assign,assignment]
    LookupDrafter.append = append_noted  # type: ignore[method-assign]
    LookupDrafter.propose = propose  # type: ignore[method-assign]


def accept_wrong() -> None:
    """Take a wrong draft for the sampled token now and then, so that it is accepted and reported."""
    from kvforge.protocol.messages import Int32Array
    from kvforge.worker.sampling.ahead import AheadRows, BoolArray

    accepted, number = AheadRows.accepted, count(1)

    def accepted_too(self: AheadRows, tokens: Int32Array, good: BoolArray) -> BoolArray:
        found = accepted(self, tokens, good)
        wrong = np.flatnonzero(~found[1:] & found[:-1] & (tokens[:-1] != self.tokens[1:]) & (self.offsets[1:] > 0))
        if len(wrong) and next(number) % PLANTED_EVERY == 0:
            tokens[wrong[0]] = self.tokens[wrong[0] + 1]
            return accepted(self, tokens, good)
        return found

    AheadRows.accepted = accepted_too  # type: ignore[method-assign]


def main() -> int:
    """Run the worker."""
    answers, chance, most = np.load(sys.argv[1]), float(sys.argv[2]), int(sys.argv[3])
    planted = sys.argv[4] == "--plant"
    names = vars(worker_main)
    keep_all = names["keep_all"]

    def imported() -> None:
        # The worker has chosen its cores and imported torch.
        draft_always(most)
        replay_lookup(answers, chance, most)
        replay_drafts(answers, chance)
        if planted:
            accept_wrong()
        keep_all()

    names["keep_all"] = imported
    return worker_main.main(sys.argv[5 if planted else 4 :])


if __name__ == "__main__":
    worker_main.leave(main())
