"""Installs the service: user, folders, environment, configuration, units. Existing parts are left alone."""

from __future__ import annotations

import os
import re
import tomllib
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from itertools import chain
from pathlib import Path

from kvforge.launch.host import DEVICE_FILES
from kvforge.launch.settings import toml_value
from kvforge.protocol.errors import InvalidConfiguration, Unavailable

from .accounts import account
from .environment import HIDDEN, Python, environment
from .install_step import EVERYBODY, InstallStep, Owner, Record, place
from .places import CACHE_DIR, FILES, GPU_GROUPS, STATE_DIR, UNITS, USER, Places
from .program import must

INSTANCE = re.compile(r"cpu|gpu(0|[1-9][0-9]{0,3})")
SYSTEMD_RUNS = Path("/run/systemd/system")


@dataclass(frozen=True)
class InstallOptions:
    """The options of an installation.

    Attributes:
        instances: The devices that get a worker each (`gpu0`, `gpu1`, `cpu`).
        model: The model that they serve; None: unchanged, else the example's.
        python: The Python for the environment; None: create no environment.
    """

    instances: tuple[str, ...]
    model: str | None = None
    python: Python | None = None

    def check(self) -> None:
        """Check the options.

        Raises:
            InvalidConfiguration: Names a wrong option.
        """
        for instance in self.instances:
            if INSTANCE.fullmatch(instance) is None:
                raise InvalidConfiguration("--worker", f"is {instance!r}; it must be cpu, or gpu0, gpu1 and so on")
        if self.python is not None:
            self.python.check()


def instances(places: Places, named: Sequence[str]) -> tuple[str, ...]:
    """Return the instances to install: the named ones, else the configured ones, else one per device."""
    configured = [instance for instance, _ in places.workers() if INSTANCE.fullmatch(instance)]
    return tuple(dict.fromkeys(named or configured)) or devices()


def model_path(model: str | None) -> str | None:
    """Return a model as the service's configuration names it.

    Raises:
        InvalidConfiguration: The path is not visible to services.
    """
    if model is None:
        return None
    path = Path(model).expanduser()
    if not path.is_absolute() and path.exists():
        path = path.absolute()
    if not path.is_absolute():
        return model
    if any(path.is_relative_to(folder) for folder in HIDDEN):
        raise InvalidConfiguration(
            "--model", f"{path} is in a home folder, which services cannot see: put it elsewhere"
        )
    return str(path)


def devices(root: Path = Path("/dev")) -> tuple[str, ...]:
    """Return the instances for this machine: one for each GPU, else the CPU."""
    nvidia = len(list(root.glob(DEVICE_FILES["cuda"][0])))
    amd = len(list(root.glob("dri/renderD*"))) if (root / "kfd").exists() else 0
    return tuple(f"gpu{index}" for index in range(nvidia or amd)) or ("cpu",)


def install(places: Places, options: InstallOptions, say: Callable[[str], None], *, dry_run: bool) -> int:
    """Install missing parts, and announce each step.

    Args:
        places: The files of the service.
        options: The options.
        say: Takes one line.
        dry_run: Only announce the steps.

    Returns:
        The number of steps.

    Raises:
        InvalidConfiguration: Names a wrong option.
        Unavailable: The caller is not root, or a step failed.
    """
    options.check()
    if places.here and os.geteuid() != 0 and not dry_run:
        raise Unavailable("only root can install the service: use sudo, or --root DIR for a system image")
    count, mask = 0, os.umask(0o022)  # the service's user must be able to read the files
    try:
        for step in chain.from_iterable(_parts(places, options, Record(places))):
            if step.act is None:
                say(step.words)
                continue
            say(f"would {step.words}" if dry_run else step.words)
            count += 1
            if not dry_run:
                step.act()
    except OSError as error:
        hint = ": use sudo" if isinstance(error, PermissionError) else ""
        raise Unavailable(f"{error.filename} cannot be used: {error.strerror}{hint}") from None
    finally:
        os.umask(mask)
    return count


