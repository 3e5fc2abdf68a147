"""Checks an installed service and suggests remedies. Changes nothing."""

from __future__ import annotations

import json
import os
import platform
import re
from pathlib import Path
from typing import Any

from kvforge.protocol.errors import Unavailable
from kvforge.protocol.exits import OK

from .accounts import Account, account
from .findings import WRONG, Finding, good, warning, wrong
from .folders import check_file_system, check_folders
from .gpus import check_devices
from .places import CACHE_DIR, PYTHON, RUNTIME_DIR, STATE_DIR, USER, Places
from .program import Outcome, run
from .units import check_services, check_units

__all__ = ["WRONG", "check"]

INSTALL = "sudo kvforge deploy install"
KERNEL_MIN = (5, 3)  # pidfd_open
STATE_BYTES_MIN = 1 << 30  # a journal grows until its next snapshot


def check(places: Places) -> list[Finding]:
    """Return all findings, in the order in which to fix them.

    Raises:
        Unavailable: The caller is not root.
    """
    if places.here and os.geteuid() != 0:
        raise Unavailable("the check needs root to see all files: use sudo")
    user = account(places)
    return [
        *_check_kernel(),
        *_check_user(user),
        *check_folders(places, user),
        *check_units(places),
        *_check_environment(places, user),
        *_check_coordinator(places, user),
        *_check_workers(places, user),
        *_check_gateway(places, user),
        *check_services(places),
    ]


def _check_kernel() -> list[Finding]:
    release = platform.release()
    numbers = tuple(map(int, re.findall(r"\d+", release)[:2]))
    if numbers < KERNEL_MIN:
        return [wrong(f"the kernel is {release}", "5.3 or later is needed to end a hung worker safely")]
    return [good(f"kernel {release}")]


def _check_user(user: Account | None) -> list[Finding]:
    if user is None:
        return [wrong(f"there is no user {USER}", INSTALL)]
    return [good(f"user {USER}, a member of {', '.join(sorted(user.groups))}")]


def _check_environment(places: Places, user: Account | None) -> list[Finding]:
    """Check that the service's Python starts as the service's user and has this version of kvforge."""
    from kvforge import __version__

    python = places.of(PYTHON)
    if not python.exists():
        return [wrong(f"there is no environment: {python} is missing", INSTALL)]
    script = "import kvforge, sys; print(kvforge.__version__, '.'.join(map(str, sys.version_info[:3])))"
    try:
        done = _run(python, user, "-P", "-c", script)
    except Unavailable as error:
        return [wrong(f"{python} cannot be started as {USER}: {error}", INSTALL)]
    if done.status != OK:
        return [wrong(f"{python} cannot run kvforge as {USER}: {done.last_words}", INSTALL)]
    version, _, python_version = done.output.strip().partition(" ")
    fact = f"{python}: Python {python_version}, kvforge {version}"
    if version != __version__:
        return [warning(f"{fact}; this is kvforge {__version__}", INSTALL)]
    return [good(fact)]


def _check_coordinator(places: Places, user: Account | None) -> list[Finding]:
    path = places.configuration / "coordinator.toml"
    meaning, findings = _load_as_role(places, "coordinator", path, user)
    if meaning is None:
        return findings
    runtime, state = Path(meaning["runtime_dir"]), Path(meaning["state_dir"])
    if runtime != RUNTIME_DIR:
        problem = f"{path}: runtime_dir is {runtime}, but the unit creates {RUNTIME_DIR} and allows no other"
        findings.append(wrong(problem, f'set runtime_dir = "{RUNTIME_DIR}", or RuntimeDirectory= in a drop-in'))
    if state != STATE_DIR:
        problem = f"{path}: state_dir is {state}, but the unit creates {STATE_DIR}"
        remedy = f'set state_dir = "{STATE_DIR}", or ReadWritePaths={state} in a drop-in'
        findings.append(warning(problem, remedy))
    if meaning.get("on_stop") == "drain":
        problem = f"{path}: with on_stop = drain a restart of the coordinator hands requests back and stops the workers"
        findings.append(warning(problem, 'set on_stop = "keep"; kvforge-drain.service drains when all services stop'))
    findings += check_file_system("runtime_dir", places.of(runtime), int(meaning["tables_bytes"]), lasting=False)
    findings += check_file_system("state_dir", places.of(state), STATE_BYTES_MIN, lasting=True)
    return findings


