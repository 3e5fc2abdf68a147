"""Boot a machine with systemd beside other tests: the boot spends nearly all of its minute and a half waiting.

    python -m tests.integration.systemd_boot FOLDER

FOLDER: is created, and finally contains `found.json`: the findings of systemd_check.py with `logs`, or the reason for
their absence as `skip` or `error`. The caller locks a file and passes its descriptor on: the lock is free when the boot
has ended.
"""

from __future__ import annotations

import fcntl
import json
import subprocess
import sys
from contextlib import suppress
from pathlib import Path
from typing import Any

import msgspec
import numpy
import torch
import transformers
import zmq

from kvforge.deploy.environment import HIDDEN
from tools.chaos import tokenizer
from tools.cluster.running import tiny_model

HERE = Path(__file__).parent
CHECKOUT = HERE.parents[1]
BOOT_S_MAX = (
    1200  # ends a boot that hangs; beside busy tests it took more than 300 s, and each of its steps has a limit
)
CANNOT, EXPIRED = 77, 124  # the sandbox's exit status if it cannot boot, and after BOOT_S_MAX
KEEP = "/mnt/keep"  # mount point of the test's folder in the sandbox


def begin(folder: Path) -> subprocess.Popen[bytes] | None:
    """Boot a machine in the background, unless one was booted already."""
    with _locked(folder) as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return None  # it is booting
        if (folder / "found.json").exists():
            return None
        folder.mkdir(exist_ok=True)
        with (folder / "boot.log").open("w") as log:
            command = [sys.executable, "-m", __name__, str(folder)]
            return subprocess.Popen(command, cwd=CHECKOUT, stdout=log, stderr=log, pass_fds=(lock.fileno(),))


def wait(folder: Path) -> dict[str, Any]:
    """Wait for the findings and return them."""
    with _locked(folder) as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
    with suppress(FileNotFoundError):
        found: dict[str, Any] = json.loads((folder / "found.json").read_text())
        return found
    return {"error": (folder / "boot.log").read_text()}


def _locked(folder: Path) -> Any:
    return folder.with_suffix(".lock").open("w")


class Skip(Exception):
    """No machine can boot here; the message has the reason."""


def services_python() -> str:
    """Return a Python that services can see and that can use this interpreter's packages."""
    same = f"python{sys.version_info.major}.{sys.version_info.minor}"
    folders = [str(Path(sys.base_prefix) / "bin"), "/usr/bin", "/usr/local/bin"]
    for folder in folders:
        path = Path(folder) / same
        if path.exists() and not any(path.resolve().is_relative_to(hidden) for hidden in HIDDEN):
            return str(path)
    raise Skip(f"no {same} outside home folders, which services do not see")


def site_folders() -> list[str]:
    """Return the folders of kvforge's dependencies for this interpreter."""
    return sorted({str(Path(module.__file__).parents[1]) for module in (msgspec, numpy, torch, transformers, zmq)})


def write_units(units: Path, python: str) -> None:
    """Write the units of the test: the check, and drop-ins for readable logs and a short watchdog."""
    units.mkdir()
    for name in ("kvforge-coordinator", "kvforge-worker@", "kvforge-drain", "kvforge-gateway"):
        drop_in = units / f"{name}.service.d" / "test.conf"
        drop_in.parent.mkdir()
        log = f"append:{KEEP}/{name}.log"
        drop_in.write_text(f"[Service]\nStandardOutput={log}\nStandardError={log}\nRestartSec=0\n")
    with (units / "kvforge-coordinator.service.d" / "test.conf").open("a") as drop_in_file:
        drop_in_file.write("WatchdogSec=4\n")
    twin = units / "kvforge-worker@twin.service.d" / "test.conf"
    twin.parent.mkdir()
    twin.write_text("[Unit]\nStartLimitBurst=2\n")
    arguments = f"{KEEP}/found.json {python} {KEEP}/model {' '.join(site_folders())}"
    (units / "check.service").write_text(
        "[Unit]\nSuccessAction=exit\nFailureAction=exit\nFailureActionExitStatus=1\n"
        f"[Service]\nType=oneshot\nWorkingDirectory={CHECKOUT}\nStandardOutput=append:{KEEP}/check.log\n"
        f"StandardError=append:{KEEP}/check.log\n"
        f"Environment=PYTHONPATH={CHECKOUT} PYTHONDONTWRITEBYTECODE=1 KVFORGE_RUNTIME_DIR=/run/kvforge\n"
        f"ExecStart={sys.executable} {HERE / 'systemd_check.py'} {arguments}\n"
    )


def boot(folder: Path) -> dict[str, Any]:
    """Boot and run systemd_check.py from the installation on. Raises Skip."""
    units, keep = folder / "units", folder / "keep"
    keep.mkdir()
    write_units(units, services_python())
    tokenizer.write(tiny_model(keep))
    command = [HERE / "systemd_sandbox.sh", "--units", units, "--keep", keep, "--start", "check.service"]
    command += ["--show", CHECKOUT, "--timeout", str(BOOT_S_MAX)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=BOOT_S_MAX + 30)
    if done.returncode == CANNOT:
        raise Skip(done.stderr.strip())
    logs = "\n".join(f"== {path.name}\n{path.read_text()}" for path in sorted(keep.glob("*.log")))
    if done.returncode == EXPIRED:
        return {"error": f"the boot did not end in {BOOT_S_MAX} s\n{done.stdout}\n{done.stderr}\n{logs}"}
    if not (keep / "found.json").exists():
        return {"error": f"{done.stdout}\n{done.stderr}\n{logs}"}
    result: dict[str, Any] = json.loads((keep / "found.json").read_text())
    if "error" in result or done.returncode:
        return {"error": f"{result.get('error')}\n{result.get('states')}\n{done.stdout}\n{logs}"}
    return {**result, "logs": logs}


def main() -> None:
    folder = Path(sys.argv[1])
    try:
        found = boot(folder)
    except Skip as reason:
        found = {"skip": str(reason)}
    (folder / "found.json").write_text(json.dumps(found))


if __name__ == "__main__":
    main()
