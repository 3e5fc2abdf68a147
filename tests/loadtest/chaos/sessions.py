"""A small load of sessions for the chaos tests, and a driver without timing."""

from __future__ import annotations

import asyncio
from array import array
from collections.abc import Sequence
from time import monotonic

import numpy as np

from kvforge import AsyncClient, SamplingParams
from kvforge.loadtest.drive.outcome import FAILED, FINISHED, Outcome
from kvforge.loadtest.load.workload import ALL, NO_TOKENS, FloatArray, Session, Turn, prompt
from kvforge.protocol.errors import KvforgeError

VOCAB = 200
TIMEOUT_S = 60.0


class Sessions:
    """A `Workload` of `count` sessions, where each turn contains the whole conversation so far."""

    arrivals: FloatArray | None = None

    def __init__(self, count: int, turns: int, output_tokens: int) -> None:
        self._count, self._turns, self._output_tokens = count, turns, output_tokens

    def __len__(self) -> int:
        return self._count

    def session(self, index: int) -> Session:
        """See `Workload`."""
        draws = np.random.default_rng(index)
        first = [draws.integers(3, VOCAB, 20, np.int32), 0]
        rest = [[draws.integers(3, VOCAB, 5, np.int32), ALL] for _ in range(self._turns - 1)]
        turns = [
            Turn(tokens=tokens, kept=int(kept), output_tokens=self._output_tokens) for tokens, kept in [first, *rest]
        ]
        return Session(turns=tuple(turns))


def draw(session: int, turn: int) -> int:
    """Return the seed of a request."""
    return 1 + 100 * session + turn


async def drive(client: AsyncClient, load: Sessions, temperature: float) -> list[Outcome]:
    """Run all sessions at once."""
    made = await asyncio.gather(*(_session(client, load, index, temperature) for index in range(len(load))))
    return [outcome for outcomes in made for outcome in outcomes]


async def _session(client: AsyncClient, load: Sessions, index: int, temperature: float) -> Sequence[Outcome]:
    held, outcomes, start = NO_TOKENS, [], monotonic()
    for number, turn in enumerate(load.session(index).turns):
        asked = prompt(turn, held)
        outcome = Outcome(session=index, turn=number, due_s=monotonic() - start, asked_tokens=turn.output_tokens)
        outcomes.append(outcome)
        sampling = SamplingParams(
            temperature=temperature, seed=draw(index, number) if temperature else 0, ignore_eos=True
        )
        try:
            request = await client.submit(asked, max_tokens=turn.output_tokens, sampling=sampling, timeout_s=TIMEOUT_S)
            outcome.request_id = request.id
            tokens = (await request.result(TIMEOUT_S)).tokens
        except KvforgeError as error:
            outcome.state, outcome.code, outcome.message = FAILED, error.code, error.message
            break
        outcome.state, outcome.tokens, outcome.ended_s = FINISHED, array("i", tokens), monotonic() - start
        held = np.concatenate((asked, np.array(tokens, np.int32)))
    return outcomes
