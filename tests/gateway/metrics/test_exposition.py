"""Contents of a scrape: every number in its place, in both formats, and nothing without the caller's right."""

from __future__ import annotations

import re
import shutil
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest
from prometheus_client.core import Metric as Family
from prometheus_client.openmetrics.parser import text_string_to_metric_families as parse_openmetrics
from prometheus_client.parser import text_string_to_metric_families as parse_text
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.testclient import TestClient

from kvforge.gateway.metrics.exposition import GATEWAY, names_of
from kvforge.gateway.metrics.routes import Source, routes
from kvforge.gateway.metrics.service import SERVICE
from kvforge.gateway.metrics.shared import Counts
from kvforge.gateway.metrics.snapshot import COUNTER, HISTOGRAM
from kvforge.gateway.metrics.vllm import VLLM
from kvforge.gateway.storage import Operation, Result, TenantUsage, Usage
from kvforge.protocol.errors import NotAllowed, StorageFailed
from kvforge.protocol.layout import BLOCK_KINDS
from kvforge.protocol.meters import GAP, HIT, RUNNING, ServiceInfo
from kvforge.protocol.tables import TablesWriter
from tests.gateway.metrics.conftest import FACTS, put

OPENMETRICS = {"accept": "application/openmetrics-text; version=1.0.0; charset=utf-8"}


class Tenants:
    """A storage of two tenants."""

    def __init__(self, *, exists: bool = True, fails: bool = False) -> None:
        self.exists, self._fails, self.reason = exists, fails, ""

    async def apply(self, *operations: Operation) -> list[Result]:
        assert self.exists and len(operations) == 1 and isinstance(operations[0], Usage)
        if self._fails:
            raise StorageFailed("here", "is away", "try again")
        return [[TenantUsage("a", 2, 300, 1), TenantUsage("b", 1, 50, 0)]]

    async def close(self) -> None: ...


STORED = Tenants()
Samples = dict[tuple[str, frozenset[tuple[str, str]]], float]


def client(folder: Path, may_see_tenants: Callable[[Request], bool] | bool = True) -> TestClient:
    counts = Counts(["/v1/models"])
    counts.began()
    counts.ended("/v1/models", 200, 0.02, 7, 8)
    return TestClient(Starlette(routes=routes(Source(folder), counts, may_see_tenants=may_see_tenants, storage=STORED)))


def samples(families: list[Family]) -> Samples:
    found = {(s.name, frozenset(s.labels.items())): s.value for family in families for s in family.samples}
    assert len(found) == sum(len(family.samples) for family in families), "a series is there twice"
    return found


def scraped(folder: Path, may_see_tenants: bool = True) -> Samples:
    return samples(list(parse_text(client(folder, may_see_tenants).get("/metrics").text)))


def value(found: Samples, name: str, **labels: str) -> float:
    return found[name, frozenset(labels.items())]


def test_every_metric_is_told_in_both_formats_and_they_agree(tables: TablesWriter) -> None:
    folder = tables.path.parent
    text = client(folder).get("/metrics")
    assert text.headers["content-type"].startswith("text/plain; version=")
    other = client(folder).get("/metrics", headers=OPENMETRICS)
    assert other.headers["content-type"].startswith("application/openmetrics-text; version=1")
    assert other.text.endswith("# EOF\n")
    found, again = samples(list(parse_text(text.text))), samples(list(parse_openmetrics(other.text)))
    age = ("kvforge_published_age_seconds", frozenset())
    assert found.keys() == again.keys()
    assert {key: v for key, v in found.items() if key != age} == {key: v for key, v in again.items() if key != age}
    told = {name for name, _ in found}
    every = {name for metric in (*SERVICE, *VLLM) for name in names_of(metric)}
    every |= {name for metric, (kind, _, _) in GATEWAY.items() for name in names_of(metric, kind)}
    assert told == every


