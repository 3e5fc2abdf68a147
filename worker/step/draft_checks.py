"""Validation of the drafts of a step: a row with drafts is one generated token and the tokens drafted behind it."""

from __future__ import annotations

import numpy as np

from kvforge.protocol.errors import InvalidRequest
from kvforge.protocol.messages import Int32Array, Step
from kvforge.worker.loading.model import LoadedModel
from kvforge.worker.sampling.ahead import BoolArray
from kvforge.worker.sampling.sampler import NO_TOKEN


def drafts_possible(model: LoadedModel, rows_max: int) -> int:
    """Return the most drafted tokens that a row of a model can have; 0 if its cache cannot take back a wrong draft.

    A recurrent state has no earlier one to return to, so that each drafted token needs pages for a state of its own.
    Layers with a window have places for all that steps in flight write in the ring of a sequence: drafts write into
    none that an earlier block still needs.

    Args:
        model: The model.
        rows_max: The most rows that sample, those of drafts included.
    """
    return 0 if model.geometry.states and not model.geometry.draft_states else max(0, rows_max - 1)


def malformed_drafts(step: Step, rows_max: int, states_max: int | None = None) -> InvalidRequest | None:
    """Return the fault of the drafts of a whole step, or None.

    Args:
        step: The step.
        rows_max: The most rows that sample, those of drafts included.
        states_max: The most drafted tokens for which there are pages of states; None for a model without states.
    """
    drafts, rows = step.drafts, step.slots.size
    if not len(drafts):
        return None
    if len(drafts) != rows:
        return InvalidRequest("drafts", f"has {len(drafts)} rows, slots {rows}")
    if drafts.min() < 0:
        return InvalidRequest("drafts", f"{drafts.min()} drafted tokens; a row has 0 or more")
    expanded = rows + int(drafts.sum(dtype=np.int64))
    if drafts.any() and expanded > rows_max:
        problem = f"{rows} rows with {expanded - rows} drafted tokens are more than {rows_max} rows"
        return InvalidRequest("drafts", f"{problem}, the smaller of step_rows_max and slots_max")
    if states_max is not None and expanded - rows > states_max:
        problem = f"{expanded - rows} drafted tokens are more than the {states_max} with a recurrent state of their own"
        return InvalidRequest("drafts", problem)
    return None


def bad_drafts(
    drafts: Int32Array,
    counts: Int32Array,
    samples: Int32Array,
    lowest: Int32Array,
    generated: BoolArray,
    drafts_max: int,
) -> BoolArray:
    """Return a mask [rows] of rows in which `draft_problem` would find a problem.

    Args:
        drafts: [rows] int32, drafted tokens of each row.
        counts: [rows] int32, all tokens of each row.
        samples: [rows] int32, 1 for rows that sample a token.
        lowest: [rows] int32, the lowest token of each row.
        generated: [sum(counts)] bool, the generated tokens.
        drafts_max: The most drafted tokens of a row.
    """
    bad = (drafts != counts - 1) | (drafts > drafts_max) | (samples != 1) | (lowest <= NO_TOKEN)
    if not generated.all():
        bad |= ~np.logical_and.reduceat(generated, np.cumsum(counts) - counts)
    return np.asarray(bad & (drafts > 0))


def draft_problem(
    drafts: int, sample: int, tokens: Int32Array, generated: BoolArray, drafts_max: int
) -> InvalidRequest | None:
    """Return the fault of a row with drafts, or None.

    Args:
        drafts: Its drafted tokens, 1 or more.
        sample: Whether it samples a token: 1.
        tokens: [count] int32, all of its tokens.
        generated: [count] bool, which are generated.
        drafts_max: The most drafted tokens of a row.
    """
    if drafts > drafts_max:
        return InvalidRequest("drafts", f"{drafts} drafted tokens are more than drafts_max = {drafts_max}")
    if drafts != len(tokens) - 1:
        problem = f"a row with {drafts} drafted tokens has {drafts + 1} tokens, not {len(tokens)}"
        return InvalidRequest("drafts", problem)
    if sample != 1:
        return InvalidRequest("samples", f"is {sample}; a row with drafts samples: 1")
    if not generated.all():
        return InvalidRequest("drafts", "a row with drafts has prompt tokens; mark all of its tokens as generated")
    if tokens.min() == NO_TOKEN:
        return InvalidRequest("tokens", "-1 stands in a row with drafts; send the token that the drafts follow")
    return None
