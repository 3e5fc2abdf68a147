"""Validation of a whole step before the worker runs it.

A valid step passes in a fixed number of array operations, whatever its number of rows. Python visits single rows only
when at least one is invalid.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import numpy.typing as npt

from kvforge.protocol.errors import InvalidRequest, KvforgeError
from kvforge.protocol.messages import Int32Array, Step
from kvforge.worker.attention.windows import WindowTables, seen_blocks
from kvforge.worker.sampling.sampler import NO_TOKEN

from .draft_checks import bad_drafts, draft_problem, malformed_drafts
from .row_start_checks import split_history

BoolArray = npt.NDArray[np.bool_]
ARRAYS = tuple(name for name, _ in Step.FRAMES)


@dataclass(frozen=True)
class StepLimits:
    """Bounds of a step. All are counts, except `block_size` in tokens. Slots are [0, slots_max)."""

    slots_max: int
    step_tokens_max: int
    step_rows_max: int
    context_tokens_max: int
    vocab_size: int
    blocks: int
    block_size: int
    state_blocks: int = 0
    window: int = 0
    window_pages: int = 0
    drafts_max: int = 0
    draft_states: int = 0


@dataclass(frozen=True)
class Scoring:
    """The prompt tokens of a step to score the next token of.

    Attributes:
        places: [sum(counts)] int32, the index of each token in `Step.scored`, else -1.
        following: `Step.following`.
        top_width: The most top tokens that a row wants.
    """

    places: Int32Array
    following: Int32Array
    top_width: int = 0

    @classmethod
    def of(cls, step: Step) -> Scoring | None:
        """Return what a step scores; None for nothing."""
        if not len(step.scored):
            return None
        places = np.full(len(step.tokens), -1, np.int32)
        places[step.scored] = np.arange(len(step.scored), dtype=np.int32)
        return cls(places, step.following)


@dataclass(frozen=True)
class Rows:
    """The rows of a step, as host arrays.

    Attributes:
        slots: [rows] int32.
        starts: [rows] int32, position of each row's first token.
        counts: [rows] int32, tokens of each row.
        samples: [rows] int32, 1 for rows that sample a token.
        tokens: [sum(counts)] int32, row after row.
        tables: [rows, width] int32, pool-local block ids.
        generated: [sum(counts)] bool, tokens that were generated rather than part of a prompt (see `token_kinds`).
        scoring: The prompt tokens to score; None for none.
        states: [rows, state blocks] int32, the pages of each row's recurrent state, pool-local block ids; None for a
            model without one.
        windows: The pages of layers that keep a window; None for a model without such layers.
        drafts: [rows] int32, how many of each row's last tokens are drafts; None for none.
        draft_states: [sum(drafts), state blocks] int32, the pages that the states behind drafted tokens are written to;
            None without drafts or states.
        sources: [rows, state blocks] int32, the pages of the state that each row goes on with; None: its own.
    """

    slots: Int32Array
    starts: Int32Array
    counts: Int32Array
    samples: Int32Array
    tokens: Int32Array
    tables: Int32Array
    generated: BoolArray
    scoring: Scoring | None = None
    states: Int32Array | None = None
    windows: WindowTables | None = None
    drafts: Int32Array | None = None
    draft_states: Int32Array | None = None
    sources: Int32Array | None = None

    def __len__(self) -> int:
        return len(self.slots)

    def pick(self, keep: BoolArray) -> Rows:
        """Return the rows that the mask `keep` [rows] selects."""
        if keep.all():
            return self
        inside = np.repeat(keep, self.counts)
        pages = self.draft_states
        if pages is not None and self.drafts is not None:
            pages = pages[np.repeat(keep, self.drafts)]
        return Rows(
            self.slots[keep],
            self.starts[keep],
            self.counts[keep],
            self.samples[keep],
            self.tokens[inside],
            self.tables[keep],
            self.generated[inside],
            None if self.scoring is None else replace(self.scoring, places=self.scoring.places[inside]),
            None if self.states is None else self.states[keep],
            None if self.windows is None else self.windows.pick(keep),
            None if self.drafts is None else self.drafts[keep],
            pages,
            None if self.sources is None else self.sources[keep],
        )


def find_malformed(
    step: Step,
    tables: npt.NDArray[Any],
    limits: StepLimits,
    states: npt.NDArray[Any] | None = None,
    windows: WindowTables | None = None,
) -> InvalidRequest | None:
    """Return the first fault that makes the whole step unreadable, or None."""
    rows = step.slots.size
    for name in ARRAYS:
        array = getattr(step, name)
        if array.ndim != 1 or array.dtype != np.int32:
            return InvalidRequest(name, f"must be int32 of 1 dimension, not {array.dtype} of {array.ndim}")
    for name in ("starts", "counts", "samples"):
        if len(getattr(step, name)) != rows:
            return InvalidRequest(name, f"has {len(getattr(step, name))} rows, slots {rows}")
    if tables.ndim != 2 or tables.dtype != np.int32 or len(tables) != rows:
        return InvalidRequest("tables", f"must be [{rows}, width] int32, not {tables.shape} {tables.dtype}")
    if (fault := _malformed_states(states, rows, limits.state_blocks)) is not None:
        return fault
    if (fault := _malformed_windows(windows, rows, limits.window_pages)) is not None:
        return fault
    if rows > limits.step_rows_max:
        return InvalidRequest("slots", f"{rows} rows are more than step_rows_max = {limits.step_rows_max}")
    if len(step.tokens) > limits.step_tokens_max:
        problem = f"{len(step.tokens)} tokens are more than step_tokens_max = {limits.step_tokens_max}"
        return InvalidRequest("tokens", problem)
    states_max = limits.draft_states if limits.state_blocks else None
    if (fault := malformed_drafts(step, min(limits.step_rows_max, limits.slots_max), states_max)) is not None:
        return fault
    if rows and (step.counts.min() < 1 or int(step.counts.sum(dtype=np.int64)) != len(step.tokens)):
        return InvalidRequest("counts", f"must be at least 1 each and {len(step.tokens)} together")
    if len(step.zeros) and not 0 <= step.zeros.min() <= step.zeros.max() < limits.blocks:
        return InvalidRequest("zeros", f"names a block that is not one of the pool's {limits.blocks}")
    if len(step.copies) % 3:
        return InvalidRequest("copies", f"holds {len(step.copies)} numbers, not triples")
    if len(step.scored) or len(step.following):
        places, count = step.scored, len(step.tokens)
        if len(places) != len(step.following):
            return InvalidRequest("following", f"has {len(step.following)} tokens, scored {len(places)}")
        if not 0 <= places[0] <= places[-1] < count or (np.diff(places) < 1).any():
            return InvalidRequest("scored", f"must be increasing indices of the step's {count} tokens")
        if not 0 <= step.following.min() <= step.following.max() < limits.vocab_size:
            return InvalidRequest("following", f"a token id is outside the vocabulary of {limits.vocab_size}")
    if (step.begins or len(step.history)) and split_history(step) is None:
        return InvalidRequest("history", f"its {len(step.history)} tokens do not match the counts in `begins`")
    return None


def bad_copies(copies: npt.NDArray[np.int32], limits: StepLimits) -> BoolArray:
    """Return a mask [n] of the entries of `copies` [n, 3] that are out of bounds."""
    blocks, tokens = copies[:, :2], copies[:, 2]
    bad = ((blocks < 0) | (blocks >= limits.blocks)).any(axis=1)
    return np.asarray(bad | (tokens < 0) | (tokens > limits.block_size))


def check_rows(
    rows: Rows, has_sampled: BoolArray, bad_targets: frozenset[int], limits: StepLimits, errors: dict[int, KvforgeError]
) -> BoolArray:
    """Select the rows that may run, and record an error for each of the others.

    Args:
        rows: The step's rows.
        has_sampled: [slots_max] bool, slots that have sampled a token for which -1 may stand.
        bad_targets: Blocks that a failed copy left without valid content.
        limits: Bounds of a step.
        errors: Errors by slot; an existing entry is kept.

    Returns:
        [rows] bool.
    """
    if not len(rows):
        return np.ones(0, np.bool_)
    suspect = _suspects(rows, has_sampled, limits)
    if errors:
        suspect |= np.isin(rows.slots, np.fromiter(errors, np.int64, len(errors)))
    ordered = np.sort(rows.slots)
    repeats = ordered[1:][ordered[1:] == ordered[:-1]]
    if repeats.size:
        suspect |= np.isin(rows.slots, repeats)
    if bad_targets:
        suspect[:] = True
    if not suspect.any():
        return ~suspect
    repeated = set(repeats.tolist())
    ends = np.cumsum(rows.counts)
    keep = np.ones(len(rows), np.bool_)
    for row in np.flatnonzero(suspect).tolist():
        slot = int(rows.slots[row])
        problem: KvforgeError | None = errors.get(slot)
        if problem is None and slot in repeated:
            problem = InvalidRequest("slots", f"slot {slot} occurs twice in one step")
        if problem is None:
            tokens = rows.tokens[ends[row] - rows.counts[row] : ends[row]]
            problem = _row_problem(rows, row, tokens, has_sampled, bad_targets, limits)
        if problem is not None:
            errors[slot] = problem
            keep[row] = False
    return keep


def _malformed_states(states: npt.NDArray[Any] | None, rows: int, width: int) -> InvalidRequest | None:
    """Return the fault of the pages of a step's states, or None."""
    if states is None:
        return InvalidRequest("states", f"must be [{rows}, {width}] int32, not None") if width else None
    if states.shape != (rows, width) or states.dtype != np.int32:
        return InvalidRequest("states", f"must be [{rows}, {width}] int32, not {states.shape} {states.dtype}")
    return None


