"""/metrics beside a real coordinator and a worker matches the service's own numbers, across crashes."""

from __future__ import annotations

import select
from collections.abc import Callable
from time import monotonic

from prometheus_client.parser import text_string_to_metric_families
from starlette.applications import Starlette
from starlette.testclient import TestClient

from kvforge import SamplingParams
from kvforge.gateway.metrics.routes import Source, routes
from tools.cluster.cluster import Cluster

GREEDY = SamplingParams(temperature=0.0, ignore_eos=True)
WAIT_S = 60.0


class Scrapes:
    """The scrapes of a monitor."""

    def __init__(self, cluster: Cluster) -> None:
        self._client = TestClient(Starlette(routes=routes(Source(cluster.runtime))))
        self.look()

    def look(self) -> None:
        """Scrapes again."""
        text = self._client.get("/metrics").text
        self._samples = [sample for family in text_string_to_metric_families(text) for sample in family.samples]

    def sum(self, name: str, **labels: str) -> float:
        """Return the sum of all series of a name with these labels."""
        wanted = labels.items()
        found = [s.value for s in self._samples if s.name == name and wanted <= s.labels.items()]
        return sum(found)

    def until(self, what: Callable[[], bool]) -> None:
        """Scrape until the condition holds."""
        deadline = monotonic() + WAIT_S
        self.look()
        while not what():
            assert monotonic() < deadline
            select.select([], [], [], 0.02)
            self.look()


def test_it_says_what_the_service_says_and_goes_on_over_the_coordinators_death() -> None:
    with Cluster(blocks=64) as cluster:
        client = cluster.start("w0")
        for i in range(24):
            client.submit([i % 5, 2, 3] * 9, max_tokens=8 + i % 3, sampling=GREEDY, tenant="ab"[i % 2])
        client.submit([7], max_tokens=400, sampling=GREEDY, tenant="c")
        monitor = Scrapes(cluster)
        monitor.until(lambda: monitor.sum("kvforge_requests_ended_total", reason="length") == 25)
        stats, (worker,) = client.stats(), client.health().workers
        requests = stats.requests
        told = {
            "kvforge_requests_accepted_total": requests.accepted_total,
            "kvforge_requests_ended_total": requests.finished_total,
            "kvforge_requests_running": requests.running,
            "kvforge_requests_waiting": requests.pending,
            "kvforge_prompt_tokens_total": requests.prompt_tokens_total,
            "kvforge_prefilled_tokens_total": requests.prompt_tokens_total,
            "kvforge_generated_tokens_total": requests.generated_tokens_total,
            "kvforge_computed_tokens_total": requests.computed_tokens_total,
            "kvforge_recomputed_tokens_total": requests.recomputed_tokens_total,
            "kvforge_preemptions_total": requests.preemptions_total,
            "kvforge_time_to_first_token_seconds_count": 25,
            "kvforge_inter_token_seconds_count": requests.generated_tokens_total - 25,
            "kvforge_request_seconds_count": 25,
            "kvforge_request_queue_seconds_count": 25,
            "vllm:generation_tokens_total": requests.generated_tokens_total,
            "vllm:e2e_request_latency_seconds_count": 25,
        }
        assert {name: monitor.sum(name) for name in told} == told
        for row in stats.tenants:
            assert monitor.sum("kvforge_prefix_hit_tokens_total", tenant=row.tenant) == row.prefix_hit_tokens_total
            assert monitor.sum("kvforge_tenant_blocks", tenant=row.tenant) == row.blocks
        (pool,) = stats.pools
        for state in ("free", "cached", "referenced", "quarantined"):
            assert monitor.sum("kvforge_blocks", worker="w0", state=state) == getattr(pool, state)
        assert (
            monitor.sum("kvforge_step_seconds_count", worker="w0") == monitor.sum("kvforge_steps_total") == pool.steps
        )
        assert monitor.sum("kvforge_step_seconds_sum") > 0
        for purpose, size in worker.device_bytes.items():
            assert monitor.sum("kvforge_worker_memory_bytes", worker="w0", purpose=purpose) == size
        before = {name: monitor.sum(name) for name in told}

        cluster.kill("coordinator")
        monitor.look()
        assert monitor.sum("kvforge_up") == 0
        cluster.start_coordinator()
        monitor.until(lambda: monitor.sum("kvforge_up") == 1)
        assert {name: monitor.sum(name) for name in told} == before, "counters must not be lost"
        # The tables exist before the first turn, which counts the start itself.
        monitor.until(lambda: monitor.sum("kvforge_coordinator_restarts_total") == 1)
        assert monitor.sum("kvforge_journal_records_total") > 0
        monitor.until(lambda: monitor.sum("kvforge_worker_state", worker="w0", state="ready") == 1)
        assert monitor.sum("kvforge_workers_returned_total") == 1
        client.submit([1, 2], max_tokens=3, sampling=GREEDY, tenant="a").result(WAIT_S)
        monitor.look()
        assert monitor.sum("kvforge_generated_tokens_total") == before["kvforge_generated_tokens_total"] + 3

        cluster.kill("w0")
        monitor.until(lambda: monitor.sum("kvforge_workers_lost_total") == 1)
