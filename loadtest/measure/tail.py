"""Why requests were slow: the coordinator's explanations, and the time that the tail spent in each phase.

Invariant: the phases of a request add up to its latency from the intended arrival. The coordinator's phases are on its
clock, those before and after on ours.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from time import monotonic
from typing import Protocol

import numpy as np
import numpy.typing as npt

from kvforge.protocol.errors import KvforgeError
from kvforge.protocol.messages import Explanation, Timings

from ..drive.outcome import FINISHED, INTERRUPTED, UNSENT, Outcome
from .group import Document

Floats = npt.NDArray[np.float64]
# driver: from the intended arrival until it was sent. accepting: until the coordinator accepted it, including outages.
# served: the whole time of a server that reports no phases. paused: the stream was paused, which delays the end.
# delivery: the rest, the way back. The others are those of `messages.Timings`.
DRIVER, ACCEPTING, SERVED, PAUSED, DELIVERY = "driver", "accepting", "served", "paused", "delivery"
BEFORE, BETWEEN = ("queue", "prefill"), ("preempted", "stalled", "recovering")
PHASES = (DRIVER, ACCEPTING, *BEFORE, *BETWEEN, "decode", SERVED, PAUSED, DELIVERY)
COUNT = 10
NAMES_MAX = 100
ASK_S = 5.0
PERCENTILES = (90, 99)


class ExplainClient(Protocol):
    """The interface of `kvforge.AsyncClient` that is used here."""

    async def explain(self, *, request: int, timeout_s: float) -> Explanation:
        """Explain a request. Raises KvforgeError."""
        ...


async def slowest(client: ExplainClient | None, outcomes: Sequence[Outcome], count: int = COUNT) -> list[Document]:
    """Return the `count` slowest requests, failed and timed out ones included, the slowest first.

    Each is an entry of `tail` in `measure.document`, with its phases and the coordinator's explanation. The queries
    take at most 5 s in all; the explanation is "" if the coordinator has forgotten the request or never accepted it.

    Args:
        client: The connection for queries; None if the server cannot be queried.
        outcomes: The outcomes.
        count: The number of requests.
    """
    tried = [outcome for outcome in outcomes if outcome.state not in (UNSENT, INTERRUPTED) and outcome.ended_s >= 0]
    chosen = sorted(tried, key=_latency_s, reverse=True)[:count]
    until = monotonic() + ASK_S
    sentences = await asyncio.gather(*(_sentence(client, outcome.request_id, until) for outcome in chosen))
    return [_document(outcome, sentence) for outcome, sentence in zip(chosen, sentences, strict=True)]


def breakdown(outcomes: Sequence[Outcome]) -> Document:
    """Return the time by phase of finished requests: {"all", "p90", "p99"}, for requests at or above that latency.

    Each has {requests, at_least_ms, mean_ms, share: {phase: 0 to 1}, tenants: {name: {requests, mean_ms, share}},
    kinds: likewise}. A share is the mean over requests with equal weight. Tenants and kinds list the 100 most frequent
    ones, or none if there is only one. The result is empty if no request finished.
    """
    finished = [outcome for outcome in outcomes if outcome.state == FINISHED]
    if not finished:
        return {}
    latencies = np.array([_latency_s(outcome) for outcome in finished])
    spent = np.array([list(phases_s(outcome).values()) for outcome in finished])
    every = np.ones(latencies.size, np.bool_)
    found = {"all": every}
    found |= {f"p{p}": latencies >= np.percentile(latencies, p, method="higher") for p in PERCENTILES}
    tenants = np.array([outcome.tenant for outcome in finished])
    kinds = np.array([outcome.kind for outcome in finished])
    return {
        name: {
            **_part(latencies[mask], spent[mask]),
            "at_least_ms": float(latencies[mask].min()) * 1e3,
            "tenants": _by(tenants, latencies, spent, mask),
            "kinds": _by(kinds, latencies, spent, mask),
        }
        for name, mask in found.items()
    }


def phases_s(outcome: Outcome) -> dict[str, float]:
    """Return the seconds in each of PHASES; they add up to the time from the intended arrival to the end."""
    found = dict.fromkeys(PHASES, 0.0)
    sent_s = outcome.sent_s if outcome.sent_s >= 0 else outcome.ended_s
    found[DRIVER] = max(0.0, sent_s - outcome.due_s)
    left_s = max(0.0, outcome.ended_s - max(sent_s, outcome.due_s))
    served = {phase: _phase_us(outcome.timings, phase) / 1e6 for phase in (*BEFORE, *BETWEEN, "decode")}
    if outcome.timings.ended_us < 0 or not sum(served.values()):
        return found | {SERVED: left_s}
    found |= served
    # The coordinator's clock may count slightly more time than ours.
    too_much = sum(served.values()) / left_s if left_s else 0.0
    if too_much > 1:
        found |= {phase: seconds / too_much for phase, seconds in served.items()}
    left_s = max(0.0, left_s - sum(served.values()))
    for phase, seconds in ((ACCEPTING, outcome.accepted_s - sent_s), (PAUSED, outcome.timings.paused_us / 1e6)):
        found[phase] = min(left_s, max(0.0, seconds))
        left_s -= found[phase]
    found[DELIVERY] = left_s
    return found


def _phase_us(timings: Timings, phase: str) -> int:
    return int(getattr(timings, f"{phase}_us"))


def _latency_s(outcome: Outcome) -> float:
    return outcome.ended_s - outcome.due_s


async def _sentence(client: ExplainClient | None, request_id: int, until: float) -> str:
    """Return the coordinator's explanation in one line."""
    left_s = until - monotonic()
    if client is None or request_id <= 0 or left_s <= 0:
        return ""
    try:
        explanation = await asyncio.wait_for(client.explain(request=request_id, timeout_s=left_s), left_s)
    except (KvforgeError, TimeoutError):
        return ""  # the request was forgotten, or the coordinator is gone
    return "; ".join(explanation.sentences)