def test_numbers_are_where_they_belong(tables: TablesWriter) -> None:
    found = scraped(tables.path.parent)
    b = FACTS.tenants[1]
    assert value(found, "kvforge_up") == 1
    assert [value(found, "kvforge_requests_running", tenant=t) for t in ("other", "a", b)] == [
        RUNNING * i for i in (1, 2, 3)
    ]
    assert [value(found, "kvforge_tenant_blocks", tenant=t) for t in ("other", "a", b)] == [1, 20, 300]
    assert [value(found, "kvforge_tenant_host_blocks", tenant=t) for t in ("other", "a", b)] == [4, 50, 600]
    assert [value(found, "kvforge_tenant_disk_blocks", tenant=t) for t in ("other", "a", b)] == [7, 80, 900]
    assert value(found, "kvforge_prefix_hit_tokens_total", tenant="a") == 2 * HIT
    assert [value(found, "kvforge_blocks", worker="w0", state=s) for s in ("free", "quarantined")] == [2, 5]
    kinds = [value(found, "kvforge_blocks_by_kind", worker="w0", kind=kind) for kind in BLOCK_KINDS]
    assert kinds == [1 - 2 - (11 + 12 + 13), 11, 12, 13]  # all blocks, without free ones and other kinds
    states = ("free", "cached", "referenced", "quarantined")
    hosts = [value(found, "kvforge_host_blocks", worker="w0", state=state) for state in states]
    assert hosts == [15, 16, 14 - (15 + 16 + 17), 17]
    names = ("saved_blocks", "loaded_blocks", "evicted_blocks", "unsaved_blocks", "saved_bytes", "loaded_bytes")
    moved = [value(found, f"kvforge_host_{name}_total", worker="w0") for name in (*names, "hit_tokens")]
    assert moved == [18, 19, 20, 21, 18 * 4096, 19 * 4096, 24]
    labels = {"model_name": "a/model", "engine": "0"}
    assert value(found, "vllm:external_prefix_cache_hits_total", **labels) == 24
    ways = ("GPU_to_CPU", "CPU_to_GPU")
    both = [value(found, "vllm:kv_offload_total_bytes_total", transfer_type=way, **labels) for way in ways]
    assert both == [18 * 4096, 19 * 4096]
    assert [value(found, "kvforge_host_misses_total", worker="w0", reason=r) for r in ("tag", "checksum")] == [22, 23]
    swaps = [value(found, "kvforge_host_swaps_total", worker="w0", way=way) for way in ("read", "computed")]
    assert swaps == [25, 26] and value(found, "kvforge_host_swapped_bytes_total", worker="w0") == 27 * 4096
    assert value(found, "kvforge_host_swap_saved_seconds_total", worker="w0") == pytest.approx(28e-6)
    skipped = [value(found, f"kvforge_host_{name}_blocks_total", worker="w0") for name in ("skipped", "recomputed")]
    assert skipped == [29, 30]
    ended = [value(found, "kvforge_host_returns_ended_total", worker="w0", way=way) for way in ("used", "wasted")]
    assert value(found, "kvforge_host_returns_total", worker="w0") == 31 and ended == [32, 33]
    disks = [value(found, "kvforge_disk_blocks", worker="w0", state=state) for state in states]
    assert disks == [35, 36, 34 - (35 + 36 + 37), 37]
    names = ("recovered_blocks", "saved_blocks", "loaded_blocks", "evicted_blocks", "unsaved_blocks", "failed_copies")
    names = (*names, "late_requests", "declined_requests")
    assert [value(found, f"kvforge_disk_{name}_total", worker="w0") for name in names] == [*range(38, 46)]
    assert [value(found, "kvforge_disk_misses_total", worker="w0", reason=r) for r in ("tag", "checksum")] == [46, 47]
    assert value(found, "kvforge_worker_memory_bytes", worker="w0", purpose="weights") == 70
    assert value(found, "kvforge_worker_state", worker="w1", state="loading") == 1
    assert value(found, "kvforge_worker_state", worker="w0", state="loading") == 0
    cells = range(GAP.start, GAP.total)
    assert value(found, "kvforge_inter_token_seconds_count", tenant="a") == 2 * sum(cells)
    assert value(found, "kvforge_inter_token_seconds_bucket", tenant="a", le="0.0025") == 2 * (cells[0] + cells[1])
    assert value(found, "kvforge_inter_token_seconds_sum", tenant="a") == 2 * GAP.total / 1e6
    assert value(found, "kvforge_http_requests_total", path="/v1/models", status="200") == 1
    assert value(found, "kvforge_http_received_bytes_total") == 7
    assert not any(name == "kvforge_step_seconds_count" and ("worker", "w1") in labels for name, labels in found)


def test_what_is_called_as_vllm_calls_it_is_the_sum_of_ours(tables: TablesWriter) -> None:
    found = scraped(tables.path.parent)
    ours = {metric.name: metric for metric in SERVICE}
    for metric in VLLM:
        first, *further = [ours[name] for name in metric.same.split(" and ")]
        for name, theirs in zip(names_of(first), names_of(metric), strict=True):
            if name.endswith("_bucket") or "blocks" in name:
                continue
            mine = sum(v for (n, _), v in found.items() if n in (name, *(each.name for each in further)))
            told = sum(
                v
                for (n, labels), v in found.items()
                if n == theirs and {("engine", "0"), ("model_name", "a/model")} <= labels
            )
            left_out = {"kvforge_preemptions_total": "worker_lost", "kvforge_requests_ended_total": "expired failed"}
            mine -= sum(
                v for (n, labels), v in found.items()
                if n == name and {w for _, w in labels} & {*left_out.get(name, "").split()}
            )  # fmt: skip
            assert told == pytest.approx(mine), metric.name
    used = value(found, "vllm:kv_cache_usage_perc", model_name="a/model", engine="0")
    blocks = {s: value(found, "kvforge_blocks", worker="w0", state=s) for s in ("referenced", "quarantined")}
    assert set(blocks.values()) == {4, 5} and 0 < used < 3


