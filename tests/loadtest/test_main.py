"""The load harness against real processes with a tiny model."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from time import monotonic
from typing import Any

import pytest

from loadtest.__main__ import main
from tests.integration.cluster import Cluster
from tests.integration.test_cluster import wait_empty

# A queue of 4 and two rows: a burst is refused in part.
COORDINATOR = "[limits]\nqueue_max = 4\n[schedule]\nstep_rows_max = 2\n"


@pytest.fixture(scope="module")
def cluster() -> Iterator[Cluster]:
    with Cluster(coordinator=COORDINATOR) as started:
        started.start("w0")
        yield started


def measure(cluster: Cluster, folder: Path, *options: str, status: int = 0) -> dict[str, Any]:
    """One run in this process; returns its document."""
    file = folder / "out.json"
    assert main(["--runtime-dir", str(cluster.runtime), "--json", str(file), *options]) == status
    document: dict[str, Any] = json.loads(file.read_text())
    requests = document["requests"]
    assert requests["planned"] == sum(count for end, count in requests.items() if end != "planned")
    return document


def test_every_request_is_accounted_for_once(
    cluster: Cluster, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    options = ("--rate", "40", "--requests", "50", "--input", "16:48", "--output", "4", "--prefix", "16")
    found = measure(cluster, tmp_path, *options)
    ends, latency, counters = found["requests"], found["latency_ms"], found["coordinator"]["counters"]
    assert ends["planned"] == 50 and ends["finished"] + ends["refused"] == 50
    assert found["queue_full"] == ends["refused"] == counters["refused_total"]
    assert counters["accepted_total"] == counters["finished_total"] == ends["finished"]
    assert found["throughput"]["output_tokens"] == 4 * ends["finished"] == counters["generated_tokens_total"]
    assert found["throughput"]["prompt_tokens"] == counters["prompt_tokens_total"]
    assert latency["time_to_first_token"]["count"] == latency["end_to_end"]["count"] == ends["finished"]
    assert latency["inter_token"]["count"] == 3 * ends["finished"]
    assert found["coordinator"]["prefix_hit_tokens"] == found["cached_prompt_tokens"] > 0
    assert found["coordinator"]["samples"] >= 1 and found["coordinator"]["steps"] > 0
    assert found["generator"]["slip_ms"]["count"] == 50
    assert {"machine", "versions", "model", "workload", "errors", "warnings", "seconds", "interrupted"} <= set(found)
    assert "time to first token" in capsys.readouterr().out


def test_a_full_queue_is_counted_and_is_no_failure(cluster: Cluster, tmp_path: Path) -> None:
    options = ("--rate", "1000", "--requests", "50", "--arrivals", "fixed", "--burst", "50", "--output", "16")
    found = measure(cluster, tmp_path, *options, "--connections", "2")
    ends = found["requests"]
    assert ends["finished"] + ends["refused"] == 50 and ends["refused"] > 0
    assert found["errors"] == {"queue_full": ends["refused"]} and found["queue_full"] == ends["refused"]


def test_waiting_for_a_place_is_charged_to_the_request(cluster: Cluster, tmp_path: Path) -> None:
    options = ("--rate", "1000", "--requests", "20", "--burst", "20", "--output", "4", "--concurrency-max", "1")
    found = measure(cluster, tmp_path, *options)
    assert found["requests"]["finished"] == 20
    first = found["latency_ms"]["time_to_first_token"]
    assert first["p50"] < first["max"] <= found["latency_ms"]["end_to_end"]["max"]


def test_requests_that_run_out_of_time_are_cancelled(cluster: Cluster, tmp_path: Path) -> None:
    options = ("--rate", "1000", "--requests", "3", "--output", "1900", "--timeout", "0.5")
    found = measure(cluster, tmp_path, *options, status=4)
    assert found["requests"]["timed_out"] == 3 and found["errors"] == {"deadline_exceeded": 3}
    with cluster.client() as kv:
        wait_empty(kv)
        assert {row.state for row in kv.requests(3).requests} == {"cancelled"}


def test_ctrl_c_prints_what_was_measured(cluster: Cluster, tmp_path: Path) -> None:
    file = tmp_path / "out.json"
    command = [sys.executable, "-m", "loadtest", "--runtime-dir", str(cluster.runtime), "--json", str(file)]
    options = ["--rate", "10", "--requests", "100000", "--input", "4", "--output", "2"]
    with cluster.client() as kv:
        before = kv.stats().requests.finished_total
        with subprocess.Popen([*command, *options], stdout=subprocess.PIPE, text=True) as process:
            deadline = monotonic() + 60
            while kv.stats().requests.finished_total == before and process.poll() is None:
                assert monotonic() < deadline, "nothing was finished"
            os.kill(process.pid, signal.SIGINT)
            output, _ = process.communicate(timeout=20)
    assert process.returncode == 130
    found = json.loads(file.read_text())
    assert found["interrupted"] and "(interrupted)" in output
    assert found["requests"]["planned"] == 100_000 == sum(found["requests"].values()) - 100_000
    assert found["requests"]["unsent"] > 0


@pytest.mark.parametrize(
    ("options", "status"),
    [
        (["--rate", "1", "--endpoint", "ipc:///nowhere/c.sock"], 3),
        (["--rate", "0"], 2),
        (["--rate", "1", "--input", "9:1"], 2),
        (["--rate", "1", "--requests", "0"], 2),
        (["--rate", "1", "--concurrency-max", "0"], 2),
        (["--rate", "1", "--connections", "0"], 2),
        (["--rate", "1", "--json", "/nowhere/at/all.json"], 2),
        ([], 2),
    ],
)
def test_what_cannot_be_run_says_why(
    options: list[str], status: int, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("loadtest.driver.READY_S", 0.2)
    assert main(options) == status
    assert capsys.readouterr().err
