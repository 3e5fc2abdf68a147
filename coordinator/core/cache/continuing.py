"""Continuing a kept sequence: which tokens of a prompt it has already, and the KV of these.

A prompt has no kinds: a client sends the ids of all tokens alike. The kept sequence knows which of them were generated.
A prompt that continues it takes over the marks as far as the ids agree, so that the KV of its answers is found, and
computed again as a decode where it is lost.
"""

from __future__ import annotations

from .blocks import Blocks
from .groups import Group
from .idle_tracker import IdleTracker
from .indexing import Indexing
from .placement import NO_DONOR, Placement
from .planner import Planner
from .sequences import Sequences, Tokens, unmarked
from .states import is_cut
from .tenants import Tenants


class Continuing:
    """Finds what a prompt and a kept sequence have in common. It changes nothing."""

    def __init__(
        self, sequences: Sequences, blocks: Blocks, indexing: Indexing, tenants: Tenants, planner: Planner
    ) -> None:
        self._sequences, self._blocks, self._indexing, self._tenants = sequences, blocks, indexing, tenants
        self._planner = planner

    def marked(self, sequence_id: int, tenant: str, salt: int, prompt: Tokens) -> Tokens:
        """Return a prompt with the marks of a sequence, as far as their token ids agree.

        Args:
            sequence_id: The sequence. One that is gone, or that another tenant or salt has, leaves the prompt as it is.
            tenant: The tenant's name.
            salt: The salt of the prompt's prefix chain.
            prompt: Token ids, [n] int32.
        """
        s, slot = self._sequences, self._find(sequence_id, tenant, salt)
        if slot == NO_DONOR:
            return prompt
        own = s.tokens[slot, : min(int(s.length[slot]), prompt.size)]
        common = _common(unmarked(own), prompt)
        if not common:
            return prompt
        marked = prompt.copy()
        marked[:common] = own[:common]
        return marked

    def note(self, sequence_id: int, tenant: str, salt: int, idle: IdleTracker) -> None:
        """Note that a request continues a sequence, if it may."""
        slot = self._find(sequence_id, tenant, salt)
        if slot != NO_DONOR:
            idle.continued(slot)

    def _find(self, sequence_id: int, tenant: str, salt: int) -> int:
        s = self._sequences
        slot = s.slot_of.get(sequence_id, NO_DONOR)
        if slot == NO_DONOR or s.salt[slot] != salt or self._tenants.names[int(s.tenant[slot])] != tenant:
            return NO_DONOR
        return slot

    def placement(self, group: Group, sequence_id: int, salt: int, tokens: Tokens, most: int) -> Placement | None:
        """Plan a placement that shares the KV of a sequence in the group; None if there is none to share.

        Args:
            group: The group.
            sequence_id: The sequence.
            salt: The salt of the request's prefix chain.
            tokens: The request's tokens in the form in which they are indexed, [n] int32.
            most: How many leading tokens may be shared.
        """
        s, size = self._sequences, self._blocks.block_size
        slot = s.slot_of.get(sequence_id, NO_DONOR)
        if slot == NO_DONOR or s.pool[slot] != group.number or s.salt[slot] != salt:
            return None
        most = min(most, int(s.computed[slot]))
        shared = _common(self._indexing.contents(s.tokens[slot, :most]), tokens[:most])
        if not shared:
            return None
        at = int(s.scheduled[slot])
        if group.state_blocks and not (s.computed[slot] == at == shared and is_cut(tokens, at, group.prompt_chunk)):
            return None  # its state is that behind other tokens
        full, rest = divmod(shared, size)
        partial = (int(s.table[slot, full]), rest) if rest else (-1, 0)
        needed = s.blocks_for(tokens.size) - full + group.state_blocks
        found = Placement(group, s.blocks_of(slot)[:full], partial, needed, slot)
        found.checkpoint = s.states_of(slot)
        return self._planner.share_windows(found, slot, shared, tokens.size) if group.window_pages else found


def _common(one: Tokens, other: Tokens) -> int:
    """Return how many leading tokens are equal: [n] and [at least n] int32."""
    other = other[: one.size]
    if one.tobytes() == other.tobytes():
        return int(one.size)
    return int((one != other).argmax())
