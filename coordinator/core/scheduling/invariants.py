"""Checks of the rows in steps, and of what groups keep about them. Tests run them after every event."""

from __future__ import annotations

import numpy as np

from ..cache.groups import Group
from ..cache.sequences import Sequences
from .rows import RunningRows


def check_pending(group: Group, sequences: Sequences, rows: RunningRows) -> None:
    """Check that each running row awaits one token from each step in flight that samples it, and one for each draft.

    Raises:
        AssertionError: A row awaits more or fewer.
    """
    awaited = np.zeros(sequences.pending.size, np.int64)
    for sent in group.sent:
        alive = sent.samples & (rows.run[sent.slots] == sent.runs)
        awaited[sent.slots[alive]] += 1 + (sent.message.drafts[alive] if sent.message.drafts.size else 0)
    running = sequences.running & (sequences.pool == group.number)
    assert (awaited[running] == sequences.pending[running]).all(), "a row awaits other tokens than those of its steps"


def check_sampled_rows(group: Group, sequences: Sequences, rows: RunningRows) -> None:
    """Check that what a group keeps about the rows of its next result agrees with the rest of the state.

    Raises:
        AssertionError: It does not.
    """
    s, kept, steady = sequences, group.sampled_rows, group.steady
    if kept is None or steady is None or steady.slots is not kept.rows:
        return
    slots, length = kept.rows, s.length[kept.rows]
    assert (length == kept.length).all(), "the kept lengths differ"
    assert (length - rows.base[slots] == kept.offsets).all(), "the kept offsets differ"
    assert (s.request[slots] == kept.requests).all(), "the kept requests differ"
    assert kept.left == (rows.limit[slots] - length).min(), "the kept number of results differs"
    assert kept.tops == rows.tops[slots].any(), "the kept wish for top log-probabilities differs"
    cells = s.next_cells(slots, length)
    assert (cells.where == kept.cells.where).all(), "the kept cells differ"
    assert np.shares_memory(cells.tokens, kept.cells.tokens), "the kept cells are of other tokens"
    if kept.leaving is not None:
        kept.leaving.check_invariants(s.window_first, s.computed, group.window)
    if kept.readers_changed == rows.readers_changed:
        readers = set(rows.reader[slots].tolist())
        assert readers == {kept.reader} or (kept.reader < 0 and len(readers) > 1), "the kept reader differs"


def check_proposals(group: Group, sequences: Sequences) -> None:
    """Check that proposals are of running rows of the group, and that a step with drafts is in flight alone.

    Raises:
        AssertionError: They are not.
    """
    s = sequences
    for slot, tokens in group.proposals.items():
        assert s.running[slot] and s.pool[slot] == group.number, "a proposal for a row that does not run"
        assert 1 <= len(tokens) <= group.drafts, "a proposal of too many tokens"
        assert group.steady is None, "a repeated step would leave out a proposal"
    assert not any(sent.message.drafts.size for sent in list(group.sent)[1:]), "drafts behind a step in flight"
