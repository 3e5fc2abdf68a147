"""The hits of an unlimited prefix cache on the prompts that were actually sent."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence

import numpy as np

from kvforge.loadtest.drive.outcome import Outcome
from kvforge.loadtest.load.infinite import InfiniteCache
from kvforge.loadtest.load.workload import Workload, prompts


def infinite(workload: Workload, outcomes: Sequence[Outcome], block_size: int) -> tuple[int, int]:
    """Return (prompt tokens, hits of an unlimited cache), in the order in which the requests were sent.

    Answers are cached too, except for the last token, which has no KV: the next turn of a session begins with them.
    """
    cache = InfiniteCache(block_size)
    answers: dict[int, list[Outcome]] = defaultdict(list)
    for outcome in outcomes:
        if outcome.sent_s >= 0:
            answers[outcome.session].append(outcome)
    rows = []
    for index, turns in answers.items():
        turns.sort(key=lambda outcome: outcome.turn)
        came = [np.array(outcome.tokens, np.int32) for outcome in turns]
        rows += list(zip(turns, prompts(workload.session(index), came), came, strict=True))
    for outcome, prompt, answer in sorted(rows, key=lambda row: row[0].sent_s):
        cache.look_up(prompt, outcome.tenant)
        cache.hold(np.concatenate((prompt, answer[:-1])), outcome.tenant)
    return cache.prompt_tokens, cache.hit_tokens
