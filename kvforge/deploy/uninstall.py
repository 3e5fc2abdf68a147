"""Removes the files that `install` created. Configuration, state, models and the user stay, unless purged."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable, Iterator
from contextlib import suppress
from functools import partial
from itertools import chain
from pathlib import Path

from kvforge.protocol.errors import Unavailable

from .accounts import account
from .install import SYSTEMD_RUNS
from .install_step import NEW, InstallStep, Record, digest
from .places import CACHE_DIR, RUNTIME_DIR, STATE_DIR, UNITS, USER, Places
from .program import must, run

EDITED = ".edited"
# Units that systemd may have loaded, including instances of templates.
LOADED = ("kvforge-*.service", "kvforge-*.target", "kvforge.target")


def uninstall(places: Places, say: Callable[[str], None], *, dry_run: bool, purge: bool) -> int:
    """Remove the service, and announce each step.

    Args:
        places: The files of the service.
        say: Takes one line.
        dry_run: Only announce the steps.
        purge: Also remove configuration, state, cached models and the user.

    Returns:
        The number of steps.

    Raises:
        Unavailable: The caller is not root, or a file cannot be removed.
    """
    if places.here and os.geteuid() != 0 and not dry_run:
        raise Unavailable("only root can remove the service: use sudo, or --root DIR for a system image")
    count = 0
    try:
        for step in chain.from_iterable(_parts(places, Record(places), purge)):
            say(f"would {step.words}" if dry_run else step.words)
            count += 1
            if not dry_run and step.act is not None:
                step.act()
    except OSError as error:
        hint = ": use sudo" if isinstance(error, PermissionError) else ""
        raise Unavailable(f"{error.filename} cannot be removed: {error.strerror}{hint}") from None
    return count


def _parts(places: Places, record: Record, purge: bool) -> Iterator[list[InstallStep]]:
    """Yield the steps in an order that removes nothing while a running process needs it."""
    units = [places.units / name for name in UNITS]
    running = places.here and SYSTEMD_RUNS.exists()
    if any(unit.exists() for unit in units):
        yield _stop(places, running)
    files = [step for path in units for step in _file(path, record)]
    yield files
    if files and running:
        yield [InstallStep("reload systemd's units", partial(_reload))]
    yield [*_file(places.tmpfiles, record), *_file(places.sysusers, record)]
    yield _environment(places)
    if purge:
        yield _state(places)


def _stop(places: Places, running: bool) -> list[InstallStep]:
    """Stop the services and disable their start at boot."""
    named = [name for name in UNITS if "@" not in name]
    named += [f"kvforge-worker@{instance}.service" for instance, _ in places.workers()]
    root = [] if places.here else [f"--root={places.root}"]
    steps = [InstallStep("stop the services", partial(must, ["systemctl", "stop", *LOADED]))] if running else []
    return [*steps, InstallStep("disable the services", partial(_disable, ["systemctl", *root, "disable", *named]))]


def _disable(command: list[str]) -> None:
    if shutil.which(command[0]) is not None:  # a system image may be built without systemd
        run(command)  # it may fail for a unit that was never enabled


def _reload() -> None:
    must(["systemctl", "daemon-reload"])
    run(["systemctl", "reset-failed", *LOADED])  # so that failed units are no longer listed


def _file(path: Path, record: Record) -> list[InstallStep]:
    """Remove a file, and the newer version beside it; keep an edited one under another name."""
    beside = path.with_name(path.name + NEW)
    steps = [InstallStep(f"remove {beside}", partial(beside.unlink, missing_ok=True))] if beside.exists() else []
    if not path.exists():
        return steps
    noted = record.get(path)
    if noted and digest(path.read_bytes()) != noted:
        kept = path.with_name(path.name + EDITED)
        return [*steps, InstallStep(f"keep the edited {path} as {kept}", partial(_move, path, kept))]
    return [*steps, InstallStep(f"remove {path}", path.unlink)]


def _move(path: Path, to: Path) -> None:
    path.replace(to)


def _environment(places: Places) -> list[InstallStep]:
    """Remove the environments, the link to one, and the record of the installation."""
    folder = places.record.parent
    paths = [places.venv, places.environments, places.record]
    if not any(path.exists() or path.is_symlink() for path in paths):
        return []

    def remove() -> None:
        for path in paths:
            _remove(path)
        with suppress(OSError):  # it holds files of others
            folder.rmdir()

    return [InstallStep(f"remove the environment {folder}", remove)]


def _state(places: Places) -> list[InstallStep]:
    folders = [places.configuration, *map(places.of, (STATE_DIR, CACHE_DIR, RUNTIME_DIR))]
    folders += sorted(places.units.glob("kvforge*.d"))  # created by `systemctl edit`
    steps = [InstallStep(f"remove {path} and its content", partial(_remove, path)) for path in folders if path.exists()]
    if account(places) is not None:
        prefix = [] if places.here else ["--prefix", str(places.root)]
        steps.append(InstallStep(f"remove the user {USER}", partial(must, ["userdel", *prefix, USER])))
    return steps


def _remove(path: Path) -> None:
    """Remove a file, a link or a folder with its content, if it exists."""
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)
