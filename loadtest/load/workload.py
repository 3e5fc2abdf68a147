"""A load: sessions of one or more requests, decided by a seed before the first one is sent.

Kept here: session `index` of a workload is the same in every process and in whatever order it is asked for, so that
driver processes share a load by sharing its options.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import numpy.typing as npt

from kvforge.protocol.messages import Int32Array

FloatArray = npt.NDArray[np.float64]
ALL = -1
NO_TOKENS: Int32Array = np.zeros(0, np.int32)


@dataclass(frozen=True, slots=True, kw_only=True)
class Turn:
    """One request of a session.

    kept: its prompt begins with so many tokens of what the session holds: the prompt of the turn before and the answer
    that really came; ALL: with everything. tokens: [new] int32, what follows those. text: the same words for a server
    that takes text; "" where there are none. output_tokens: to be generated. think_s: from the end of the turn before
    until this one is due.
    """

    tokens: Int32Array
    output_tokens: int
    text: str = ""
    kept: int = 0
    think_s: float = 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Session:
    """Requests that follow each other; the first is due when the session arrives. kind: the class of its requests."""

    turns: tuple[Turn, ...]
    tenant: str = "default"
    kind: str = ""


class Workload(Protocol):
    """arrivals: [sessions] seconds from the start, rising; None: closed loop, where sessions follow each other."""

    arrivals: FloatArray | None

    def __len__(self) -> int:
        """How many sessions there are; a closed loop that outlasts them begins again, with fresh tokens."""
        ...

    def session(self, index: int) -> Session:
        """Session `index`; the same one whenever it is asked for."""
        ...


def prompt(turn: Turn, held: Int32Array) -> Int32Array:
    """What a turn submits, [prompt_tokens] int32. held: the prompt and the answer of the turn before; empty at first.

    A held part that is shorter than `kept` (the answer came out shorter) is taken whole.
    """
    kept = held if turn.kept == ALL else held[: turn.kept]
    return np.concatenate((kept, turn.tokens)) if len(kept) else turn.tokens


def prompts(session: Session, answers: Sequence[Int32Array]) -> list[Int32Array]:
    """The prompts of the first len(answers) turns of a session, given what was answered to each."""
    held, made = NO_TOKENS, []
    for turn, answer in zip(session.turns, answers, strict=False):
        made.append(prompt(turn, held))
        held = np.concatenate((made[-1], answer))
    return made
