"""Prompt tokens and generated tokens are distinguished, and each generated token is a separate row."""

from __future__ import annotations

from random import Random

import numpy as np
import pytest

from kvforge.protocol.messages import GENERATED
from kvforge.worker.step import token_kinds
from kvforge.worker.step.checks import Rows
from kvforge.worker.step.token_kinds import split_by_kind, split_marks, split_passes


def int32(*numbers: int) -> np.ndarray[tuple[int], np.dtype[np.int32]]:
    return np.array(numbers, np.int32)


def rows_of(*rows: tuple[int, list[int], int]) -> Rows:
    """Return rows from (first position, tokens as in a step, whether it samples), with slot and block table by
    index."""
    counts = int32(*(len(tokens) for _, tokens, _ in rows))
    tokens, generated = split_marks(int32(*(token for _, row, _ in rows for token in row)), counts, marked=True)
    starts, samples = int32(*(start for start, _, _ in rows)), int32(*(wanted for _, _, wanted in rows))
    slots = np.arange(len(rows), dtype=np.int32)
    return Rows(slots, starts, counts, samples, tokens, slots[:, None] * 100, generated)


def pieces(rows: Rows) -> list[tuple[int, int, int, int, bool]]:
    """Return (slot, first position, tokens, whether it samples, whether it is a decode) of each piece."""
    cut, decodes = split_by_kind(rows)
    assert (cut.tables[:, 0] == cut.slots * 100).all() and cut.tokens is rows.tokens
    return list(
        zip(
            cut.slots.tolist(),
            cut.starts.tolist(),
            cut.counts.tolist(),
            cut.samples.tolist(),
            decodes.tolist(),
            strict=True,
        )
    )


def test_tokens_come_without_their_marks() -> None:
    tokens, generated = split_marks(int32(5, GENERATED + 7, -1, 0), int32(4), marked=True)
    assert tokens.tolist() == [5, 7, -1, 0] and tokens.dtype == np.int32
    assert generated.tolist() == [False, True, True, False]


def test_where_nobody_says_a_single_token_is_a_generated_one() -> None:
    tokens, generated = split_marks(int32(5, 6, 7), int32(1, 2), marked=False)
    assert (tokens.tolist(), generated.tolist()) == ([5, 6, 7], [True, False, False])


def test_rows_of_one_kind_stay_as_they_are() -> None:
    prompts = rows_of((0, [1, 2, 3], 1), (4, [5], 0))
    cut, decodes = split_by_kind(prompts)
    assert cut is prompts and not decodes.any()
    running = rows_of((9, [-1], 1), (3, [GENERATED + 2], 1))
    cut, decodes = split_by_kind(running)
    assert cut is running and decodes.all()


def test_a_single_token_of_a_prompt_is_no_decode() -> None:
    assert pieces(rows_of((7, [3], 1), (2, [-1], 1))) == [(0, 7, 1, 1, False), (1, 2, 1, 1, True)]


def test_a_row_is_cut_where_its_kind_changes() -> None:
    mark = GENERATED
    mixed = (4, [1, 2, mark + 3, mark + 4, 5, 6, 7, mark + 8], 1)
    assert pieces(rows_of((0, [9, 9], 0), mixed, (1, [mark + 1, 2], 1))) == [
        (0, 0, 2, 0, False),
        (1, 4, 2, 0, False),
        (1, 6, 1, 0, True),
        (1, 7, 1, 0, True),
        (1, 8, 3, 0, False),
        (1, 11, 1, 1, True),
        (2, 1, 1, 0, True),
        (2, 2, 1, 1, False),
    ]


@pytest.mark.parametrize("seed", range(20))
def test_every_token_keeps_its_place(seed: int) -> None:
    random = Random(seed)
    made = []
    for _ in range(random.randint(1, 6)):
        tokens = [random.choice((0, GENERATED)) + random.randrange(50) for _ in range(random.randint(1, 12))]
        made.append((random.randrange(40), tokens, random.randrange(2)))
    rows = rows_of(*made)
    found = pieces(rows)
    places = [(slot, start + i) for slot, start, count, *_ in found for i in range(count)]
    assert places == [(slot, start + i) for slot, (start, tokens, _) in enumerate(made) for i in range(len(tokens))]
    kinds_of = [decode for *_, count, _, decode in found for _ in range(count)]
    assert kinds_of == [token >= GENERATED for _, tokens, _ in made for token in tokens]
    assert all(count == 1 for _, _, count, _, decode in found if decode)
    assert [slot for slot, _, _, samples, _ in found if samples] == [i for i, (*_, wanted) in enumerate(made) if wanted]


def test_many_rows_are_computed_in_several_passes(monkeypatch: pytest.MonkeyPatch) -> None:
    rows, decodes = split_by_kind(rows_of((0, [GENERATED + 1] * 5, 1), (3, [1, 2], 1)))
    assert [len(part) for part, _ in split_passes(rows, decodes)] == [6]
    monkeypatch.setattr(token_kinds, "CELLS_MAX", 4)
    parts = list(split_passes(rows, decodes))
    assert [len(part) for part, _ in parts] == [4, 2]
    assert [part.starts.tolist() for part, _ in parts] == [[0, 1, 2, 3], [4, 3]]
    assert np.concatenate([part.tokens for part, _ in parts]).tolist() == rows.tokens.tolist()
    assert [each.tolist() for _, each in parts] == [[True] * 4, [True, False]]
