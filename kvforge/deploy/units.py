"""Checks the unit files, systemd's verdict on these files, and the state of the services."""

from __future__ import annotations

import re
import shutil
import tempfile
from pathlib import Path

from kvforge.protocol.errors import Unavailable

from .findings import Finding, good, warning, wrong
from .places import FILES, UNITS, Places
from .program import run

INSTALL = "sudo kvforge deploy install"
GATEWAY = "kvforge-gateway.service"
SYSTEMD_MIN = 245  # ProtectClock=, the newest feature that the units need
NO_PROGRAM = "is not executable"  # the environment has its own check
PROPERTIES = "Id,ActiveState,Result,ExecMainStatus,StatusText,NRestarts,UnitFileState"
RESULTS = {
    "exit-code": "ended with exit status {status}",
    "signal": "was killed by signal {status}",
    "core-dump": "crashed (signal {status})",
    "watchdog": "hung, and was ended",
    "timeout": "did not start or stop in time",
    "start-limit-hit": "ended too often and is not started again",
}


def check_units(places: Places) -> list[Finding]:
    """Check that the unit files are installed, unedited and valid."""
    missing = [name for name in UNITS if not (places.units / name).exists()]
    if missing:
        return [wrong(f"{places.units} lacks {', '.join(missing)}", INSTALL)]
    edited = [name for name in UNITS if (places.units / name).read_bytes() != (FILES / name).read_bytes()]
    findings = [
        warning(f"{places.units / name} is not this version's file", f"{INSTALL}; put your settings into drop-ins")
        for name in edited
    ]
    return [*findings, *_verify(places)]


def _verify(places: Places) -> list[Finding]:
    """Return the result of systemd's own verification."""
    if shutil.which("systemd-analyze") is None:
        return [wrong("there is no systemd here", "the units need it; elsewhere, `kvforge up` runs the service")]
    version = re.search(r"systemd (\d+)", run(["systemd-analyze", "--version"]).output)
    if version is not None and int(version[1]) < SYSTEMD_MIN:
        return [warning(f"systemd is {version[1]}", f"some hardening of the units needs {SYSTEMD_MIN}")]
    with tempfile.TemporaryDirectory(prefix="kvforge-") as folder:
        # A template is verified by one of its instances.
        paths = [shutil.copy(places.units / name, Path(folder) / name.replace("@", "@gpu0")) for name in UNITS]
        done = run(["systemd-analyze", "verify", "--man=no", "--recursive-errors=no", *paths])
    ours = [line.strip() for line in done.errors.splitlines() if "kvforge" in line and NO_PROGRAM not in line]
    if ours:
        return [wrong(f"systemd reports: {line}", INSTALL) for line in ours]
    return [good(f"units in {places.units}, accepted by systemd {version[1] if version else ''}")]


def check_services(places: Places) -> list[Finding]:
    """Check the services, if systemd runs. A failed one reports the reason that systemd knows."""
    names = [
        "kvforge-coordinator.service",
        *(f"kvforge-worker@{instance}.service" for instance, _ in places.workers()),
        GATEWAY,
        "kvforge.target",
    ]
    try:
        done = run(["systemctl", "show", "--property", PROPERTIES, *names])
    except Unavailable:
        return []
    if done.status != 0:
        return [warning("systemd does not run here", "the services cannot be checked")]
    findings = []
    for block in done.output.strip().split("\n\n"):
        facts = dict(line.split("=", 1) for line in block.splitlines() if "=" in line)
        findings.append(_service(facts))
    return findings


def _service(facts: dict[str, str]) -> Finding:
    """Return the finding for one unit from the output of `systemctl show`."""
    name, state, restarts = facts["Id"], facts["ActiveState"], int(facts.get("NRestarts") or 0)
    if state == "failed":
        how = RESULTS.get(facts["Result"], facts["Result"]).format(status=facts.get("ExecMainStatus", "?"))
        how += f", after {restarts} restarts" if restarts else ""
        remedy = f"see journalctl -u {name}; then systemctl reset-failed {name}, and start it"
        return wrong(f"{name} has failed: it {how}", remedy)
    text = f" ({facts['StatusText']})" if facts.get("StatusText") else ""
    if state in ("active", "activating", "deactivating"):
        fact = f"{name} is {state}{text}"
        if restarts:
            return warning(f"{fact}, restarted {restarts} times", f"see journalctl -u {name} for the reason")
        return good(fact)
    enabled = facts.get("UnitFileState", "") or "not enabled"
    if name == GATEWAY and enabled != "enabled":
        return good(f"{name} is {enabled}: HTTP is off (systemctl enable --now {name})")
    return warning(f"{name} is {state} ({enabled})", f"systemctl enable --now {name}")
