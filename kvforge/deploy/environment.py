"""The virtual environment that the units start, with the kvforge that runs now and what it needs."""

from __future__ import annotations

import hashlib
import os
import shutil
import sys
import tempfile
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from kvforge.protocol.errors import InvalidConfiguration

from .places import Places
from .program import must
from .step import Record, Step
from .wheel import Wheel

EXTRAS = "worker,text"
VENV = "environment"  # its name in the record
HIDDEN = ("/root", "/home", "/run/user")  # from services, by ProtectHome=


@dataclass(frozen=True)
class Python:
    """path: the interpreter that the environment is made of. pip: arguments of `pip install`, as `--index-url=...`.
    system_packages: whether what is installed beside the interpreter is used (a ROCm build of torch).
    """

    path: Path
    pip: Sequence[str] = ()
    system_packages: bool = False

    def check(self) -> None:
        """Raises InvalidConfiguration where services could not start it."""
        real = self.path.resolve()
        if not os.access(real, os.X_OK):
            raise InvalidConfiguration("--python", f"{self.path} cannot be started")
        if any(real.is_relative_to(folder) for folder in HIDDEN):
            problem = f"{real} is in a home folder, where services see nothing"
            raise InvalidConfiguration("--python", f"{problem}: name another one, such as /usr/bin/python3")


def own_python() -> Path:
    """The interpreter that this one's environment was made of, if it is in one."""
    return Path(sys.base_prefix) / "bin" / f"python{sys.version_info.major}.{sys.version_info.minor}"


def environment(places: Places, python: Python, record: Record) -> list[Step]:
    """Steps that bring the environment to the kvforge that runs."""
    wheel = Wheel()
    wanted = _digest(wheel, python)
    there = (places.venv / "bin" / "pip").exists()  # which is the last that is made
    if there and record.get(VENV) == wanted:
        return []
    steps = []
    if not there:
        make: list[str | Path] = [python.path, "-m", "venv", *(["--system-site-packages"] * python.system_packages)]
        steps = [Step(f"make the environment {places.venv} of {python.path}", partial(must, [*make, places.venv]))]
    fill = partial(_fill, places, python, wheel, record, wanted)
    return [*steps, Step(f"install kvforge {wheel.version} and what it needs in {places.venv}", fill)]


def _fill(places: Places, python: Python, wheel: Wheel, record: Record, wanted: str) -> None:
    pip: list[str | Path] = [
        places.venv / "bin" / "python",
        "-m",
        "pip",
        "install",
        "--disable-pip-version-check",
        "--no-input",
    ]
    with tempfile.TemporaryDirectory(prefix="kvforge-") as folder:
        path = wheel.write(Path(folder))
        must([*pip, *python.pip, f"{path}[{EXTRAS}]"], show=True)
        # The one of the same version that was there before is not this one.
        must([*pip, *python.pip, "--quiet", "--force-reinstall", "--no-deps", path], show=True)
    if not places.here:
        _rebase(places)
    record.note(VENV, wanted)


def _rebase(places: Places) -> None:
    """Programs in the environment name its interpreter where it will be, and not where it was made."""
    made, will_be = os.fsencode(places.venv), os.fsencode(Path("/") / places.venv.relative_to(places.root))
    for path in [*(places.venv / "bin").iterdir(), places.venv / "pyvenv.cfg"]:
        if path.is_symlink() or not path.is_file():
            continue
        content = path.read_bytes()
        if made in content and b"\0" not in content:
            path.write_bytes(content.replace(made, will_be))
    with suppress(OSError):
        for cache in places.venv.rglob("__pycache__"):
            shutil.rmtree(cache, ignore_errors=True)


def _digest(wheel: Wheel, python: Python) -> str:
    """Of all that decides what is in the environment."""
    parts = [wheel.digest, str(python.path), str(python.system_packages), *python.pip]
    return hashlib.sha256("\0".join(parts).encode()).hexdigest()
