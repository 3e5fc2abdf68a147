"""The phases of requests: the slowest ones individually, and the time of all requests and of the tail by phase."""

from __future__ import annotations

from typing import Any

from .drawing import BLUE, GREEN, GREY, ORANGE, PURPLE, RED, Picture, draw, legend
from .number_format import number, percent

STATES = {
    "driver": "#a16207",
    "accepting": "#d4b483",
    "queue": GREY,
    "prefill": BLUE,
    "decode": GREEN,
    "preempted": RED,
    "stalled": "#ec6cb9",
    "paused": ORANGE,
    "recovering": PURPLE,
    "served": "#0d9488",
    "delivery": "#38bdf8",
}
OTHER = "#c084fc"
BAR = 0.68
SHARE_MIN = 1e-3  # smaller shares are invisible


def timeline(found: dict[str, Any]) -> Picture:
    """Draw a row for each request of the tail, the slowest first, from its intended arrival on."""
    tail = found["tail"]

    def draws(axes: Any) -> None:
        seen: dict[str, str] = {}
        for row, request in enumerate(tail):
            for segment in request.get("segments") or ():
                low, high, state = (
                    segment["from_s"] - request["due_s"],
                    segment["to_s"] - request["due_s"],
                    segment["state"],
                )
                colour = seen.setdefault(state, STATES.get(state, OTHER))
                axes.broken_barh([(low, high - low)], (row - BAR / 2, BAR), color=colour, linewidth=0)
        _rows(axes, [name(request) for request in tail], seen)
        axes.set_xlabel("seconds since the intended arrival")

    return draw(
        "slowest",
        "The slowest requests",
        alt="; ".join(f"{name(request)}: {_shares_text(request)}" for request in tail),
        caption="The phases of each request.",
        draws=draws,
        height_in=1.0 + 0.3 * len(tail),
    )


def divided(found: dict[str, Any]) -> Picture:
    """Draw a bar for all requests and for each part of the tail, divided into phases."""
    parts = list(found["why"].items())

    def draws(axes: Any) -> None:
        seen: dict[str, str] = {}
        for row, (_, part) in enumerate(parts):
            at = 0.0
            for state, share in part["share"].items():
                if share >= SHARE_MIN:
                    colour = seen.setdefault(state, STATES.get(state, OTHER))
                    axes.broken_barh([(100 * at, 100 * share)], (row - BAR / 2, BAR), color=colour, linewidth=0)
                    at += share
        _rows(axes, [which(part, each) for part, each in parts], seen)
        axes.set_xlim(0, 100)
        axes.set_xlabel("% of the time from the intended arrival to the end")

    return draw(
        "breakdown",
        "Time by phase",
        alt="; ".join(f"{which(part, each)}: {shares(each)}" for part, each in parts),
        caption="Finished requests with equal weight.",
        draws=draws,
        height_in=1.0 + 0.34 * len(parts),
    )


def which(part: str, each: dict[str, Any]) -> str:
    """Describe the requests of a part of the breakdown."""
    return "all finished" if part == "all" else f"{part}: {number(each['at_least_ms'])} ms or more"


def shares(each: dict[str, Any]) -> str:
    """List the shares in words, the largest first, without those below a thousandth."""
    there = sorted(((share, state) for state, share in each["share"].items() if share >= SHARE_MIN), reverse=True)
    return ", ".join(f"{state} {percent(share)}" for share, state in there)


def _rows(axes: Any, labels: list[str], seen: dict[str, str]) -> None:
    """Label each row from the top and each colour."""
    for state in (*STATES, *(state for state in seen if state not in STATES)):
        if state in seen:
            axes.broken_barh([], (0, 0), color=seen[state], label=state)
    axes.set_yticks(range(len(labels)), labels)
    axes.set_ylim(len(labels) - 0.5, -0.5)
    axes.grid(axis="y", visible=False)
    axes.set_xlim(left=0)
    legend(axes)


def name(request: dict[str, Any]) -> str:
    """Return the coordinator's request id, or else the session and its turn."""
    if request.get("request_id"):
        return f"request {request['request_id']}"
    return f"session {request.get('session', 0)}.{request.get('turn', 0)}"


def shares_ms(request: dict[str, Any]) -> dict[str, float]:
    """Return the time in each state, the longest first."""
    found: dict[str, float] = {}
    for segment in request.get("segments") or ():
        found[segment["state"]] = found.get(segment["state"], 0.0) + (segment["to_s"] - segment["from_s"]) * 1e3
    return dict(sorted(found.items(), key=lambda each: -each[1]))


def _shares_text(request: dict[str, Any]) -> str:
    return ", ".join(f"{state} {ms:,.0f} ms" for state, ms in shares_ms(request).items()) or "unknown"
