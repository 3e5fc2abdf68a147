"""Real processes are killed and stopped; no request is lost, duplicated, changed or left behind."""

from __future__ import annotations

import os

from tools.chaos.driver import Driver

MINUTES = 1.0
SEED = "KVFORGE_CHAOS_SEED"


def test_nothing_is_lost_whatever_is_killed() -> None:
    said: list[str] = []
    report = Driver(MINUTES, int(os.environ.get(SEED, "16")), said.append).run()
    assert report["faults"] == [], "\n".join([*said, *report["faults"]])
    assert report["requests"]["finished"] > 0 and report["requests"]["tokens_compared"] > 0
    kinds = {name.split()[0] for name in report["interruptions"]}
    assert {"kill", "stop", "term"} <= kinds, f"seed {report['seed']} has {report['interruptions']} only"
