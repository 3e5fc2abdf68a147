"""The virtual environment that the units start, with this version of kvforge and its dependencies.

Each environment is built beside the earlier ones; a link to the current one is replaced once the new one is complete. A
running process keeps the files of its own environment, even for late imports, because it resolves the link at its start
(`PINNED`). A later installation removes an old environment once no process uses it.
"""

from __future__ import annotations

import hashlib
import os
import re
import shutil
import sys
import tempfile
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

from kvforge.protocol.errors import InvalidConfiguration

from .install_step import InstallStep, Record
from .places import Places
from .program import must
from .wheel import Wheel

EXTRAS = "worker,gateway,tcp"  # tcp: the coordinator's [tcp] works in every environment, even after an upgrade
VENV = "environment"  # its name in the record
# Python reads the .pth files beside its packages at its start, in the order of their names.
PIN = "zz-kvforge-pin.pth"
PINNED = "; ".join(
    [
        "import os, sys",
        "sys.path[:] = dict.fromkeys(map(os.path.realpath, sys.path))",
        "sys.executable = os.path.realpath(sys.prefix) + sys.executable[len(sys.prefix) :]",
        "sys.prefix = sys.exec_prefix = os.path.realpath(sys.prefix)\n",
    ]
)
TORCH = "torch==2.13.0"  # as in the Makefile: a newer release is not tested
TORCH_REQUIREMENT = re.compile(r"torch\s*($|[=<>!~@\[])")
HIDDEN = ("/root", "/home", "/run/user")  # from services, by ProtectHome=


@dataclass(frozen=True)
class Python:
    """The Python for the environment.

    Attributes:
        path: The interpreter that the environment is created from.
        pip: Arguments of `pip install`, such as `--index-url=...`.
        system_packages: Whether to use packages installed for the interpreter (a ROCm build of torch).
    """

    path: Path
    pip: Sequence[str] = ()
    system_packages: bool = False

    def check(self) -> None:
        """Check that services can start the interpreter.

        Raises:
            InvalidConfiguration: They cannot.
        """
        real = self.path.resolve()
        if not os.access(real, os.X_OK):
            raise InvalidConfiguration("--python", f"{self.path} cannot be started")
        if any(real.is_relative_to(folder) for folder in HIDDEN):
            problem = f"{real} is in a home folder, which services cannot see"
            raise InvalidConfiguration("--python", f"{problem}: name another one, such as /usr/bin/python3")


def own_python() -> Path:
    """Return the interpreter that this one's environment was created from, if it is in one."""
    return Path(sys.base_prefix) / "bin" / f"python{sys.version_info.major}.{sys.version_info.minor}"


def environment(places: Places, python: Python, record: Record) -> list[InstallStep]:
    """Return the steps that bring the environment to this version of kvforge."""
    wheel = Wheel()
    wanted = _digest(wheel, python)
    steps = [InstallStep(f"remove the unused environment {old}", partial(shutil.rmtree, old)) for old in _left(places)]
    if (places.venv / "bin" / "pip").exists() and record.get(VENV) == wanted:
        return steps
    made = places.environments / str(1 + max(map(_number, _all(places)), default=0))
    command: list[str | Path] = [python.path, "-m", "venv", *(["--system-site-packages"] * python.system_packages)]
    fill = partial(_fill, places, made, python, wheel)
    return [
        *steps,
        InstallStep(f"create the environment {made} from {python.path}", partial(must, [*command, made])),
        InstallStep(f"install kvforge {wheel.version} and its dependencies in {made}", fill),
        InstallStep(f"link {places.venv} to it", partial(_switch, places, made, record, wanted)),
    ]


def _all(places: Places) -> list[Path]:
    """Return all environments, including unfinished ones."""
    return [path for path in places.environments.glob("*") if path.name.isdecimal()]


def _number(path: Path) -> int:
    return int(path.name)


def _left(places: Places) -> list[Path]:
    """Return the environments that services no longer start and no process uses."""
    current = places.venv.resolve()
    before = [path for path in _all(places) if path.resolve() != current]
    return sorted(path for path in before if not (places.here and _in_use(path)))


def _in_use(folder: Path) -> bool:
    """Return whether a process has mapped a file of the folder, as any Python that imported numpy has."""
    inside = os.fsencode(folder) + b"/"
    for maps in Path("/proc").glob("[0-9]*/maps"):
        with suppress(OSError):
            if inside in maps.read_bytes():
                return True
    return False


def _fill(places: Places, made: Path, python: Python, wheel: Wheel) -> None:
    pip: list[str | Path] = [
        made / "bin" / "python",
        "-m",
        "pip",
        "install",
        "--disable-pip-version-check",
        "--no-input",
    ]
    with tempfile.TemporaryDirectory(prefix="kvforge-") as folder:
        path = wheel.write(Path(folder))
        must([*pip, *python.pip, *_torch(python), f"{path}[{EXTRAS}]"], show=True)
    for site in made.glob("lib/python*/site-packages"):
        (site / PIN).write_text(PINNED)
    if not places.here:
        _rebase(places, made)


def _torch(python: Python) -> list[str]:
    """Return the release of torch to install: the installed one, else TORCH. Empty if the caller chooses it."""
    if python.system_packages or any(TORCH_REQUIREMENT.match(each) for each in python.pip):
        return []
    try:
        return [f"torch=={version('torch').partition('+')[0]}"]
    except PackageNotFoundError:
        return [TORCH]


def _rebase(places: Places, made: Path) -> None:
    """Replace the folder of an image in scripts by the folder at run time."""
    here, will_be = os.fsencode(made), os.fsencode(Path("/") / made.relative_to(places.root))
    for path in [*(made / "bin").iterdir(), made / "pyvenv.cfg"]:
        if path.is_symlink() or not path.is_file():
            continue
        content = path.read_bytes()
        if here in content and b"\0" not in content:
            path.write_bytes(content.replace(here, will_be))
    with suppress(OSError):
        for cache in made.rglob("__pycache__"):
            shutil.rmtree(cache, ignore_errors=True)


def _switch(places: Places, made: Path, record: Record, wanted: str) -> None:
    """Point the link to the new environment."""
    link = places.venv.with_name(f"{places.venv.name}.part")
    link.unlink(missing_ok=True)
    link.symlink_to(made.relative_to(places.venv.parent))
    if places.venv.is_dir() and not places.venv.is_symlink():  # a folder: created by an earlier kvforge
        places.venv.rename(places.environments / "0")
    link.replace(places.venv)
    record.note(VENV, wanted)


def _digest(wheel: Wheel, python: Python) -> str:
    """Return a digest of all that determines the content of the environment."""
    parts = [wheel.digest, str(python.path), str(python.system_packages), *python.pip, *_torch(python)]
    return hashlib.sha256("\0".join(parts).encode()).hexdigest()
