"""Conversations go on through the deaths of all processes: `conversations` in small."""

from __future__ import annotations

from tests.chaos import conversations


def test_no_turn_is_lost_doubled_or_changed() -> None:
    report = conversations.run(0.25, 3, postgres=False, log=print)
    assert report["faults"] == []
    assert sum(report["killed"].values()) > 0 and report["talks"] > 0 and report["turns"] > report["talks"]
