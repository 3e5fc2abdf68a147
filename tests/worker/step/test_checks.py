"""The checks of many rows at once find what the checks of one row find."""

from __future__ import annotations

import numpy as np
import pytest

from kvforge.protocol.errors import InvalidRequest, KvforgeError
from kvforge.worker.attention.windows import WindowTables, seen_blocks
from kvforge.worker.step import checks
from kvforge.worker.step.checks import Rows, StepLimits, bad_copies, check_rows

LIMITS = StepLimits(
    slots_max=20,
    step_tokens_max=500,
    step_rows_max=64,
    context_tokens_max=60,
    vocab_size=50,
    blocks=100,
    block_size=8,
    window=20,
    window_pages=2,
    drafts_max=7,
)


def random_rows(rng: np.random.Generator, faults: float, decodes: bool) -> Rows:
    """Return rows that are each wrong in some way with probability `faults`. Slots differ unless that is the fault."""
    count = int(rng.integers(1, 19))
    slots = rng.permutation(LIMITS.slots_max)[:count].astype(np.int32)
    counts = np.ones(count, np.int32) if decodes else rng.integers(1, 9, count).astype(np.int32)
    starts = rng.integers(0, 60 - 8, count).astype(np.int32)
    samples = rng.integers(0, 2, count).astype(np.int32)
    tokens = rng.integers(0, LIMITS.vocab_size, int(counts.sum())).astype(np.int32)
    width = 8
    tables = rng.integers(0, LIMITS.blocks, (count, width)).astype(np.int32)
    drafts = np.where(rng.random(count) < 0.5, counts - 1, 0).astype(np.int32)
    samples[drafts > 0], drafted = 1, np.repeat(drafts > 0, counts)
    generated = np.repeat(counts == 1, counts) | drafted
    ends = np.cumsum(counts)
    first, lasts = seen_blocks(starts, starts + counts, LIMITS.window, LIMITS.block_size)
    pages = rng.integers(0, LIMITS.blocks, (count, 5, 2)).astype(np.int32)
    for row in range(count):
        pages[row, lasts[row] - first[row] + 1 :] = rng.choice([-1, 5, 10**6])
        used = -(-int(starts[row] + counts[row]) // LIMITS.block_size)
        tables[row, used:] = rng.choice([-1, 5, 10**6])  # never read
        if rng.random() >= faults:
            continue
        token = int(rng.integers(ends[row] - counts[row], ends[row]))
        match int(rng.integers(0, 12)):
            case 0:
                slots[row] = rng.choice([-1, LIMITS.slots_max, 2**31 - 1, -(2**31)])
            case 1:
                starts[row] = rng.choice([-1, -(2**31)])
            case 2:
                starts[row] = rng.choice([60, 64, 2**31 - 1])
            case 3:
                samples[row] = rng.choice([-1, 2])
            case 4:
                tokens[token] = rng.choice([-2, LIMITS.vocab_size, 2**31 - 1])
            case 5:
                tokens[token] = -1
            case 6:
                tables[row, rng.integers(0, used)] = rng.choice([-1, LIMITS.blocks, -(2**31)])
            case 7:
                column = rng.integers(lasts[row] - first[row] + 1)
                pages[row, column, rng.integers(0, 2)] = rng.choice([-1, LIMITS.blocks, -(2**31)])
            case 8:
                first[row] += rng.choice([-8, 1])  # the table lacks the last block, or the first one
            case 9:
                drafts[row] += rng.choice([-1, 1]) if drafts[row] else 1
            case 10:
                generated[token] = False
            case _:
                slots[row] = slots[rng.integers(0, count)]
    windows = WindowTables(first, pages)
    return Rows(slots, starts, counts, samples, tokens, tables, generated, windows=windows, drafts=drafts)


@pytest.mark.parametrize("decodes", [True, False])
@pytest.mark.parametrize("faults", [0.0, 0.1, 0.6])
def test_many_rows_are_judged_as_each_one_is(faults: float, decodes: bool) -> None:
    rng = np.random.default_rng(int(faults * 10) + decodes)
    for _ in range(300):
        rows = random_rows(rng, faults, decodes)
        has_sampled = rng.random(LIMITS.slots_max) < 0.5
        errors: dict[int, KvforgeError] = {}
        keep = check_rows(rows, has_sampled, frozenset(), LIMITS, errors)
        ends, slots = np.cumsum(rows.counts), rows.slots.tolist()
        for row, slot in enumerate(slots):
            tokens = rows.tokens[ends[row] - rows.counts[row] : ends[row]]
            alone = checks._row_problem(rows, row, tokens, has_sampled, frozenset(), LIMITS)
            assert keep[row] == (alone is None and slots.count(slot) == 1)
        assert set(errors) == {slot for slot, kept in zip(slots, keep, strict=True) if not kept}
        if not faults:
            assert keep.sum() + sum("sampled none" in str(error) for error in errors.values()) == len(rows)


def test_an_error_that_is_known_keeps_its_row_out() -> None:
    rows = random_rows(np.random.default_rng(1), 0.0, True)
    known: dict[int, KvforgeError] = {int(rows.slots[0]): InvalidRequest("seed", "is wrong")}
    keep = check_rows(rows, np.ones(LIMITS.slots_max, np.bool_), frozenset(), LIMITS, known)
    assert keep.tolist() == [False] + [True] * (len(rows) - 1)
    assert str(known[int(rows.slots[0])]).endswith("is wrong")


def test_blocks_that_could_not_be_copied_to_are_read_by_nobody() -> None:
    rows = random_rows(np.random.default_rng(2), 0.0, True)
    used = -(-int(rows.starts[0] + 1) // LIMITS.block_size)
    target = int(rows.tables[0, used - 1])
    errors: dict[int, KvforgeError] = {}
    keep = check_rows(rows, np.ones(LIMITS.slots_max, np.bool_), frozenset({target}), LIMITS, errors)
    assert not keep[0]
    assert all(error.fields["field"] == "copies" for error in errors.values())


def test_copies() -> None:
    copies = np.array([[0, 99, 8], [0, 100, 8], [-1, 0, 8], [0, 1, 9], [0, 1, -1], [5, 6, 0]], np.int32)
    assert bad_copies(copies, LIMITS).tolist() == [False, True, True, True, True, False]


def test_picking() -> None:
    rows = random_rows(np.random.default_rng(3), 0.0, False)
    keep = np.arange(len(rows)) % 2 == 0
    picked = rows.pick(keep)
    assert picked.slots.tolist() == rows.slots[keep].tolist()
    ends = np.cumsum(rows.counts)
    expected = [rows.tokens[end - count : end].tolist() for end, count in zip(ends, rows.counts, strict=True)]
    assert picked.tokens.tolist() == [token for part in expected[::2] for token in part]
    assert rows.pick(np.ones(len(rows), np.bool_)) is rows
