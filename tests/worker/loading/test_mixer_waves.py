"""Rows of one sequence run through mixers one after the other, rows of different ones together."""

from __future__ import annotations

import numpy as np

from kvforge.worker.attention import PagedBatch
from kvforge.worker.device.device import Device
from kvforge.worker.loading.mixer_waves import waves


def batch(cpu: Device, sequences: list[int], starts: list[int], counts: list[int], generated: list[bool]) -> PagedBatch:
    tables = np.zeros((len(sequences), 4), np.int32)
    made = PagedBatch.build(
        tables, np.array(starts, np.int32), np.array(counts, np.int32), 16, cpu, np.array(generated)
    )
    made.states = np.array([[10 * each, 10 * each + 1] for each in sequences], np.int32)
    return made


def test_decodes_alone_are_one_wave(cpu: Device) -> None:
    (wave,) = waves(batch(cpu, [3, 1, 2], [5, 6, 7], [1, 1, 1], [True] * 3), steps=True)
    assert (wave.alone, wave.stepping, wave.tokens) == ([], [0, 1, 2], None)
    assert wave.pages.tolist() == [[30, 31], [10, 11], [20, 21]]


def test_prompts_and_first_tokens_run_alone(cpu: Device) -> None:
    """A token at the begin of a sequence has no state, and a chunk of one prompt token is not generated."""
    given = batch(cpu, [3, 1, 2, 4], [0, 6, 0, 8], [4, 1, 1, 1], [False, True, True, False])
    (wave,) = waves(given, steps=True)
    assert (wave.alone, wave.stepping) == ([0, 2, 3], [1])
    assert wave.tokens is not None and wave.tokens.tolist() == [4]
    assert wave.pages.tolist() == [[10, 11]]
    (wave,) = waves(given, steps=False)
    assert (wave.alone, wave.stepping) == ([0, 1, 2, 3], None)


def test_a_sequence_that_is_computed_again_has_a_row_in_each_wave(cpu: Device) -> None:
    given = batch(cpu, [3, 3, 1, 3], [0, 4, 9, 5], [4, 1, 1, 1], [False, True, True, True])
    found = waves(given, steps=True)
    assert [(wave.alone, wave.stepping) for wave in found] == [([0], [2]), ([], [1]), ([], [3])]
    assert waves(given, steps=True) is found
