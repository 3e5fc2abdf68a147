"""Drafts of simulated workers: how they verify them, and what they propose."""

from __future__ import annotations

from typing import Any

import numpy as np

from kvforge.protocol.messages import GENERATED, NO_INT32, Step
from tools.simulation.draws import Draws
from tools.simulation.model import Oracle, choose, fingerprint_of

SILENT_SHARE, WRONG_SHARE = 0.25, 0.35
LOOKED_UP = 4  # of so many proposals of a step that asks its draft model, one is looked up


def drafts_of(step: Step) -> list[int]:
    """Return how many drafts each row of a step has."""
    drafts: list[int] = step.drafts.tolist() or [0] * step.slots.size
    return drafts


def check_drafts(step: Step, waiting: list[Step], drafts_max: int, rows_max: int, states_max: int) -> str:
    """Return what is wrong with the drafts of a step; "" for nothing.

    Args:
        step: The step.
        waiting: Steps that were received before this one was executed.
        drafts_max: The most drafts of a row.
        rows_max: The most rows with drafts.
        states_max: The most drafts of all rows for which there are recurrent states.
    """
    if step.propose and waiting:
        return f"{len(waiting)} steps behind one that asks for {step.propose} tokens of each row"
    if not step.drafts.size:
        return ""
    drafted = step.drafts > 0
    if step.drafts.size != step.slots.size or not drafted.any():
        return f"drafts {step.drafts.tolist()} of {step.slots.size} rows"
    if int(step.drafts.min()) < 0 or int(step.drafts.max()) > drafts_max:
        return f"drafts {step.drafts.tolist()} of at most {drafts_max}"
    if not (step.counts == step.drafts + 1)[drafted].all() or not step.samples[drafted].all():
        return f"rows of {step.counts.tolist()} tokens with drafts {step.drafts.tolist()}"
    if step.slots.size + int(step.drafts.sum()) > rows_max:
        return f"{step.slots.size} rows and {step.drafts.sum()} drafts of at most {rows_max}"
    if int(step.drafts.sum()) > states_max:
        return f"{step.drafts.sum()} drafts with states for {states_max}"
    ahead = {slot for other in waiting for slot in other.slots.tolist()} & set(step.slots[drafted].tolist())
    return f"a step behind drafts of slots {sorted(ahead)} that were not verified" if ahead else ""


def accepted(text: list[int], end: int, seed: int, generated: int, vocabulary: int) -> list[int]:
    """Return the tokens of a row: that behind `end` tokens, and those behind each draft that agrees.

    Args:
        text: All tokens of the row, with marks: known ones up to `end`, then drafts.
        end: How many are known.
        seed: The seed of its request.
        generated: How many tokens the request has generated.
        vocabulary: The size of the vocabulary.
    """
    tokens = [choose(fingerprint_of(text[:end]), seed, generated, vocabulary)]
    for place in range(end, len(text)):
        if text[place] % GENERATED != tokens[-1]:
            break
        tokens.append(choose(fingerprint_of(text[: place + 1]), seed, generated + len(tokens), vocabulary))
    return tokens


def in_state(drafted: int, kept: int) -> int:
    """Return behind how many tokens of a row with drafts its recurrent state is.

    Args:
        drafted: How many drafts the row has.
        kept: How many tokens it gets: one, and one for each accepted draft.
    """
    assert 1 <= kept <= drafted + 1
    return kept


def proposed(oracle: Oracle, generated: int, most: int, vocabulary: int, random: Draws) -> list[int]:
    """Return what a worker proposes behind the generated tokens of a request: often right, sometimes nothing."""
    if random.random() < SILENT_SHARE:
        return []
    tokens = oracle.tokens[generated : generated + 1 + random.randrange(most)]
    tokens += [random.randrange(vocabulary) for _ in range(most - len(tokens)) if random.random() < SILENT_SHARE]
    if tokens and random.random() < WRONG_SHARE:
        tokens[random.randrange(len(tokens))] = random.randrange(vocabulary)
    return tokens


def proposals(found: dict[int, list[int]], asked: int, pass_us: int) -> dict[str, Any]:
    """Return the proposals of slots as fields of a result.

    Args:
        found: The proposals.
        asked: How many tokens of each row the step asked of the draft model.
        pass_us: What a token of it takes.
    """
    found = {slot: tokens for slot, tokens in found.items() if tokens}
    if not found:
        return {}
    columns: dict[str, Any] = {
        "draft_slots": list(found),
        "draft_counts": [len(tokens) for tokens in found.values()],
        "draft_tokens": [token for tokens in found.values() for token in tokens],
    }
    modelled = len(found) - len(found) // LOOKED_UP if asked else 0
    passes = max(columns["draft_counts"][:modelled], default=0)
    return {name: np.array(column, np.int32) if column else NO_INT32 for name, column in columns.items()} | {
        "draft_model_rows": modelled,
        "draft_us": passes * pass_us,
    }
