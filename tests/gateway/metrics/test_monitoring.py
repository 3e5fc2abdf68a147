"""The files in deploy/monitoring/ for Prometheus and Grafana use exported names, and work as documented."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest
import yaml

from kvforge.gateway.metrics.exposition import GATEWAY, names_of
from kvforge.gateway.metrics.service import SERVICE
from tests.gateway.metrics import dashboard, documented

FOLDER = dashboard.FILE.parent
NAME = re.compile(r"\b(?:kvforge_|vllm:)\w+")
EXPORTED = {name for metric in SERVICE for name in names_of(metric)} | {
    name for metric, (kind, _, _) in GATEWAY.items() for name in names_of(metric, kind)
}
LABELS = {metric.name: metric.labels for metric in SERVICE} | {name: labels for name, (_, _, labels) in GATEWAY.items()}
ALERTS = documented.alerts()
TESTS: dict[str, Any] = yaml.safe_load((FOLDER / "alerts_test.yml").read_text())


def expressions() -> list[str]:
    document = json.loads(dashboard.FILE.read_text())
    found = [target["expr"] for panel in document["panels"] for target in panel.get("targets", ())]
    return found + [variable.get("definition", "") for variable in document["templating"]["list"]]


def check(expression: str) -> None:
    """Check that each name is exported, and that each selected or grouped label exists on an exported name."""
    names = NAME.findall(expression)
    assert set(names) <= EXPORTED, f"{expression}: {set(names) - EXPORTED} is not exported"
    base = [re.sub(r"_(bucket|count|sum)$", "", name) for name in names]
    known = {"job", "instance", "le"}.union(
        *(LABELS.get(name, LABELS.get(b, ())) for name, b in zip(names, base, strict=True))
    )
    asked = set(re.findall(r"(\w+)\s*=~?\s*\"", expression))
    for group in re.findall(r"\b(?:by|on)\s*\(([^)]*)\)", expression):
        asked |= {label.strip() for label in group.split(",")}
    assert asked <= known, f"{expression}: {asked - known}"


def test_the_dashboard_asks_for_nothing_that_is_not_exported() -> None:
    asked = expressions()
    assert sum(bool(NAME.search(expression)) for expression in asked) > 50
    for expression in asked:
        check(expression)


def test_the_check_sees_a_name_and_a_label_that_are_not_exported() -> None:
    for wrong in (
        "rate(kvforge_nothing_total[5m])",
        'kvforge_up{tenant="a"}',
        "sum by (worker) (kvforge_requests_running)",
    ):
        with pytest.raises(AssertionError):
            check(wrong)


def test_the_dashboard_is_the_one_that_is_written_by_its_module() -> None:
    assert dashboard.FILE.read_text() == dashboard.text(), "write it anew: python -m tests.gateway.metrics.dashboard"


def test_panels_lie_beside_each_other() -> None:
    taken: set[tuple[int, int]] = set()
    panels = json.loads(dashboard.FILE.read_text())["panels"]
    assert len({panel["id"] for panel in panels}) == len(panels)
    for panel in panels:
        at = panel["gridPos"]
        cells = {(x, y) for x in range(at["x"], at["x"] + at["w"]) for y in range(at["y"], at["y"] + at["h"])}
        assert not cells & taken and at["x"] + at["w"] <= dashboard.WIDTH, panel["title"]
        taken |= cells


def test_alerts_ask_for_nothing_that_is_not_exported_and_each_is_tested_both_ways() -> None:
    for rule in ALERTS:
        check(rule["expr"])
    raised = {name: set() for name in (False, True)}  # type: dict[bool, set[str]]
    for test in TESTS["tests"]:
        for series in test["input_series"]:
            check(series["series"])
        for case in test["alert_rule_test"]:
            raised[bool(case["exp_alerts"])].add(case["alertname"])
    assert raised[True] == raised[False] == {rule["alert"] for rule in ALERTS}


@pytest.mark.parametrize("arguments", [["check", "config", "prometheus.yml"], ["test", "rules", "alerts_test.yml"]])
def test_promtool_takes_them(arguments: list[str]) -> None:
    if shutil.which("promtool") is None:
        pytest.skip("promtool is not installed (Debian: apt-get install prometheus)")
    run = subprocess.run(["promtool", *arguments], cwd=FOLDER, capture_output=True, text=True, check=False)
    assert run.returncode == 0, run.stdout + run.stderr


def test_the_page_about_metrics_is_of_this_code() -> None:
    anew = "write it anew: python -m tests.gateway.metrics.documented"
    assert documented.FILE.read_text() == documented.document(), anew


def test_what_promtool_would_be_given_is_there() -> None:
    assert {path.name for path in Path(FOLDER).iterdir()} == {
        "alerts.yml", "alerts_test.yml", "grafana.json", "prometheus.yml"
    }  # fmt: skip
