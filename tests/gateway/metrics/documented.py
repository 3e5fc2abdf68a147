"""python -m tests.gateway.metrics.documented: generate docs/metrics.md from the code."""

from __future__ import annotations

import sys
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import yaml

from kvforge.gateway.metrics.exposition import GATEWAY
from kvforge.gateway.metrics.service import SERVICE
from kvforge.gateway.metrics.shared import SECONDS
from kvforge.gateway.metrics.snapshot import HISTOGRAM
from kvforge.gateway.metrics.vllm import VLLM
from kvforge.protocol.meters import STEP_TIME, TENANT_ROWS, TENANT_TIMES

ROOT = Path(__file__).parents[3]
FILE, ALERTS = ROOT / "docs" / "metrics.md", ROOT / "deploy" / "monitoring" / "alerts.yml"
HEAD = f"""# Metrics

A gateway exports metrics of the service to Prometheus at `/metrics`, as text or as OpenMetrics, as the request
prefers. It reads the coordinator's shared tables and sends it no message: a scrape costs the service nothing and works
while the service hangs. The numbers of stored objects come from their database.

If gateway.toml has `[keys]`, the caller needs the right `see`. The coordinator has to run on
the gateway's machine; for a coordinator behind a network (`endpoint`), a gateway beside that coordinator exports its
metrics, and this one exports its own requests only.

In `deploy/monitoring/`: `prometheus.yml` (what to scrape), `grafana.json` (a dashboard to import), `alerts.yml`.

- Numbers of the service are a snapshot, at most a second old; numbers of requests are exact to the token.
- Counters continue across restarts of the coordinator. They reset when its journal is discarded.
- While no coordinator runs, `kvforge_up` is 0 and no other metric of the service is exported.
- The first {TENANT_ROWS} tenants (those of `[quotas]` first) have their own series; all others, including forgotten
  ones, are `tenant="other"`.
- Several gateway processes on one port count together: each exports the sum.
- Scrape one gateway of each coordinator: all export the same numbers of the service.
"""
VLLM_HEAD = """
## vLLM's names

If vLLM has a metric with the same meaning, the number is also exported under vLLM's name, with the labels `model_name`
and `engine` (always 0), summed over all tenants: dashboards for vLLM work. Buckets may be finer than vLLM's.

| vLLM's | ours |
|---|---|
"""
NOT_THE_SAME = """
Not exported, since nothing here has the same meaning: `vllm:iteration_tokens_total` (it counts a prompt when its last
chunk is computed), `vllm:request_success_total` for reasons other than stop, length and abort (`cancelled` here), and
all metrics of LoRA and of accepted drafts by position. Two metrics are counted at other times:
`vllm:request_queue_time_seconds` here when a request first runs, in vLLM when it ends;
`vllm:e2e_request_latency_seconds` ends with the coordinator's last token, in vLLM with the API server's.
"""


def document() -> str:
    """Return the page."""
    service = ((m.name, m.kind, m.labels, m.text) for m in SERVICE)
    gateway = ((name, kind, labels, text) for name, (kind, text, labels) in GATEWAY.items())
    parts = [HEAD, "\n## The service\n", *_table(service), "\n## The gateway\n", *_table(gateway), VLLM_HEAD]
    parts += [f"| `{m.name}` | {_same(m.name, m.same)} |\n" for m in VLLM]
    parts += [NOT_THE_SAME, "\n## Buckets\n\nIn seconds, or tokens.\n\n| metric | up to |\n|---|---|\n"]
    parts += [f"| `{name}` | {', '.join(f'{bound:g}' for bound in bounds)} |\n" for name, bounds in _bounds()]
    parts += ["\n## Alerts\n\n| alert | severity | for | message |\n|---|---|---|---|\n"]
    parts += [
        f"| {rule['alert']} | {rule['labels']['severity']} | {rule.get('for', '-')} | {_words(rule['annotations'])} |\n"
        for rule in alerts()
    ]
    return "".join(parts)


def alerts() -> list[dict[str, Any]]:
    """Return the alert rules."""
    (group,) = yaml.safe_load(ALERTS.read_text())["groups"]
    rules: list[dict[str, Any]] = group["rules"]
    return rules


def _table(rows: Iterable[tuple[str, str, tuple[str, ...], str]]) -> Iterator[str]:
    yield "\n| name | kind | labels | meaning |\n|---|---|---|---|\n"
    for name, kind, labels, text in rows:
        yield f"| `{name}` | {kind} | {', '.join(labels)} | {text} |\n"


def _same(name: str, same: str) -> str:
    if name == "vllm:kv_cache_usage_perc":
        return f"`{same}`: (referenced + quarantined) / all"
    if name == "vllm:num_preemptions_total":
        return f'`{same}{{cause="blocks"}}`'
    if name == "vllm:kv_offload_total_bytes_total":
        return f"`{same.replace(' and ', '`, `')}`"
    return f"`{same}`"


def _bounds() -> Iterator[tuple[str, tuple[float, ...]]]:
    by_start = dict(zip([m.name for m in SERVICE if m.kind == HISTOGRAM], (*TENANT_TIMES, STEP_TIME), strict=True))
    for name, what in by_start.items():
        scale = 1e6 if name.endswith("_seconds") else 1
        yield name, tuple(bound / scale for bound in what.bounds)
    yield "kvforge_http_request_seconds", SECONDS


def _words(annotations: dict[str, str]) -> str:
    said = annotations["summary"].replace("{{ $labels.instance }}: ", "")
    for how in ("", "Duration", "Percentage", "1024"):
        said = said.replace(f"{{{{ $value | humanize{how} }}}}", "…")
    return said + (f". {annotations['description']}" if "description" in annotations else "")


if __name__ == "__main__":
    FILE.write_text(document())
    sys.exit(0)
