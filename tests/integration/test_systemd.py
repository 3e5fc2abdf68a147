"""The units in deploy/, verified by systemd; test_systemd_boot.py boots them."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from kvforge.coordinator.config import ScheduleSection
from kvforge.coordinator.config import load_config as load_coordinator
from kvforge.coordinator.turn import BEAT_US
from kvforge.deploy.places import STATE_DIR
from kvforge.gateway.config import load_settings
from kvforge.protocol.exits import DAMAGED, UNAVAILABLE, USAGE
from kvforge.worker.config import load_config as load_worker

HERE = Path(__file__).parent
CHECKOUT = HERE.parents[1]
DEPLOY = CHECKOUT / "deploy"
SERVICES = [
    "kvforge-coordinator.service",
    "kvforge-worker@.service",
    "kvforge-drain.service",
    "kvforge-gateway.service",
]


def settings(unit: str) -> dict[str, list[str]]:
    """Return a unit file's settings, with every value of each."""
    found: dict[str, list[str]] = {}
    for line in (DEPLOY / unit).read_text().splitlines():
        if "=" in line and not line.startswith("#"):
            key, _, value = line.partition("=")
            found.setdefault(key, []).append(value)
    return found


def test_systemd_accepts_the_units(tmp_path: Path) -> None:
    if shutil.which("systemd-analyze") is None:
        pytest.skip("systemd-analyze is not installed")
    for unit in [*SERVICES, "kvforge.target", "kvforge-group@.target"]:
        # The programs of the units are installed later, but verify checks their existence.
        text = (DEPLOY / unit).read_text().replace("/opt/kvforge/.venv/bin/python", sys.executable)
        (tmp_path / unit).write_text(text)
    (tmp_path / "kvforge-worker@a.service").write_text((tmp_path / "kvforge-worker@.service").read_text())
    for name in ("kvforge-worker@a-0.service", "kvforge-worker@a-1.service"):
        (tmp_path / name).write_text((tmp_path / "kvforge-worker@.service").read_text())
    (tmp_path / "kvforge-group@a.target").write_text((tmp_path / "kvforge-group@.target").read_text())
    targets = ("kvforge.target", "kvforge-group@a.target")
    paths = [str(tmp_path / name) for name in (*SERVICES, "kvforge-worker@a.service", *targets)]
    done = subprocess.run(
        ["systemd-analyze", "verify", "--man=no", "--recursive-errors=no", *paths],
        capture_output=True,
        text=True,
        timeout=60,
        env={**os.environ, "SYSTEMD_UNIT_PATH": f"{tmp_path}:"},
    )
    ours = [line for line in done.stderr.splitlines() if "kvforge" in line]
    assert (done.returncode, ours) == (0, []), done.stderr


def test_only_the_coordinator_owns_the_runtime_folder() -> None:
    """systemd removes the folder when its unit stops: a worker that owned it would cut off all others."""
    owners = [unit for unit in SERVICES if "RuntimeDirectory" in settings(unit)]
    assert owners == ["kvforge-coordinator.service"]
    assert settings(owners[0])["RuntimeDirectoryPreserve"] == ["restart"]


def test_services_say_when_they_serve_and_what_no_new_start_can_mend() -> None:
    feeds_s = (BEAT_US / 1e6, ScheduleSection().step_timeout_s)
    final = (f"{USAGE} {UNAVAILABLE} {DAMAGED}", f"{USAGE} {UNAVAILABLE}")
    for unit, feeds, statuses in zip(SERVICES[:2], feeds_s, final, strict=True):
        found = settings(unit)
        assert found["Type"] == ["notify"]
        assert found["Restart"] == ["on-failure"]
        assert found["RestartPreventExitStatus"] == [statuses]
        assert found["KillSignal"] == ["SIGTERM"]
        assert int(found["StartLimitBurst"][0]) > 1
        assert int(found["WatchdogSec"][0]) >= 2 * feeds  # watchdog pings


@pytest.mark.parametrize(
    ("unit", "exposure_max"),
    [(SERVICES[0], 2.0), (SERVICES[1], 4.0), (SERVICES[2], 2.0), (SERVICES[3], 2.0)],
    ids=lambda value: str(value),
)
def test_services_can_do_little_else(unit: str, exposure_max: float, tmp_path: Path) -> None:
    """By systemd's own measure, 0 to 10."""
    if shutil.which("systemd-analyze") is None:
        pytest.skip("systemd-analyze is not installed")
    path = shutil.copy(DEPLOY / unit, tmp_path / unit.replace("@", "@gpu0"))
    command = ["systemd-analyze", "security", "--offline=yes", "--no-pager", str(path)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60)
    if "unrecognized option" in done.stderr:
        pytest.skip("this systemd-analyze knows no --offline")
    [exposure] = re.findall(r"Overall exposure level for \S+: ([\d.]+)", done.stdout)
    assert float(exposure) <= exposure_max, done.stdout


def test_example_configurations_are_good_and_agree_with_the_units() -> None:
    coordinator = load_coordinator(DEPLOY / "coordinator.toml")
    worker = load_worker(DEPLOY / "worker.toml")
    assert coordinator.state_path == STATE_DIR
    assert coordinator.runtime_path == worker.runtime_path == Path("/run/kvforge")
    assert settings("kvforge-worker@.service")["ExecStart"][0].endswith("--config /etc/kvforge/worker-%i.toml")
    assert coordinator.on_stop == "keep", "a separate unit drains: a restart hands nothing back"
    assert coordinator.drain_s < int(settings(SERVICES[0])["TimeoutStopSec"][0])
    gateway = load_settings(DEPLOY / "gateway.toml")
    assert gateway.folder == Path("/run/kvforge")
    assert gateway.drain_s < int(settings(SERVICES[3])["TimeoutStopSec"][0])


def test_the_example_takes_the_pools_of_eight_large_gpus() -> None:
    """With a small model, where 180 GB of K and V are many blocks: SmolLM2-135M in 16 bits."""
    coordinator = load_coordinator(DEPLOY / "coordinator.toml")
    bytes_per_block = coordinator.cache.block_size * 30 * 2 * 3 * 64 * 2
    assert 8 * 180_000_000_000 // bytes_per_block <= coordinator.limits.blocks_max
