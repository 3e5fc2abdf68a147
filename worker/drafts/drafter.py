"""The interface of drafters, and what each costs."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain
from types import MappingProxyType
from typing import Protocol

import numpy as np

from kvforge.protocol.messages import NO_INT32, Int32Array


@dataclass(frozen=True)
class DrafterCosts:
    """What a drafter costs, beside the rows of the step that verifies its drafts.

    Attributes:
        host_bytes_max: The most host memory that it takes.
        device_bytes: Device memory of its weights, and of what it stores in blocks.
        block_bytes: Bytes of each block for what it stores there.
        passes: Passes of a model for one proposal; 0: it needs none, and a wrong draft costs its row alone.
        note: For people: time, and what it grows with.
    """

    host_bytes_max: int
    device_bytes: int = 0
    block_bytes: int = 0
    passes: int = 0
    note: str = ""


@dataclass(frozen=True)
class Proposals:
    """Drafts for the next step of some slots.

    Attributes:
        slots: [n] int32, slots with at least one drafted token.
        counts: [n] int32, drafted tokens of each, 1 or more.
        tokens: [sum(counts)] int32, slot after slot.
        model_rows: How many of the slots, the first ones, have drafts of a model.
        took_us: How long that model took.
    """

    slots: Int32Array
    counts: Int32Array
    tokens: Int32Array
    model_rows: int = 0
    took_us: int = 0

    @classmethod
    def of(
        cls, drafts: Mapping[int, list[int]], by_model: Mapping[int, list[int]] = MappingProxyType({}), took_us: int = 0
    ) -> Proposals:
        """Return drafts as arrays, without slots that have none.

        Args:
            drafts: The drafts by slot.
            by_model: Those of a model, of other slots.
            took_us: How long the model took.
        """
        modelled = {slot: tokens for slot, tokens in by_model.items() if tokens}
        found = modelled | {slot: tokens for slot, tokens in drafts.items() if tokens}
        if not found:
            return NO_PROPOSALS
        counts = np.fromiter(map(len, found.values()), np.int32, len(found))
        tokens = np.fromiter(chain.from_iterable(found.values()), np.int32, int(counts.sum()))
        return cls(np.fromiter(found, np.int32, len(found)), counts, tokens, len(modelled), took_us)


NO_PROPOSALS = Proposals(NO_INT32, NO_INT32, NO_INT32)


@dataclass(frozen=True)
class RowEnd:
    """Where the answer of a slot goes on.

    Attributes:
        token: The last token of the answer.
        position: Its position: its K and V are not computed yet.
        table: [blocks] int32, the blocks that the row has, pool-local. It may write behind `position` in the last one.
    """

    token: int
    position: int
    table: Int32Array


RowEnds = Mapping[int, RowEnd]  # by slot
NO_ENDS: RowEnds = MappingProxyType({})


class Drafter(Protocol):
    """Proposes the next tokens of each slot. Not thread-safe.

    Proposals are hints: a drafter may forget what it knows at any time, and what it forgets raises no error.
    """

    @property
    def costs(self) -> DrafterCosts:
        """What it costs."""

    def begin(self, slot: int, prompt: Int32Array, generated: Int32Array, most: int, shared: int = 0) -> None:
        """Assign a slot to a new request.

        Args:
            slot: The slot.
            prompt: [any] int32, the last tokens of the prompt.
            generated: [any] int32, the last tokens of the answer so far.
            most: The most tokens to propose for the slot at a time; 0: it gets no proposals.
            shared: Requests with the same number may be drafted from each other; 0: from none.
        """

    def append(self, slot: int, tokens: Sequence[int]) -> None:
        """Add tokens to the answer of a slot; a slot without proposals is ignored."""

    def prepare(self, slots: Sequence[int], is_late: Callable[[], bool]) -> None:
        """Do ahead what proposals for these slots need, in small pieces, until `is_late` returns True."""

    def propose(self, slots: Sequence[int], ends: RowEnds = NO_ENDS, asked: int = 0) -> Proposals:
        """Propose the next tokens of each of the slots.

        Args:
            slots: The slots.
            ends: Where their answers go on; a drafter without a model ignores it. A slot that is missing failed.
            asked: The most tokens of a model for each slot; 0: it proposes none.
        """

    def forget(self) -> None:
        """Forget every slot."""
