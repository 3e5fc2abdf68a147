"""The unit files: that they are ours and that systemd takes them; and how the services that are started are."""

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
SYSTEMD_MIN = 245  # ProtectClock=, the youngest of what the units cannot do without
NO_PROGRAM = "is not executable"  # the environment is looked at by itself
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
    """The files themselves."""
    missing = [name for name in UNITS if not (places.units / name).exists()]
    if missing:
        return [wrong(f"{places.units} lacks {', '.join(missing)}", INSTALL)]
    edited = [name for name in UNITS if (places.units / name).read_bytes() != (FILES / name).read_bytes()]
    findings = [
        warning(f"{places.units / name} is not what this version brings", f"{INSTALL}; own settings go into drop-ins")
        for name in edited
    ]
    return [*findings, *_verify(places)]


def _verify(places: Places) -> list[Finding]:
    """What systemd itself says of them."""
    if shutil.which("systemd-analyze") is None:
        return [wrong("there is no systemd here", "the units need it; elsewhere, `kvforge up` runs the service")]
    version = re.search(r"systemd (\d+)", run(["systemd-analyze", "--version"]).output)
    if version is not None and int(version[1]) < SYSTEMD_MIN:
        return [warning(f"systemd is {version[1]}", f"some hardening of the units needs {SYSTEMD_MIN}")]
    with tempfile.TemporaryDirectory(prefix="kvforge-") as folder:
        # A template is looked at by one of its instances.
        paths = [shutil.copy(places.units / name, Path(folder) / name.replace("@", "@gpu0")) for name in UNITS]
        done = run(["systemd-analyze", "verify", "--man=no", "--recursive-errors=no", *paths])
    ours = [line.strip() for line in done.errors.splitlines() if "kvforge" in line and NO_PROGRAM not in line]
    if ours:
        return [wrong(f"systemd says: {line}", INSTALL) for line in ours]
    return [good(f"units in {places.units}, which systemd {version[1] if version else ''} takes")]


def check_services(places: Places) -> list[Finding]:
    """How they are, where systemd runs. One that failed says why, as far as systemd was told."""
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
        return [warning("systemd does not run here", "nothing can be said of the services")]
    findings = []
    for block in done.output.strip().split("\n\n"):
        facts = dict(line.split("=", 1) for line in block.splitlines() if "=" in line)
        findings.append(_service(facts))
    return findings


def _service(facts: dict[str, str]) -> Finding:
    """One unit, of what `systemctl show` says of it."""
    name, state, restarts = facts["Id"], facts["ActiveState"], int(facts.get("NRestarts") or 0)
    if state == "failed":
        how = RESULTS.get(facts["Result"], facts["Result"]).format(status=facts.get("ExecMainStatus", "?"))
        how += f", and was started again {restarts} times before it was given up" if restarts else ""
        remedy = f"journalctl -u {name} has its last words; then systemctl reset-failed {name}, and start it"
        return wrong(f"{name} has failed: it {how}", remedy)
    text = f" ({facts['StatusText']})" if facts.get("StatusText") else ""
    if state in ("active", "activating", "deactivating"):
        told = f"{name} is {state}{text}"
        if restarts:
            return warning(f"{told}, started again {restarts} times", f"journalctl -u {name} says why")
        return good(told)
    enabled = facts.get("UnitFileState", "") or "not enabled"
    if name == GATEWAY and enabled != "enabled":
        return good(f"{name} is {enabled}: HTTP is not wanted (systemctl enable --now {name})")
    return warning(f"{name} is {state} ({enabled})", f"systemctl enable --now {name}")