def _parts(places: Places, options: InstallOptions, record: Record) -> Iterator[list[InstallStep]]:
    """Yield the missing steps of each part, evaluated after the previous part is done."""
    yield place(places.sysusers, _packaged("sysusers.d/kvforge.conf"), EVERYBODY, record)
    yield _users(places)
    yield place(places.tmpfiles, _packaged("tmpfiles.d/kvforge.conf"), EVERYBODY, record)
    yield _folders(places)
    if options.python is not None:
        yield environment(places, options.python, record)
    yield _configuration(places, options, record)
    units = [step for name in UNITS for step in place(places.units / name, _packaged(name), EVERYBODY, record)]
    changed = any(step.act is not None for step in units)
    yield units
    if changed and places.here and SYSTEMD_RUNS.exists():
        yield [InstallStep("reload systemd's units", partial(must, ["systemctl", "daemon-reload"]))]


def _packaged(name: str) -> bytes:
    """Return a file of deploy/ of this kvforge."""
    return (FILES / name).read_bytes()


def _users(places: Places) -> list[InstallStep]:
    found = account(places)
    if found is not None and set(GPU_GROUPS) <= set(found.groups):
        return []
    what = f"create the user {USER}" if found is None else f"add the user {USER} to {' and '.join(GPU_GROUPS)}"
    return [InstallStep(what, partial(must, _systemd("systemd-sysusers", places)))]


def _folders(places: Places) -> list[InstallStep]:
    """Return the step that creates the folders of tmpfiles.d/kvforge.conf, if one is missing or differs."""
    found = account(places)
    service = Owner(0, 0, 0) if found is None else Owner(found.uid, found.gid, 0)
    wanted = {
        places.configuration: Owner(0, service.gid, 0o750),
        places.of(STATE_DIR): Owner(service.uid, service.gid, 0o700),
        places.of(CACHE_DIR): Owner(service.uid, service.gid, 0o750),
    }
    if all(path.is_dir() and owner.holds(path) for path, owner in wanted.items()):
        return []
    names = ", ".join(map(str, wanted))
    return [
        InstallStep(f"create the folders {names}", partial(must, [*_systemd("systemd-tmpfiles", places), "--create"]))
    ]


def _systemd(program: str, places: Places) -> list[str | Path]:
    return [program, *([] if places.here else [f"--root={places.root}"]), "kvforge.conf"]


def _configuration(places: Places, options: InstallOptions, record: Record) -> list[InstallStep]:
    found = account(places)
    owner = Owner(0, 0 if found is None else found.gid, 0o640)  # it may hold keys later
    steps = place(places.configuration / "coordinator.toml", _packaged("coordinator.toml"), owner, record)
    steps += place(places.configuration / "gateway.toml", _packaged("gateway.toml"), owner, record)
    for instance in options.instances:
        path = places.configuration / f"worker-{instance}.toml"
        steps += place(path, worker_file(instance, options.model or _served(path)), owner, record)
    return steps


def _served(path: Path) -> str | None:
    """Return the model in a worker's configuration; None if it has none or cannot be read."""
    with suppress(OSError, ValueError, KeyError):
        return str(tomllib.loads(path.read_text(encoding="utf-8"))["model"])
    return None


def worker_file(instance: str, model: str | None) -> bytes:
    """Return the example configuration for one device."""
    found = INSTANCE.fullmatch(instance)
    assert found is not None, "checked before"
    values = {"name": f'"{instance}"', "device_index": found[1] or "0"}
    if instance == "cpu":
        values["device"] = '"cpu"'
    if model is not None:
        values["model"] = toml_value("model", model)
    text = _packaged("worker.toml").decode()
    for key, value in values.items():
        text, count = re.subn(rf"^{key} = \S+ *", lambda _: f"{key} = {value}".ljust(34), text, flags=re.MULTILINE)  # noqa: B023
        assert count == 1, f"worker.toml has {key} {count} times"
    return text.encode()
