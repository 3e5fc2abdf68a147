"""Real processes are killed and stopped; no request is lost, duplicated, changed or left behind."""

from __future__ import annotations

import os

from tools.chaos.driver import Driver

MINUTES = 1.0
DRAFT_MINUTES = 0.1  # start and end take half a minute
SEED = "KVFORGE_CHAOS_SEED"


def test_nothing_is_lost_whatever_is_killed() -> None:
    said: list[str] = []
    report = Driver(MINUTES, int(os.environ.get(SEED, "16")), said.append).run()
    assert report["faults"] == [], "\n".join([*said, *report["faults"]])
    assert report["requests"]["finished"] > 0 and report["requests"]["tokens_compared"] > 0
    kinds = {name.split()[0] for name in report["interruptions"]}
    assert {"kill", "stop", "term"} <= kinds, f"seed {report['seed']} has {report['interruptions']} only"


def test_nothing_is_lost_or_changed_with_a_draft_model() -> None:
    logged: list[str] = []
    report = Driver(DRAFT_MINUTES, 5, logged.append, drafts=4, drafter="model", pause_s=0.8).run()
    assert report["faults"] == [], "\n".join([*logged, *report["faults"]])
    assert report["requests"]["tokens_compared"] > 0
    assert report["drafts"]["accepted_by_last_workers"] < report["drafts"]["drafted_by_last_workers"]
    assert report["drafts"]["accepted_by_last_workers"] > 0
    struck = [name for name in report["interruptions"] if name in ("kill w0", "kill w1", "term w0", "term w1")]
    assert struck, f"no worker was ended: {report['interruptions']}"