def _check_workers(places: Places, user: Account | None) -> list[Finding]:
    found = places.workers()
    if not found:
        return [wrong(f"no worker is configured in {places.configuration}", f"{INSTALL} --worker gpu0")]
    findings: list[Finding] = []
    names: dict[tuple[str, int], Path] = {}
    ranks: dict[str, set[int]] = {}
    for instance, path in found:
        meaning, problems = _load_as_role(places, "worker", path, user)
        findings += problems
        if meaning is None:
            continue
        findings += check_devices(instance, str(meaning["kind"]), user)
        name, rank, count = str(meaning["name"]), int(meaning["rank"]), int(meaning["ranks"])
        if (other := names.setdefault((name, rank), path)) != path:
            way_out = "give each worker its own `name`, or each rank of one its own `rank`"
            findings.append(wrong(f"{other} and {path} have one name", way_out))
        missing = ranks.setdefault(name, set(range(count)))
        missing.discard(rank)
        if Path(meaning["runtime_dir"]) != RUNTIME_DIR:
            told_dir = f"{path}: runtime_dir is {meaning['runtime_dir']}, the coordinator's is {RUNTIME_DIR}"
            findings.append(wrong(told_dir, f'set runtime_dir = "{RUNTIME_DIR}"'))
    for name, missing in ranks.items():
        if missing:
            absent = f"worker {name!r}: rank {', '.join(map(str, sorted(missing)))} is not configured"
            findings.append(wrong(absent, f"the other ranks wait for it: add its file to {places.configuration}"))
    return findings


def _check_gateway(places: Places, user: Account | None) -> list[Finding]:
    """Check the gateway's file, which is installed even if HTTP is not used."""
    path = places.configuration / "gateway.toml"
    meaning, findings = _load_as_role(places, "gateway", path, user)
    if meaning is not None and meaning["runtime_dir"] not in ("", str(RUNTIME_DIR)):
        problem = f"{path}: runtime_dir is {meaning['runtime_dir']}, the coordinator's is {RUNTIME_DIR}"
        findings.append(wrong(problem, f'set runtime_dir = "{RUNTIME_DIR}"'))
    return findings


def _load_as_role(
    places: Places, role: str, path: Path, user: Account | None
) -> tuple[dict[str, Any] | None, list[Finding]]:
    """Return the configuration as the role itself loads it, running as the service's user."""
    if not path.exists():
        return None, [wrong(f"{path} is missing", INSTALL)]
    try:
        done = _run(places.of(PYTHON), user, "-P", "-m", f"kvforge.{role}", "--config", str(path), "--check")
    except Unavailable as error:
        return None, [wrong(f"{path} cannot be checked: {error}", INSTALL)]
    if done.status != OK:
        return None, [wrong(f"{path}: {done.last_words.removeprefix(f'{role}: ')}", _remedy(role))]
    meaning = json.loads(done.output.splitlines()[-1])
    values = {
        name: value for name, value in meaning.items() if name not in ("runtime_dir", "state_dir", "kind", "name")
    }
    facts = ", ".join(f"{name} {value}" for name, value in values.items())
    return meaning, [good(f"{path}: {facts}")]


def _remedy(role: str) -> str:
    fetch = f"; to fetch a known model: `sudo -u {USER} env KVFORGE_CACHE_DIR={CACHE_DIR} kvforge pull NAME`"
    return f"fix it and check again{fetch if role == 'worker' else ''}"


def _run(python: Path, user: Account | None, *arguments: str) -> Outcome:
    environment = {"PATH": os.defpath, "KVFORGE_CACHE_DIR": str(CACHE_DIR), "HOME": str(CACHE_DIR)}
    return run([python, *arguments], environment=environment, account=user)
