"""The units in deploy/, booted by a private systemd with a tiny model of random weights."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from kvforge.protocol.exits import DAMAGED, UNAVAILABLE, USAGE
from tests.integration import systemd_boot


@pytest.fixture(scope="module")
def found(booted: Path) -> dict[str, Any]:
    """Return the findings on a machine with systemd, shared by parallel tests."""
    result = systemd_boot.wait(booted)
    if "skip" in result:
        pytest.skip(result["skip"])
    assert "error" not in result, result["error"]
    return result


@pytest.mark.root
def test_it_is_installed_once_and_found_good(found: dict[str, Any]) -> None:
    assert "create the user kvforge" in found["installed"]
    assert found["installed_again"] == "everything is installed\n"
    assert found["checked"]["status"] == 0, found["checked"]
    assert not [row for row in found["checked"]["findings"] if row["kind"] == "wrong"]


@pytest.mark.root
def test_it_serves_as_a_user_that_can_do_little_else(found: dict[str, Any]) -> None:
    assert len(found["tokens"]) == 8
    assert {row["ActiveState"] for row in found["serving"].values()} == {"active"}
    assert found["users"] == {"kvforge-coordinator.service": "kvforge", "kvforge-worker@cpu.service": "kvforge"}


@pytest.mark.root
def test_it_may_do_what_a_snapshot_needs(found: dict[str, Any]) -> None:
    assert [name for name in found["state_files"] if name.startswith("state-") and not name.endswith(".part")]
    assert "a snapshot failed" not in found["logs"]


@pytest.mark.root
def test_a_worker_that_is_killed_comes_back_and_its_request_completes(found: dict[str, Any]) -> None:
    assert found["worker_killed"]["pids"][0] != found["worker_killed"]["pids"][1]
    assert found["worker_killed"]["tokens"] == found["undisturbed"]


@pytest.mark.root
def test_a_worker_that_hangs_is_replaced_and_its_request_completes(found: dict[str, Any]) -> None:
    assert found["worker_hung"]["pids"][0] != found["worker_hung"]["pids"][1]
    assert found["worker_hung"]["tokens"] == found["undisturbed"]


@pytest.mark.root
def test_nobody_notices_a_rolling_restart(found: dict[str, Any]) -> None:
    """As documented in deploy/README.md: a worker's restart ends when it serves, the coordinator's affects no
    worker."""
    rolled = found["rolling"]
    worker, coordinator, worker_then, coordinator_then = rolled["pids"]
    assert worker != worker_then == rolled["worker_after"] and coordinator != coordinator_then
    assert (rolled["ready"], rolled["reason"]) == (True, "length")
    assert rolled["request"] == found["undisturbed"]


@pytest.mark.root
def test_a_gateway_that_is_killed_comes_back_and_a_request_with_a_key_is_the_same(found: dict[str, Any]) -> None:
    told = found["gateway"]
    assert told["pids"][0] != told["pids"][1]
    assert len(told["answers"][0]) == 40
    assert told["answers"][0] == told["answers"][1]
    assert told["requests"][0] == told["requests"][1]


@pytest.mark.root
def test_what_no_new_start_can_mend_is_started_once(found: dict[str, Any]) -> None:
    rows = found["cannot_go_on"]
    for row, status in ((rows["damaged"], DAMAGED), (rows["wrong"], USAGE)):
        assert (row["Result"], row["ExecMainStatus"], row["NRestarts"]) == ("exit-code", str(status), "0")
    assert "state-0000000000000001" in found["logs"]


@pytest.mark.root
def test_a_coordinator_that_is_killed_comes_back(found: dict[str, Any]) -> None:
    assert found["coordinator_killed"]["pids"][0] != found["coordinator_killed"]["pids"][1]
    assert found["coordinator_killed"]["tokens_after"] == found["tokens"]


@pytest.mark.root
def test_the_requests_of_a_coordinator_that_is_killed_complete(found: dict[str, Any]) -> None:
    assert found["coordinator_killed"]["request"] == found["undisturbed"]


@pytest.mark.root
def test_a_coordinator_that_hangs_is_ended_by_the_watchdog_and_comes_back(found: dict[str, Any]) -> None:
    assert found["coordinator_hung"]["pids"][0] != found["coordinator_hung"]["pids"][1]
    assert found["coordinator_hung"]["tokens_after"] == found["tokens"]
    assert "Fatal Python error: Aborted" in found["logs"]  # with a traceback


@pytest.mark.root
def test_a_worker_that_does_not_stay_is_given_up_and_the_check_says_why(found: dict[str, Any]) -> None:
    given_up = found["gives_up"]
    assert (given_up["state"]["ActiveState"], given_up["state"]["NRestarts"]) == ("failed", "2")
    assert given_up["status"] == 1
    assert "kvforge-worker@twin.service has failed: it ended with exit status 1, after" in given_up["checked"]
    assert "/etc/kvforge/worker-twin.toml have one name: give each worker its own `name`" in given_up["checked"]
    assert "a worker named 'cpu' is connected already" in found["logs"]


@pytest.mark.root
def test_a_worker_that_cannot_start_ends_as_failed_with_its_reason(found: dict[str, Any]) -> None:
    cannot = found["cannot_start"]
    assert (cannot["state"]["ActiveState"], cannot["state"]["ExecMainStatus"]) == ("failed", str(UNAVAILABLE))
    assert "cannot be served" in cannot["health"]
    assert "cannot be served" in found["logs"]


@pytest.mark.root
def test_what_runs_is_finished_and_nothing_is_left(found: dict[str, Any]) -> None:
    assert (found["drained"], found["drained_reason"]) == (found["undisturbed"], "length")
    for unit, row in found["stopped"].items():
        assert row["ActiveState"] == "inactive", (unit, row, found["logs"])
        if unit.endswith(".service"):
            assert (row["Result"], row["ExecMainStatus"]) == ("success", "0"), (unit, row, found["logs"])
    assert found["runtime_files"]
    assert not found["runtime_dir_left"] and found["state_left"] == []
    assert found["processes_left"] == []


@pytest.mark.root
def test_uninstalling_stops_and_removes_the_service_and_keeps_its_state(found: dict[str, Any]) -> None:
    facts = found["uninstalled"]
    assert (facts["status"], facts["active"]) == (0, "inactive"), facts
    assert (facts["listed"], facts["loaded"]) == ([], []), facts
    assert facts["places"] == ["/etc/kvforge", "/var/cache/kvforge", "/var/lib/kvforge"] and facts["state"], facts
    assert "stop the services\n" in facts["printed"]
    assert (facts["purge"], facts["purged"], facts["user"]) == (0, [], False), facts
