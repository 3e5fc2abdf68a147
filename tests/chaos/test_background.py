"""Background responses and a batch survive the deaths of all processes: `background` in small."""

from __future__ import annotations

from tests.chaos import background


def test_no_response_and_no_line_of_a_batch_is_lost_doubled_or_changed() -> None:
    report = background.run(100, 1, postgres=False, log=print)
    assert report["faults"] == []
    assert sum(report["killed"].values()) == 4 and report["ended"] == {"incomplete": 100}
