"""Results of steps with drafts: the first token of each row, as of any row, and the accepted tokens behind it.

Such a result has some tens of tokens, and the device waits while it is applied. So rows are told apart by loops over
lists: for so few items, each of numpy's functions that are written in Python takes as long as a loop over all.
"""

from __future__ import annotations

import msgspec
import numpy as np
import numpy.typing as npt

from kvforge.protocol.errors import ProtocolError
from kvforge.protocol.messages import NO_FLOAT32, NO_INT32, StepResult

from ..cache.groups import SentStep
from ..cache.sequences import NO_SLOTS, Slots, unmarked
from ..requests.top_logprobs import TopLogprobs


class FurtherTokens(msgspec.Struct, frozen=True, eq=False):
    """The tokens of a result behind the first of each row: [n] each, in the order of their positions in each row.

    Attributes:
        slots: The slot of each.
        places: Its place among the tokens of its row, from 1.
        tops: Top log-probabilities; None if no row has any.
    """

    slots: Slots
    places: Slots
    tokens: npt.NDArray[np.int32]
    logprobs: npt.NDArray[np.float32]
    tops: TopLogprobs | None

    def of(self, rows: Slots) -> FurtherTokens:
        """Return those of the given rows."""
        kept = set(rows.tolist())
        return self._pick(np.array([at for at, slot in enumerate(self.slots.tolist()) if slot in kept], np.int64))

    def until(self, stops: npt.NDArray[np.bool_]) -> FurtherTokens:
        """Return those up to the first stop token of each row, which is among them. stops: which are stop tokens, [n].

        All tokens of each row are here.
        """
        before: npt.NDArray[np.int64] = np.cumsum(stops) - stops
        first = np.flatnonzero(self.places == 1)
        return self._pick(np.flatnonzero(before == np.repeat(before[first], np.diff(first, append=stops.size))))

    def _pick(self, picked: npt.NDArray[np.int64]) -> FurtherTokens:
        tops = None if self.tops is None else self.tops.pick(picked)
        return FurtherTokens(self.slots[picked], self.places[picked], self.tokens[picked], self.logprobs[picked], tops)


NOTHING_FURTHER = FurtherTokens(NO_SLOTS, NO_SLOTS, NO_INT32, NO_FLOAT32, None)


def split(sent: SentStep, result: StepResult, vocabulary: int) -> tuple[StepResult, FurtherTokens]:
    """Split a result into that of a step without drafts, and the tokens that follow the first of a row.

    Raises:
        ProtocolError: The result does not fit the drafts of the step.
    """
    slots, tokens = result.slots, result.tokens
    if not slots.size == tokens.size == result.logprobs.size:
        raise ProtocolError("step_result: slots, tokens and logprobs differ in length")
    tops = None
    if result.top_counts.size or result.top_tokens.size or result.top_logprobs.size:
        tops = TopLogprobs(result.top_counts, result.top_tokens, result.top_logprobs)
        tops.check(slots.size, vocabulary)
    first, listed, rest, places = _by_row(slots.tolist())
    chosen, drafts = tokens.tolist(), _drafts(sent)
    if len(set(listed)) != len(listed):
        raise ProtocolError("step_result: the tokens of a row are not together")
    for slot, start, end in zip(listed, first, [*first, slots.size][1:], strict=True):
        if (size := end - start) == 1:
            continue
        own = drafts.get(slot, [])
        if size > len(own) + 1:
            raise ProtocolError(f"step_result: {size} tokens for a row with {len(own)} drafts")
        if chosen[start : end - 1] != own[: size - 1]:
            raise ProtocolError("step_result: a token is not the draft that another one follows")
    if np.count_nonzero(tokens.view(np.uint32) >= vocabulary):
        raise ProtocolError(f"step_result: a token outside the vocabulary of {vocabulary}")
    at, others = np.array(first, np.int64), np.array(rest, np.int64)
    further = FurtherTokens(
        slots[others].astype(np.int64),
        np.array(places, np.int64),
        tokens[others],
        result.logprobs[others],
        None if tops is None else tops.pick(others),
    )
    kept = TopLogprobs(NO_INT32, NO_INT32, NO_FLOAT32) if tops is None else tops.pick(at)
    head = msgspec.structs.replace(
        result,
        slots=slots[at],
        tokens=tokens[at],
        logprobs=result.logprobs[at],
        top_counts=kept.counts,
        top_tokens=kept.tokens,
        top_logprobs=kept.logprobs,
    )
    return head, further


def _by_row(slots: list[int]) -> tuple[list[int], list[int], list[int], list[int]]:
    """Find the rows in the slots of a result's tokens, which name a row once for each of its tokens.

    Returns:
        Where the first token of each row is and the row's slot; where the other tokens are and their places in a row.
    """
    first, listed, rest, places = list[int](), list[int](), list[int](), list[int]()
    before, start = None, 0
    for at, slot in enumerate(slots):
        if slot != before:
            before, start = slot, at
            first.append(at)
            listed.append(slot)
        else:
            rest.append(at)
            places.append(at - start)
    return first, listed, rest, places


def _drafts(sent: SentStep) -> dict[int, list[int]]:
    """Return the drafts of a step by slot."""
    step, found, end = sent.message, dict[int, list[int]](), 0
    fed = unmarked(step.tokens).tolist()
    for slot, count, drafted in zip(step.slots.tolist(), step.counts.tolist(), step.drafts.tolist(), strict=True):
        end += count
        if drafted:
            found[slot] = fed[end - drafted : end]
    return found