def _document(outcome: Outcome, sentence: str) -> Document:
    spent = phases_s(outcome)
    return {
        "request_id": outcome.request_id,
        "session": outcome.session,
        "turn": outcome.turn,
        "tenant": outcome.tenant,
        "kind": outcome.kind,
        "state": outcome.state,
        "due_s": outcome.due_s,
        "latency_ms": _latency_s(outcome) * 1e3,
        "sentence": sentence or outcome.message,
        "phases_ms": {phase: seconds * 1e3 for phase, seconds in spent.items() if seconds},
        "segments": _segments(outcome, spent),
    }


def _segments(outcome: Outcome, spent: dict[str, float]) -> list[Document]:
    """Return the phases in order, each once. Interruptions of decoding are placed at the longest gap between tokens.

    Only their duration is known, not their time.
    """
    gaps = np.diff(np.array(outcome.tokens_s))
    decoded_s = float(gaps[: int(np.argmax(gaps))].sum()) if gaps.size else 0.0
    first_s = min(decoded_s, spent["decode"])
    order: list[tuple[str, float]] = [(phase, spent[phase]) for phase in (DRIVER, ACCEPTING, *BEFORE)]
    held: list[tuple[str, float]] = [(phase, spent[phase]) for phase in BETWEEN if spent[phase] > 0]
    if held:
        order += [("decode", first_s), *held, ("decode", spent["decode"] - first_s)]
    else:
        order.append(("decode", spent["decode"]))
    order += [(phase, spent[phase]) for phase in (SERVED, PAUSED, DELIVERY)]
    segments, at_s = [], outcome.due_s
    for state, seconds in order:
        if seconds > 0:
            segments.append({"state": state, "from_s": at_s, "to_s": at_s + seconds})
            at_s += seconds
    return segments


def _part(latencies: Floats, spent: Floats) -> Document:
    """Return the breakdown of latencies ([requests] s) and times by phase ([requests, phases] s)."""
    share = (spent / np.maximum(latencies, 1e-9)[:, None]).mean(axis=0)
    return {
        "requests": int(latencies.size),
        "mean_ms": float(latencies.mean()) * 1e3,
        "share": dict(zip(PHASES, share.tolist(), strict=True)),
    }


def _by(names: npt.NDArray[np.str_], latencies: Floats, spent: Floats, mask: npt.NDArray[np.bool_]) -> Document:
    """Return the breakdown of the masked requests by name."""
    known, counts = np.unique(names[mask], return_counts=True)
    if len(np.unique(names)) < 2:
        return {}
    most = sorted(known[np.argsort(-counts, kind="stable")][:NAMES_MAX].tolist())
    masks = {name: mask & (names == name) for name in most}
    return {name: _part(latencies[own], spent[own]) for name, own in masks.items()}
