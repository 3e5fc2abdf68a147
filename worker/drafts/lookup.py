"""Drafts by lookup: what followed the last tokens of a request when they occurred before.

Answers that repeat their prompt (edits, code, extraction, tool calls) are drafted well, without a model, and so are
answers that repeat those of recent requests of the same tenant. `history` has the search, `recent` the other requests.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np

from kvforge.protocol.messages import Int32Array

from .drafter import NO_ENDS, DrafterCosts, Proposals, RowEnds
from .history import TOGETHER_MIN, TOKEN_BYTES, History
from .recent import RECENT_BYTES_MAX, RecentHistories

HOST_BYTES_MAX = 1 << 30  # of the histories of slots: 32,768 tokens for each of 1,024
HISTORY_MIN, HISTORY_MAX = 1024, 65_536  # tokens that a slot remembers
# Tokens that one proposal indexes at most, in half a ms of the host: the next step of a GPU waits for that. A long
# prompt has many more, and so have rows that begin together or come from steps that were too large for drafts. Most are
# indexed before, while the device computes, in pieces.
INDEXED_MAX, PIECE = 2000, 1000
NO_HISTORY: tuple[int, History | None] = (0, None)


class LookupDrafter:
    """Looks up the last tokens of each slot in its own history and in recent ones; see `drafter.Drafter`.

    Args:
        slots_max: Slots are [0, slots_max).
        context_tokens_max: Longest request, in tokens.
    """

    def __init__(self, slots_max: int, context_tokens_max: int = HISTORY_MAX) -> None:
        share = min(HISTORY_MAX, HOST_BYTES_MAX // (TOKEN_BYTES * slots_max))
        self.tokens_max = max(HISTORY_MIN, 1 << (share.bit_length() - 1))
        while self.tokens_max // 2 >= max(HISTORY_MIN, context_tokens_max):
            self.tokens_max //= 2
        self._slots_max = slots_max
        self._of: dict[int, tuple[int, History]] = {}
        self._recent = RecentHistories()

    @property
    def costs(self) -> DrafterCosts:
        """What it costs."""
        note = "no model: 4 to 8 us of the host for each generated token, and 0.2 us for each token of a prompt"
        return DrafterCosts(self._slots_max * self.tokens_max * TOKEN_BYTES + RECENT_BYTES_MAX, note=note)

    @property
    def bytes(self) -> int:
        """Host memory in use."""
        return sum(history.bytes for _, history in self._of.values()) + self._recent.bytes

    def remembered(self, slot: int) -> list[int]:
        """Return the tokens that a slot remembers."""
        _, history = self._of.get(slot, NO_HISTORY)
        return [] if history is None else history.remembered()

    def begin(self, slot: int, prompt: Int32Array, generated: Int32Array, most: int, shared: int = 0) -> None:
        """Assign a slot to a new request; see `Drafter.begin`."""
        if slot in self._of:
            self._recent.end(*self._of.pop(slot))
        if most > 0:
            history = History(np.concatenate([prompt, generated]), self.tokens_max, most)
            self._of[slot] = shared, history
            self._recent.add(shared, history)

    def append(self, slot: int, tokens: Sequence[int]) -> None:
        """Add tokens to the answer of a slot; see `Drafter.append`."""
        if slot in self._of:
            self._of[slot][1].extend(tokens)

    def prepare(self, slots: Sequence[int], is_late: Callable[[], bool]) -> None:
        """Index tokens that wait; see `Drafter.prepare`."""
        for history in self._searched(slots):
            while history.waiting and not is_late():
                history.catch_up(PIECE)

    def propose(self, slots: Sequence[int], ends: RowEnds = NO_ENDS, asked: int = 0) -> Proposals:  # noqa: ARG002
        """Propose the next tokens of each of the slots; see `Drafter.propose`."""
        return Proposals.of(self.found(slots))

    def found(self, slots: Sequence[int], run_min: int = 0) -> dict[int, list[int]]:
        """Return the proposed tokens of each of the slots that have some.

        A history that is not indexed in time, because those before it took the time, proposes nothing yet.

        Args:
            slots: The slots.
            run_min: The fewest last tokens that must have occurred before.
        """
        drafts: dict[int, list[int]] = {}
        self._catch_up(slots)
        for slot in slots:
            shared, history = self._of.get(slot, NO_HISTORY)
            if history is not None and not history.waiting:
                drafts[slot] = history.following(self._recent.newest(shared) if shared else (), run_min)
        return {slot: tokens for slot, tokens in drafts.items() if tokens}

    def _catch_up(self, slots: Sequence[int]) -> None:
        """Index the tokens that wait of the histories that are searched for the slots, up to a limit."""
        histories, left = self._searched(slots), INDEXED_MAX
        for history in histories:
            if 0 < history.waiting < TOGETHER_MIN:
                left -= history.catch_up(TOGETHER_MIN)
        for history in histories:
            while left > 0 and history.waiting:
                left -= history.catch_up(left)

    def _searched(self, slots: Sequence[int]) -> list[History]:
        """Return the histories with tokens that wait: of the slots, and those in which these are looked up."""
        own = [of for slot in slots if (of := self._of.get(slot)) is not None and of[1].waiting]
        numbers = {shared for shared, _ in own if shared}
        others = [each for number in numbers for each in self._recent.newest(number) if each.waiting]
        return [*(history for _, history in own), *others]

    def forget(self) -> None:
        """Forget every slot and every request that has ended."""
        self._of.clear()
        self._recent.forget()
