"""The load harness against real processes with a tiny model."""

from __future__ import annotations

import json
import os
import select
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from time import monotonic
from typing import Any

import pytest

from kvforge.loadtest.command.main import main
from tests.integration.shared import wait_empty
from tools.cluster.cluster import Cluster

DEADLINE_S = 240.0
# A queue of 4 and two rows: a burst is refused in part.
COORDINATOR = "[limits]\nqueue_max = 4\n[schedule]\nstep_rows_max = 2\n"


@pytest.fixture(scope="module")
def cluster() -> Iterator[Cluster]:
    with Cluster(coordinator=COORDINATOR) as started:
        started.start("w0")
        yield started


def measure(cluster: Cluster, folder: Path, *options: str) -> tuple[int, dict[str, Any]]:
    """Run the harness in this process; return its status and its document.

    On a machine with other tests the driver may be late, so the validity of the result is not checked.
    """
    status = main(["--runtime-dir", str(cluster.runtime), "--out", str(folder), "--no-proof", *options])
    found: dict[str, Any] = json.loads((folder / "result.json").read_text())
    ends = found["all"]["requests"]
    assert ends["due"] == sum(count for end, count in ends.items() if end != "due")
    return status, found


@pytest.fixture
def undrawn(monkeypatch: pytest.MonkeyPatch) -> None:
    """Skip the charts, the slowest part of a short run; another test covers them."""
    monkeypatch.setattr("kvforge.loadtest.report.folder.pictures", lambda found: [])


def errors(found: dict[str, Any]) -> dict[str, int]:
    """Return the count of each error code."""
    return {row["code"]: row["count"] for row in found["all"]["errors"]}


def failed_for_its_lag_alone(status: int, found: dict[str, Any]) -> bool:
    return status == (0 if found["verdict"]["valid"] else 1)


