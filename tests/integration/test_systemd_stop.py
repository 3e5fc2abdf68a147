"""Stopping a target waits for its services: a private systemd boots the units, with stand-ins for the programs."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests.integration.systemd_boot import CANNOT, CHECKOUT, HERE

DEPLOY = CHECKOUT / "deploy"
BOOT_S_MAX = 300  # ends a boot that hangs
SERVICES = ("kvforge-coordinator", "kvforge-worker@", "kvforge-gateway", "kvforge-drain")
# Each program ends some time after SIGTERM. Without a wait it still runs when `systemctl stop` has returned.
STAND_IN = "/bin/sh -c 'trap \"sleep 1; exit 0\" TERM; while :; do sleep 0.1; done'"
CHECK = """
import json, subprocess, sys
target, *units = sys.argv[2:]
def systemctl(*arguments):
    return subprocess.run(["systemctl", *arguments], capture_output=True, text=True, timeout=60).stdout
def states():
    return {unit: systemctl("is-active", unit).strip() for unit in units}
systemctl("start", target, *units)
found = {"before": states()}
systemctl("stop", target)
found["after"] = states()
found["order"] = systemctl("list-dependencies", "--after", target)
with open(sys.argv[1], "w") as file:
    json.dump(found, file)
"""


def stopped(folder: Path, target: str, units: list[str]) -> dict[str, dict[str, str]]:
    """The states of the units before and right after `systemctl stop TARGET` returned."""
    unit_folder, keep = folder / "units", folder / "keep"
    shutil.copytree(DEPLOY, unit_folder, ignore=shutil.ignore_patterns("*.toml", "*.md", "docker", "monitoring", "*.d"))
    keep.mkdir()
    for name in SERVICES:
        drop_in = unit_folder / f"{name}.service.d" / "stand-in.conf"
        drop_in.parent.mkdir()
        program = "/bin/sleep 1" if name == "kvforge-drain" else STAND_IN
        lines = ["[Service]", "User=root", "Group=root", "SystemCallFilter=", "PrivateUsers=no", "WatchdogSec=0"]
        if name == "kvforge-drain":
            lines += ["ExecStop=", f"ExecStop={program}"]
        else:
            lines += ["Type=simple", "ExecStart=", f"ExecStart={program}"]
        drop_in.write_text("\n".join(lines) + "\n")
    (keep / "check.py").write_text(CHECK)
    arguments = " ".join(["/mnt/keep/found.json", target, *units])
    (unit_folder / "check.service").write_text(
        "[Unit]\nSuccessAction=exit\nFailureAction=exit\nFailureActionExitStatus=1\n"
        "[Service]\nType=oneshot\nStandardOutput=append:/mnt/keep/check.log\nStandardError=append:/mnt/keep/check.log\n"
        f"ExecStart=/usr/bin/env python3 /mnt/keep/check.py {arguments}\n"
    )
    command = [HERE / "systemd_sandbox.sh", "--units", unit_folder, "--keep", keep, "--start", "check.service"]
    command += ["--timeout", str(BOOT_S_MAX)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=BOOT_S_MAX + 30)
    if done.returncode == CANNOT:
        pytest.skip(done.stderr.strip())
    log = keep / "check.log"
    assert (keep / "found.json").exists(), f"{done.stdout}\n{done.stderr}\n{log.read_text() if log.exists() else ''}"
    found: dict[str, dict[str, str]] = json.loads((keep / "found.json").read_text())
    return found


@pytest.mark.root
@pytest.mark.parametrize(
    ("target", "units"),
    [
        (
            "kvforge.target",
            [
                "kvforge-coordinator.service",
                "kvforge-worker@cpu.service",
                "kvforge-gateway.service",
                "kvforge-drain.service",
                "kvforge-group@big.target",
                "kvforge-worker@big-0.service",
                "kvforge-worker@big-1.service",
            ],
        ),
        ("kvforge-group@big.target", ["kvforge-worker@big-0.service", "kvforge-worker@big-1.service"]),
    ],
    ids=["everything", "one group"],
)
def test_when_a_target_is_stopped_its_services_have_ended(tmp_path: Path, target: str, units: list[str]) -> None:
    found = stopped(tmp_path, target, units)
    assert set(found["before"].values()) == {"active"}, found
    assert {unit: state for unit, state in found["after"].items() if state != "inactive"} == {}


if __name__ == "__main__":
    print(stopped(Path(sys.argv[1]), sys.argv[2], sys.argv[3:]))