def test_the_part_of_blocks_in_use_is_what_vllm_calls_its_usage(tables: TablesWriter) -> None:
    gauges = {"blocks_total": 100, "blocks_free": 20, "blocks_cached": 30, "blocks_referenced": 45}
    put(tables, **gauges, blocks_quarantined=5)
    used = value(scraped(tables.path.parent), "vllm:kv_cache_usage_perc", model_name="a/model", engine="0")
    assert used == 0.5


def test_who_may_not_see_tenants_sees_their_sum(tables: TablesWriter) -> None:
    text = client(tables.path.parent, may_see_tenants=False).get("/metrics").text
    assert not any(name in text for name in ('"a"', 'tenant="b', 'other"}'))
    found = samples(list(parse_text(text)))
    assert value(found, "kvforge_tenant_blocks", tenant="") == 321
    assert value(found, "kvforge_inter_token_seconds_count", tenant="") == 6 * sum(range(GAP.start, GAP.total))


def test_a_tenant_that_is_called_other_counts_with_the_others(tables: TablesWriter) -> None:
    put(tables, ServiceInfo(tenants=("other", "b")))
    found = scraped(tables.path.parent)
    assert value(found, "kvforge_tenant_blocks", tenant="other") == 21
    assert not any(name.startswith("vllm:") for name, _ in found), "there is no model yet"


def test_who_may_see_nothing_is_told_so(tables: TablesWriter) -> None:
    def nothing(_request: Request) -> bool:
        raise NotAllowed("see", "the key 'x' does not have it")

    refused = client(tables.path.parent, nothing).get("/metrics")
    assert (refused.status_code, refused.json()["error"]["code"]) == (403, "not_allowed")


def test_without_a_coordinator_only_the_gateway_is_told_of(tmp_path: Path) -> None:
    found = scraped(tmp_path)
    assert value(found, "kvforge_up") == 0
    assert {name for name, _ in found} == {
        name for metric, (kind, _, _) in GATEWAY.items() for name in names_of(metric, kind)
    }


@pytest.mark.parametrize(
    ("storage", "expected"),
    [
        (STORED, {"up": 1, "documents": 3, "bytes": 350, "in_progress": 1}),
        (Tenants(exists=False), {"up": 1, "documents": 0, "bytes": 0, "in_progress": 0}),
        (Tenants(fails=True), {"up": 0}),
        (None, {}),
    ],
)
def test_the_storage_has_its_numbers(storage: Tenants | None, expected: dict[str, float]) -> None:
    app = Starlette(routes=routes(None, Counts([]), storage=storage))
    found = samples(list(parse_text(TestClient(app).get("/metrics").text)))
    ours = {name: value for (name, _), value in found.items() if name.startswith("kvforge_storage_")}
    assert ours == {f"kvforge_storage_{name}": value for name, value in expected.items()}


def test_a_coordinator_on_another_machine_is_not_said_to_be_down() -> None:
    app = Starlette(routes=routes(None, Counts([])))
    assert "kvforge_up" not in TestClient(app).get("/metrics").text


def test_tables_of_another_layout_are_said_once_and_are_no_numbers(
    tables: TablesWriter, caplog: pytest.LogCaptureFixture
) -> None:
    with tables.path.open("r+b") as file:
        file.seek(8)
        file.write((99).to_bytes(4, "little"))
    reading = client(tables.path.parent)
    for _ in range(3):
        assert "kvforge_up 0.0" in reading.get("/metrics").text
    assert [record.message for record in caplog.records].count(caplog.records[0].message) == 1
    assert "layout 99" in caplog.records[0].message


def test_names_are_as_prometheus_wants_them(tables: TablesWriter) -> None:
    for metric in SERVICE:
        assert re.fullmatch(r"kvforge_[a-z_]+", metric.name)
        assert metric.name.endswith("_total") == (metric.kind == COUNTER), metric.name
        assert metric.kind != HISTOGRAM or metric.name.endswith(("_seconds", "_tokens")), metric.name
        assert metric.text.endswith(".")
    if shutil.which("promtool") is None:
        pytest.skip("promtool is not installed (Debian: apt-get install prometheus)")
    text = client(tables.path.parent).get("/metrics").text
    # vLLM's names have a colon, which promtool would keep for rules.
    ours = "\n".join(line for line in text.splitlines() if "vllm:" not in line) + "\n"
    run = subprocess.run(["promtool", "check", "metrics"], input=ours, text=True, capture_output=True, check=False)
    assert (run.returncode, run.stderr, run.stdout) == (0, "", "")