def test_every_request_is_accounted_for_once(
    cluster: Cluster, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    options = ("--rate", "40", "--requests", "50", "--input", "16:48", "--output", "4", "--prefix", "16")
    status, found = measure(cluster, tmp_path, *options, "--warmup", "0", "--slo", "ttft=60s")
    assert failed_for_its_lag_alone(status, found)
    whole, counters = found["all"], found["server"]["totals"]
    ends = whole["requests"]
    assert ends["due"] == 50 and ends["finished"] + ends["refused"] == 50
    assert counters["accepted_total"] == counters["finished_total"] == ends["finished"]
    assert counters["refused_total"] == ends["refused"]
    assert counters["generated_tokens_total"] == 4 * ends["finished"]
    # All prompts share a prefix: the hits are at most those of an unlimited cache.
    assert 0 < found["prefix"]["hit_tokens"] <= found["prefix"]["infinite"]["hit_tokens"]
    assert found["occupancy"] is not None and found["model"]["name"]
    # The coordinator explained the time of each of the slowest requests.
    assert len(found["tail"]) == 10 and all(request["sentence"] for request in found["tail"])
    page = (tmp_path / "index.html").read_text()
    assert "http://" not in page.replace("http://www.w3.org", "") and "https://" not in page
    assert {path.suffix for path in tmp_path.iterdir()} >= {".html", ".png", ".json", ".csv"}
    assert "time to first token" in capsys.readouterr().out


@pytest.mark.usefixtures("undrawn")
def test_a_closed_loop_of_several_processes(cluster: Cluster, tmp_path: Path) -> None:
    status, found = measure(
        cluster, tmp_path, "--closed", "2", "--requests", "12", "--input", "8", "--output", "3", "--processes", "2"
    )
    assert failed_for_its_lag_alone(status, found)
    assert found["all"]["requests"]["finished"] == 12
    assert found["verdict"]["lag_ms"]["turns"] is not None


@pytest.mark.usefixtures("undrawn")
def test_a_full_queue_is_counted_and_is_no_failure(cluster: Cluster, tmp_path: Path) -> None:
    options = ("--arrivals", "burst:1000,50", "--requests", "50", "--input", "32", "--output", "16", "--clients", "2")
    status, found = measure(cluster, tmp_path, *options)
    ends = found["all"]["requests"]
    assert failed_for_its_lag_alone(status, found)
    assert ends["finished"] + ends["refused"] == 50 and ends["refused"] > 0
    assert errors(found) == {"queue_full": ends["refused"]}


@pytest.mark.usefixtures("undrawn")
def test_requests_that_run_out_of_time_are_cancelled(cluster: Cluster, tmp_path: Path) -> None:
    options = ("--rate", "1000", "--requests", "3", "--input", "8", "--output", "1900", "--timeout", "0.5")
    status, found = measure(cluster, tmp_path, *options)
    assert status == 4
    assert found["all"]["requests"]["timed_out"] == 3 and errors(found) == {"deadline_exceeded": 3}
    with cluster.client() as kv:
        wait_empty(kv)
        rows = kv.requests(3).requests
        assert {row.state for row in rows} == {"cancelled"}


@pytest.mark.usefixtures("undrawn")
def test_a_sweep_has_a_folder_for_each_run_and_stands_beside_an_earlier_result(
    cluster: Cluster, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    load = ("--requests", "10", "--input", "8", "--output", "2")
    measure(cluster, tmp_path / "a", "--rate", "10", *load)
    earlier = str(tmp_path / "a" / "result.json")
    status, found = measure(cluster, tmp_path / "b", "--sweep", "rate=20,10", *load, "--compare", earlier)
    points = found["sweep"]["points"]
    assert [point["value"] for point in points] == [10, 20] and found["sweep"]["knee"]["sentence"]
    assert status == (0 if all(point["valid"] for point in points) else 1)
    runs = [json.loads((tmp_path / "b" / f"rate-{rate}" / "result.json").read_text()) for rate in (10, 20)]
    assert [run["options"]["rate"] for run in runs] == [10, 20]
    assert found["compare"]["rows"] and "earlier" in capsys.readouterr().out


def test_ctrl_c_reports_what_was_measured(cluster: Cluster, tmp_path: Path) -> None:
    command = [sys.executable, "-m", "kvforge", "--runtime-dir", str(cluster.runtime), "loadtest", "--no-proof"]
    options = ["--out", str(tmp_path), "--rate", "10", "--requests", "2000", "--input", "4", "--output", "2"]
    with cluster.client() as kv:
        before = kv.stats().requests.finished_total
        with subprocess.Popen([*command, *options], stdout=subprocess.PIPE, text=True) as process:
            deadline = monotonic() + DEADLINE_S
            # When the third has finished, the harness has read the end of the first.
            while kv.stats().requests.finished_total < before + 3 and process.poll() is None:
                assert monotonic() < deadline, "three were not finished"
                select.select([], [], [], 0.05)
            os.kill(process.pid, signal.SIGINT)
            output, _ = process.communicate(timeout=DEADLINE_S)
    assert process.returncode == 130
    found = json.loads((tmp_path / "result.json").read_text())
    assert found["span"]["interrupted"] and "interrupted" in output
    ends = found["all"]["requests"]
    assert ends["finished"] > 0 and ends["due"] < 1000  # later requests are not part of the measurement


@pytest.mark.parametrize(
    ("options", "status", "said"),
    [
        (["--rate", "1", "--endpoint", "ipc:///nowhere/c.sock"], 3, "does not answer"),
        (["--rate", "0"], 2, "rate"),
        (["--rate", "1", "--arrivals", "poisson:1"], 2, "arrivals"),
        (["--rate", "1", "--input", "9:1"], 2, "input"),
        (["--rate", "1", "--requests", "0"], 2, "requests"),
        (["--rate", "1", "--clients", "0"], 2, "clients"),
        (["--rate", "1", "--slo", "ttft"], 2, "slo"),
        (["--rate", "1", "--sweep", "input=1"], 2, "sweep"),
        (["--rate", "1", "--model", "m"], 2, "url"),
        (["--rate", "1", "--compare", "/nowhere/at/all.json"], 2, "compare"),
        (["--trace", "nothing-of-that-name"], 2, "trace"),
        ([], 2, "rate"),
    ],
)
def test_what_cannot_be_run_says_why(
    options: list[str],
    status: int,
    said: str,
    cluster: Cluster,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("kvforge.loadtest.command.places.READY_S", 0.2)
    if not any(option in ("--endpoint", "--model") for option in options):
        options = ["--runtime-dir", str(cluster.runtime), *options]
    assert main(options) == status
    assert said in capsys.readouterr().err
