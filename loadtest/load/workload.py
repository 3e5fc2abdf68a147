"""A workload: sessions of one or more requests, determined by a seed before the first is sent.

Invariant: session `index` is the same in every process and in any order of access, so driver processes share a workload
by sharing its options.
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

    Attributes:
        tokens: [new] int32, the tokens after the kept ones.
        output_tokens: The number of tokens to generate.
        text: The new tokens as text for a server that takes text, or "".
        kept: How many tokens of the session (the previous prompt and the actual answer) the prompt starts with; ALL for
            everything.
        think_s: The pause from the end of the previous turn until this one is due.
    """

    tokens: Int32Array
    output_tokens: int
    text: str = ""
    kept: int = 0
    think_s: float = 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Session:
    """Sequential requests; the first is due when the session arrives. `kind` is their class."""

    turns: tuple[Turn, ...]
    tenant: str = "default"
    kind: str = ""


class Workload(Protocol):
    """The sessions of a load.

    Attributes:
        arrivals: [sessions] seconds from the start, ascending; None for a closed loop.
    """

    arrivals: FloatArray | None

    def __len__(self) -> int:
        """Return the number of sessions; a closed loop that outlasts them repeats them with fresh tokens."""
        ...

    def session(self, index: int) -> Session:
        """Return session `index`, always the same."""
        ...


def prompt(turn: Turn, held: Int32Array) -> Int32Array:
    """Return the prompt of a turn, [prompt_tokens] int32.

    Args:
        turn: The turn.
        held: The prompt and the answer of the previous turn; empty at first. If it is shorter than `kept`, because the
            answer was shorter, all of it is used.
    """
    kept = held if turn.kept == ALL else held[: turn.kept]
    return np.concatenate((kept, turn.tokens)) if len(kept) else turn.tokens


def prompts(session: Session, answers: Sequence[Int32Array]) -> list[Int32Array]:
    """Return the prompts of the first len(answers) turns of a session, given the answer to each."""
    held, made = NO_TOKENS, []
    for turn, answer in zip(session.turns, answers, strict=False):
        made.append(prompt(turn, held))
        held = np.concatenate((made[-1], answer))
    return made
