"""The slowest requests, each as a bar of what it waited for."""

from __future__ import annotations

from typing import Any

from .drawing import BLUE, GREEN, GREY, ORANGE, PURPLE, RED, Picture, draw, legend

STATES = {"queue": GREY, "prefill": BLUE, "decode": GREEN, "preempted": RED, "paused": ORANGE, "recovering": PURPLE}
OTHER = "#c084fc"
BAR = 0.68


def timeline(found: dict[str, Any]) -> Picture:
    """A row for each request of the tail, the slowest first; its time begins where it was meant to be sent."""
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
        for state in (*STATES, *(state for state in seen if state not in STATES)):
            if state in seen:
                axes.broken_barh([], (0, 0), color=seen[state], label=state)
        axes.set_yticks(range(len(tail)), [f"{name(request)}" for request in tail])
        axes.invert_yaxis()
        axes.grid(axis="y", visible=False)
        axes.set_xlim(left=0)
        axes.set_xlabel("seconds since it was meant to be sent")
        legend(axes)

    return draw(
        "slowest",
        "The slowest requests",
        alt="; ".join(f"{name(request)}: {_said(request)}" for request in tail),
        caption="What each waited for, and what worked for it.",
        draws=draws,
        height_in=1.0 + 0.3 * len(tail),
    )


def name(request: dict[str, Any]) -> str:
    """The coordinator's number, or where it has none the session and its turn."""
    if request.get("request_id"):
        return f"request {request['request_id']}"
    return f"session {request.get('session', 0)}.{request.get('turn', 0)}"


def shares_ms(request: dict[str, Any]) -> dict[str, float]:
    """How long it was in each state, longest first."""
    found: dict[str, float] = {}
    for segment in request.get("segments") or ():
        found[segment["state"]] = found.get(segment["state"], 0.0) + (segment["to_s"] - segment["from_s"]) * 1e3
    return dict(sorted(found.items(), key=lambda each: -each[1]))


def _said(request: dict[str, Any]) -> str:
    return ", ".join(f"{state} {ms:,.0f} ms" for state, ms in shares_ms(request).items()) or "nothing is known"
