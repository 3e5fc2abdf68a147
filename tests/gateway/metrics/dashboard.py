"""python -m tests.gateway.metrics.dashboard: generate deploy/monitoring/grafana.json, which Grafana imports."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any, NamedTuple

FILE = Path(__file__).parents[3] / "deploy" / "monitoring" / "grafana.json"
SOURCE = {"type": "prometheus", "uid": "${source}"}
ALL = 'job="$job", instance="$instance"'
TENANT, WORKER = f'{ALL}, tenant=~"$tenant|"', f'{ALL}, worker=~"$worker"'
RATE = "$__rate_interval"
WIDTH, HEIGHT = 24, 8


class Panel(NamedTuple):
    """kind: stat, timeseries or heatmap. queries: expression by legend. more: additional field configuration."""

    title: str
    queries: dict[str, str]
    unit: str = "short"
    kind: str = "timeseries"
    width: int = 8
    text: str = ""
    stacked: bool = False


def rate(name: str, labels: str = TENANT) -> str:
    return f"rate({name}{{{labels}}}[{RATE}])"


def quantiles(name: str, labels: str = TENANT, by: str = "") -> dict[str, str]:
    found = {}
    for quantile in (0.5, 0.95, 0.99):
        legend = f"{{{{{by}}}}} p{quantile * 100:g}" if by else f"p{quantile * 100:g}"
        group = f"le, {by}" if by else "le"
        found[legend] = f"histogram_quantile({quantile}, sum by ({group}) ({rate(f'{name}_bucket', labels)}))"
    return found


def slowest(name: str, labels: str, by: str) -> str:
    return f"histogram_quantile(0.95, sum by (le, {by}) ({rate(f'{name}_bucket', labels)}))"


def by(label: str, expression: str) -> dict[str, str]:
    return {f"{{{{{label}}}}}": f"sum by ({label}) ({expression})"}


def gauge(name: str, labels: str = ALL) -> str:
    return f"{name}{{{labels}}}"


HIT = f"sum({rate('kvforge_prefix_hit_tokens_total')}) / sum({rate('kvforge_prefix_queried_tokens_total')})"
READY = f'{WORKER}, state="ready"'
MEMORY = gauge("kvforge_worker_memory_bytes", WORKER)
HELD = gauge("kvforge_blocks", f'{WORKER}, state=~"referenced|quarantined"')
ROWS: dict[str, tuple[Panel, ...]] = {
    "At a glance": (
        Panel("Coordinator", {"": gauge("kvforge_up")}, kind="stat", width=3, text="1 while its process runs."),
        Panel("Workers ready", {"": f"sum({gauge('kvforge_worker_state', READY)})"}, kind="stat", width=3),
        Panel("Running", {"": f"sum({gauge('kvforge_requests_running', TENANT)})"}, kind="stat", width=3),
        Panel("Waiting", {"": f"sum({gauge('kvforge_requests_waiting', TENANT)})"}, kind="stat", width=3),
        Panel("Tokens per second", {"": f"sum({rate('kvforge_generated_tokens_total')})"}, kind="stat", width=3),
        Panel("Prefix cache hits", {"": HIT}, "percentunit", "stat", 3),
        Panel("Blocks in use", {"": f"sum({HELD}) / sum({gauge('kvforge_blocks', WORKER)})"}, "percentunit", "stat", 3),
        Panel("Model", {"{{model}}": gauge("kvforge_model_info")}, kind="stat", width=3),
    ),
    "Latency": (
        Panel("Time to first token", quantiles("kvforge_time_to_first_token_seconds"), "s"),
        Panel("Time between tokens", quantiles("kvforge_inter_token_seconds"), "s"),
        Panel("End to end", quantiles("kvforge_request_seconds"), "s"),
        Panel("Time in the queue", quantiles("kvforge_request_queue_seconds"), "s"),
        Panel(
            "Time to first token by tenant, p95",
            {"{{tenant}}": slowest("kvforge_time_to_first_token_seconds", TENANT, "tenant")},
            "s",
        ),
        Panel(
            "Time to first token",
            {"{{le}}": f"sum by (le) (increase(kvforge_time_to_first_token_seconds_bucket{{{TENANT}}}[{RATE}]))"},
            "s", "heatmap",
        ),
    ),
    "Requests and tokens": (
        Panel("Running and waiting", {
            "running": f"sum({gauge('kvforge_requests_running', TENANT)})",
            "waiting": f"sum({gauge('kvforge_requests_waiting', TENANT)})",
        }),
        Panel("Ended, by reason", by("reason", rate("kvforge_requests_ended_total")), "reqps", stacked=True),
        Panel("Accepted and refused", {
            "accepted": f"sum({rate('kvforge_requests_accepted_total')})",
            "refused": rate("kvforge_requests_refused_total", ALL),
        }, "reqps"),
        Panel("Generated tokens by tenant", by("tenant", rate("kvforge_generated_tokens_total")), stacked=True),
        Panel("Tokens", {
            "prompts": f"sum({rate('kvforge_prefilled_tokens_total')})",
            "generated": f"sum({rate('kvforge_generated_tokens_total')})",
            "computed": rate("kvforge_computed_tokens_total", ALL),
            "recomputed": f"sum({rate('kvforge_recomputed_tokens_total')})",
        }),
        Panel("Waiting by tenant", by("tenant", gauge("kvforge_requests_waiting", TENANT)), stacked=True),
    ),
    "Cache": (
        Panel("Blocks by state", by("state", gauge("kvforge_blocks", WORKER)), stacked=True),
        Panel("Prefix cache hits by tenant", {
            "{{tenant}}": f"sum by (tenant) ({rate('kvforge_prefix_hit_tokens_total')})"
            f" / sum by (tenant) ({rate('kvforge_prefix_queried_tokens_total')})",
        }, "percentunit"),
        Panel("Blocks by tenant", by("tenant", gauge("kvforge_tenant_blocks", TENANT)), stacked=True),
        Panel("Preemptions, by cause", by("cause", rate("kvforge_preemptions_total")), "ops"),
        Panel("Blocks allocated and freed", {
            "allocated": f"sum({rate('kvforge_blocks_allocated_total', WORKER)})",
            "freed": f"sum({rate('kvforge_blocks_freed_total', WORKER)})",
        }, "ops"),
        Panel("Sequences", {
            "sequences": gauge("kvforge_sequences"),
            "evicted per second": rate("kvforge_sequences_evicted_total", ALL),
        }),
    ),
    "Workers": (
        Panel("Step", quantiles("kvforge_step_seconds", WORKER, "worker"), "s"),
        Panel("Requests", by("worker", gauge("kvforge_worker_requests_running", WORKER)), stacked=True),
        Panel("Memory by purpose", {"{{worker}} {{purpose}}": MEMORY}, "bytes", stacked=True),
        Panel("State", {"{{worker}} {{state}}": f"{gauge('kvforge_worker_state', WORKER)} == 1"}),
        Panel("Registered, returned, left, lost", {
            name: f"increase(kvforge_workers_{name}_total{{{ALL}}}[{RATE}])"
            for name in ("registered", "returned", "left", "lost")
        }),
        Panel("Steps per second", {"steps": rate("kvforge_steps_total", ALL)}, "ops"),
    ),
    "Coordinator": (
        Panel("Loop iterations per second", {"iterations": rate("kvforge_turns_total", ALL)}, "ops"),
        Panel("Journal since the last snapshot", {"bytes": gauge("kvforge_journal_bytes")}, "bytes"),
        Panel("Restarts", {"restarts": gauge("kvforge_coordinator_restarts_total")}),
        Panel("Age of the metrics", {"age": gauge("kvforge_published_age_seconds")}, "s"),
        Panel("Connections", {"clients": gauge("kvforge_clients")}),
        Panel("Paused streams", {"paused per second": rate("kvforge_streams_paused_total", ALL)}, "ops"),
    ),
    "HTTP": (
        Panel("Requests by path", by("path", rate("kvforge_http_requests_total", ALL)), "reqps", stacked=True),
        Panel("Requests by status", by("status", rate("kvforge_http_requests_total", ALL)), "reqps", stacked=True),
        Panel("Open requests", {"open": gauge("kvforge_http_requests_open")}),
        Panel("Duration by path, p95", {
            "{{path}}": slowest("kvforge_http_request_seconds", ALL, "path"),
        }, "s"),
        Panel("Bytes per second", {
            "received": rate("kvforge_http_received_bytes_total", ALL),
            "sent": rate("kvforge_http_sent_bytes_total", ALL),
        }, "Bps"),
    ),
}  # fmt: skip


def panel(number: int, what: Panel, x: int, y: int, height: int) -> dict[str, Any]:
    """Return a panel in Grafana's format."""
    targets = [
        {
            "datasource": SOURCE, "refId": chr(ord("A") + at), "expr": expression, "legendFormat": legend or "__auto",
            **({"format": "heatmap"} if what.kind == "heatmap" else {}),
        }
        for at, (legend, expression) in enumerate(what.queries.items())
    ]  # fmt: skip
    custom = {"fillOpacity": 20, "stacking": {"mode": "normal" if what.stacked else "none"}, "showPoints": "never"}
    options: dict[str, Any] = {"tooltip": {"mode": "multi"}, "legend": {"displayMode": "list", "placement": "bottom"}}
    if what.kind == "stat":
        custom, name = {}, what.title == "Model"
        options = {"reduceOptions": {"calcs": ["lastNotNull"]}, "textMode": "name" if name else "value"}
    elif what.kind == "heatmap":
        custom, options = {}, {"calculate": False, "yAxis": {"unit": what.unit}, "tooltip": {"mode": "single"}}
    return {
        "id": number,
        "type": what.kind,
        "title": what.title,
        "description": what.text,
        "datasource": SOURCE,
        "gridPos": {"x": x, "y": y, "w": what.width, "h": height},
        "targets": targets,
        "fieldConfig": {"defaults": {"unit": what.unit, "min": 0, "custom": custom}, "overrides": []},
        "options": options,
    }