def _malformed_windows(windows: WindowTables | None, rows: int, width: int) -> InvalidRequest | None:
    """Return the fault of the window pages of a step, or None."""
    if windows is None:
        return InvalidRequest("windows", f"must be [{rows}, blocks, {width}] int32, not None") if width else None
    pages, first = windows.pages, windows.first
    if pages.ndim != 3 or pages.shape[::2] != (rows, width) or pages.dtype != np.int32 or first.shape != (rows,):
        problem = f"must be [{rows}, blocks, {width}] int32, not {pages.shape} {pages.dtype}"
        return InvalidRequest("windows", problem)
    return None


def _window_pages(rows: Rows, limits: StepLimits) -> tuple[Int32Array, BoolArray]:
    """Return the window pages that each row writes or sees, [rows, n] int32, and which of these entries count."""
    assert rows.windows is not None
    ends = rows.starts.astype(np.int64) + rows.counts
    first, last = seen_blocks(rows.starts, ends, limits.window, limits.block_size)
    pages = rows.windows.pages
    blocks = rows.windows.first[:, None] + np.arange(pages.shape[1])
    counts = (blocks >= first[:, None]) & (blocks <= last[:, None])
    return pages.reshape(len(pages), -1), np.repeat(counts, pages.shape[2], axis=1)


