"""Drafts by a model: greedy tokens of a draft model, for the slots where lookup finds no long run.

The draft model computes the K and V of the tokens since its last proposal, and then one drafted token of all rows in
one pass. The time of the first part counts as that of the proposal. Answers that repeat themselves are drafted by
lookup, which takes no pass, as long as its tokens are right: the coordinator learns one chance for the drafts of a
request, and wrong ones of lookup would hide that the model's are right. The coordinator decides when the model
proposes, and how many tokens (`Step.propose`).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

from kvforge.protocol.messages import Int32Array

from .drafter import NO_ENDS, DrafterCosts, Proposals, RowEnds
from .history import LENGTHS
from .lookup import LookupDrafter

LOOKUP_RIGHT = 0.4  # of the tokens that lookup names next; below, its drafts are not proposed
LOOKUP_FIRST = 0.5  # what is expected of a new request
AVERAGED = 4  # the averaging window, in tokens


@dataclass(frozen=True)
class DraftRow:
    """A row that a draft model continues.

    Attributes:
        slot: Its slot.
        token: Its last token.
        position: The position of this token.
        table: [blocks] int32, its blocks, pool-local.
        count: How many tokens to draft, 1 or more.
    """

    slot: int
    token: int
    position: int
    table: Int32Array
    count: int


class DraftModel(Protocol):
    """Computes the greedy continuation of rows.

    Attributes:
        device_bytes: Device memory of its weights and of its K and V.
        block_bytes: Bytes of its K and V in each block, and of hidden states that it reads.
        name: The name of the model, for people.
        rows_max: The most rows of a call.
        tokens_max: The most tokens of a row.
        context_tokens_max: The longest row, in tokens.
        took_ns: What the passes of the last call took, in nanoseconds.
    """

    device_bytes: int
    block_bytes: int
    name: str
    rows_max: int
    tokens_max: int
    context_tokens_max: int
    took_ns: int

    def continue_rows(self, rows: Sequence[DraftRow]) -> list[list[int]]:
        """Return `DraftRow.count` tokens of each row, or none if it is far behind; no rows if the device failed."""


class ModelDrafter:
    """Proposes by lookup and by a draft model; see `drafter.Drafter`.

    Args:
        lookup: Looks up runs of the last tokens.
        model: The draft model.
    """

    def __init__(self, lookup: LookupDrafter, model: DraftModel) -> None:
        self.lookup, self._model = lookup, model
        self._most: dict[int, int] = {}  # by slot
        self._looked: dict[int, int] = {}  # by slot: the next token by lookup, proposed or not
        self._right: dict[int, float] = {}  # by slot: how often such a token was right, averaged

    @property
    def costs(self) -> DrafterCosts:
        """What it costs."""
        lookup, model = self.lookup.costs, self._model
        note = f"a pass of {model.name} for each proposed token, for all rows together; lookup: {lookup.note}"
        return DrafterCosts(lookup.host_bytes_max, model.device_bytes, model.block_bytes, model.tokens_max, note)

    def begin(self, slot: int, prompt: Int32Array, generated: Int32Array, most: int, shared: int = 0) -> None:
        """Assign a slot to a new request; see `Drafter.begin`."""
        self.lookup.begin(slot, prompt, generated, most, shared)
        self._most[slot] = most
        self._looked.pop(slot, None)
        self._right[slot] = LOOKUP_FIRST

    def append(self, slot: int, tokens: Sequence[int]) -> None:
        """Add tokens to the answer of a slot; see `Drafter.append`."""
        self.lookup.append(slot, tokens)
        if tokens and (named := self._looked.pop(slot, None)) is not None:
            self._right[slot] += ((named == tokens[0]) - self._right[slot]) / AVERAGED

    def prepare(self, slots: Sequence[int], is_late: Callable[[], bool]) -> None:
        """Let lookup prepare; see `Drafter.prepare`."""
        self.lookup.prepare(slots, is_late)

    def propose(self, slots: Sequence[int], ends: RowEnds = NO_ENDS, asked: int = 0) -> Proposals:
        """Propose the next tokens of each of the slots; see `Drafter.propose`."""
        found, by_model, took_us = self._looked_up(slots, LENGTHS[0]), dict[int, list[int]](), 0
        rows = {slot: row for slot in slots if slot not in found and (row := self._row(slot, ends, asked)) is not None}
        if 0 < len(rows) <= self._model.rows_max:
            by_model = dict(zip(rows, self._model.continue_rows(list(rows.values())), strict=False))
            took_us = self._model.took_ns // 1000
        left = [slot for slot in slots if slot not in found and not by_model.get(slot)]
        return Proposals.of(found | self._looked_up(left) if left else found, by_model, took_us)

    def _looked_up(self, slots: Sequence[int], run_min: int = 0) -> dict[int, list[int]]:
        """Return what lookup proposes for slots where it is right; note what it names next for all."""
        found = self.lookup.found(slots, run_min)
        self._looked |= {slot: tokens[0] for slot, tokens in found.items()}
        return {slot: tokens for slot, tokens in found.items() if self._right[slot] >= LOOKUP_RIGHT}

    def _row(self, slot: int, ends: RowEnds, asked: int) -> DraftRow | None:
        """Return the row of a slot that the model can continue; None for another."""
        if slot not in ends:
            return None
        end = ends[slot]
        room = self._model.context_tokens_max - end.position
        count = min(self._most.get(slot, 0), asked, self._model.tokens_max, room)
        return DraftRow(slot, end.token, end.position, end.table, count) if count > 0 else None

    def remembered(self, slot: int) -> list[int]:
        """Return the tokens that a slot remembers for lookups."""
        return self.lookup.remembered(slot)

    def forget(self) -> None:
        """Forget every slot and every request that has ended."""
        self.lookup.forget()
        for of_slots in (self._most, self._looked, self._right):
            of_slots.clear()