def variable(name: str, query: str, *, several: bool = False) -> dict[str, Any]:
    """Return a variable for the top of the page."""
    return {
        "name": name,
        "type": "query",
        "datasource": SOURCE,
        "query": {"query": query, "refId": name},
        "definition": query,
        "refresh": 2,
        "sort": 1,
        "multi": several,
        "includeAll": several,
        **({"allValue": ".*", "current": {"text": "All", "value": "$__all"}} if several else {}),
    }


def dashboard() -> dict[str, Any]:
    """Return the whole dashboard."""
    panels: list[dict[str, Any]] = []
    y = 0
    for title, row in ROWS.items():
        place = {"x": 0, "y": y, "w": WIDTH, "h": 1}
        panels.append({"id": len(panels) + 1, "type": "row", "title": title, "gridPos": place, "panels": []})
        y, x = y + 1, 0
        height = HEIGHT // 2 if row[0].kind == "stat" else HEIGHT
        for what in row:
            if x + what.width > WIDTH:
                x, y = 0, y + height
            panels.append(panel(len(panels) + 1, what, x, y, height))
            x += what.width
        y += height
    own = '{job="$job", instance="$instance"}'
    source = {"name": "source", "type": "datasource", "query": "prometheus", "label": "Prometheus"}
    return {
        "title": "kvforge",
        "uid": "kvforge",
        "tags": ["kvforge", "llm"],
        "schemaVersion": 39,
        "editable": True,
        "graphTooltip": 1,
        "refresh": "30s",
        "time": {"from": "now-1h", "to": "now"},
        "templating": {
            "list": [
                source,
                variable("job", "label_values(kvforge_up, job)"),
                variable("instance", 'label_values(kvforge_up{job="$job"}, instance)'),
                variable("tenant", f"label_values(kvforge_requests_accepted_total{own}, tenant)", several=True),
                variable("worker", f"label_values(kvforge_worker_state{own}, worker)", several=True),
            ]
        },
        "panels": panels,
    }


def text() -> str:
    """The file."""
    return json.dumps(dashboard(), indent=1) + "\n"


if __name__ == "__main__":
    FILE.write_text(text())
    sys.exit(0)