def _lacks_windows(rows: Rows, limits: StepLimits) -> BoolArray:
    """Return a mask [rows] of rows that write or see a block that their window tables do not have."""
    assert rows.windows is not None
    ends = rows.starts.astype(np.int64) + rows.counts
    first, last = seen_blocks(rows.starts, ends, limits.window, limits.block_size)
    width = rows.windows.pages.shape[1]
    return np.asarray((first < rows.windows.first) | (last >= rows.windows.first + width))


def _suspects(rows: Rows, has_sampled: BoolArray, limits: StepLimits) -> BoolArray:
    """Return a mask [rows] of rows in which `_row_problem` would find a problem of the row itself."""
    slots, starts, width = rows.slots, rows.starts, rows.tables.shape[1]
    ends = starts.astype(np.int64) + rows.counts
    outside = (slots < 0) | (slots >= limits.slots_max)
    suspect = outside | (starts < 0) | (ends > min(width * limits.block_size, limits.context_tokens_max))
    suspect |= (rows.samples < 0) | (rows.samples > 1)
    lowest = highest = rows.tokens
    if len(rows.tokens) != len(rows):
        first = np.cumsum(rows.counts) - rows.counts
        lowest, highest = np.minimum.reduceat(rows.tokens, first), np.maximum.reduceat(rows.tokens, first)
    if rows.drafts is not None:
        suspect |= bad_drafts(rows.drafts, rows.counts, rows.samples, lowest, rows.generated, limits.drafts_max)
    # Viewed as unsigned, negative ids are large.
    if rows.tokens.view(np.uint32).max() >= limits.vocab_size:
        suspect |= (lowest < NO_TOKEN) | (highest >= limits.vocab_size)
        suspect |= (lowest == NO_TOKEN) & ~has_sampled[np.where(outside, 0, slots)]
    if rows.tables.view(np.uint32).max(initial=0) >= limits.blocks:  # entries past a row's last block are not read
        impossible = rows.tables.view(np.uint32) >= limits.blocks
        impossible &= np.arange(width) < -(-ends // limits.block_size)[:, None]
        suspect |= impossible.any(axis=1)
    if rows.states is not None:
        suspect |= (rows.states.view(np.uint32) >= limits.blocks).any(axis=1)
        suspect |= (np.diff(np.sort(rows.states, axis=1), axis=1) == 0).any(axis=1)
    if rows.windows is not None:
        suspect |= _lacks_windows(rows, limits)
        if rows.windows.pages.view(np.uint32).max(initial=0) >= limits.blocks:  # seldom, and then mostly unread entries
            pages, counts = _window_pages(rows, limits)
            suspect |= ((pages.view(np.uint32) >= limits.blocks) & counts).any(axis=1)
    return np.asarray(suspect)


def _row_problem(
    rows: Rows,
    row: int,
    tokens: Int32Array,
    has_sampled: BoolArray,
    bad_targets: frozenset[int],
    limits: StepLimits,
) -> KvforgeError | None:
    slot = int(rows.slots[row])
    start, end = int(rows.starts[row]), int(rows.starts[row]) + int(rows.counts[row])
    width, block_size = rows.tables.shape[1], limits.block_size
    if not 0 <= slot < limits.slots_max:
        return InvalidRequest("slots", f"slot {slot} must be less than slots_max = {limits.slots_max}")
    if start < 0:
        return InvalidRequest("starts", f"start position {start} is negative")
    if end > width * block_size:
        return InvalidRequest("tables", f"{width} blocks of {block_size} tokens cannot hold the row's {end} tokens")
    if end > limits.context_tokens_max:
        return InvalidRequest("starts", f"{end} tokens exceed the context of {limits.context_tokens_max}")
    if rows.samples[row] not in (0, 1):
        return InvalidRequest("samples", f"must be 0 or 1, not {rows.samples[row]}")
    if rows.drafts is not None and rows.drafts[row]:
        end_token = int(rows.counts[: row + 1].sum())
        generated = rows.generated[end_token - len(tokens) : end_token]
        problem = draft_problem(int(rows.drafts[row]), int(rows.samples[row]), tokens, generated, limits.drafts_max)
        if problem is not None:
            return problem
    if tokens.min() < NO_TOKEN or tokens.max() >= limits.vocab_size:
        worst = int(tokens.min() if tokens.min() < NO_TOKEN else tokens.max())
        return InvalidRequest("tokens", f"token id {worst} is outside the vocabulary of {limits.vocab_size}")
    if tokens.min() == NO_TOKEN and not has_sampled[slot]:
        return InvalidRequest("tokens", f"-1 stands for the last sampled token, but slot {slot} has sampled none")
    blocks = rows.tables[row, : -(-end // block_size)]
    if blocks.min() < 0 or blocks.max() >= limits.blocks:
        worst = int(blocks.min() if blocks.min() < 0 else blocks.max())
        return InvalidRequest("tables", f"block {worst} is not one of the pool's {limits.blocks}")
    if bad_targets and not bad_targets.isdisjoint(blocks.tolist()):
        return InvalidRequest("copies", "a copy for a block of this row is out of bounds")
    if rows.windows is not None:
        problem = _window_problem(rows, row, bad_targets, limits)
        if problem is not None:
            return problem
    if rows.states is not None:
        return _state_problem(rows.states[row], bad_targets, limits.blocks)
    return None


def _window_problem(rows: Rows, row: int, bad_targets: frozenset[int], limits: StepLimits) -> InvalidRequest | None:
    alone = rows.pick(np.arange(len(rows)) == row)
    if _lacks_windows(alone, limits).any():
        return InvalidRequest("windows", "the row sees blocks that its window table does not have")
    pages, counts = _window_pages(alone, limits)
    held = pages[counts]
    if held.min() < 0 or held.max() >= limits.blocks:
        worst = int(held.min() if held.min() < 0 else held.max())
        return InvalidRequest("windows", f"block {worst} is not one of the pool's {limits.blocks}")
    if not bad_targets.isdisjoint(held.tolist()):
        return InvalidRequest("copies", "a copy for a window page of this row is out of bounds")
    return None


def _state_problem(pages: Int32Array, bad_targets: frozenset[int], count: int) -> InvalidRequest | None:
    if pages.min() < 0 or pages.max() >= count:
        worst = int(pages.min() if pages.min() < 0 else pages.max())
        return InvalidRequest("states", f"block {worst} is not one of the pool's {count}")
    held = set(pages.tolist())
    if len(held) < len(pages):
        return InvalidRequest("states", "a block is named twice among the pages of one state")
    if not held.isdisjoint(bad_targets):
        return InvalidRequest("copies", "a copy for a page of this row's state is out of bounds")
    return None
