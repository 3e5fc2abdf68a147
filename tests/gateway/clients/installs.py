"""Clients from npm and PyPI, installed once into the user's cache folder.

Each set of clients is a lock file beside this module, with exact versions of all transitive dependencies. The folder's
name contains the lock's hash, so that another version uses another folder.
"""

from __future__ import annotations

import fcntl
import hashlib
import os
import platform
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from kvforge.models.store import default_cache_dir

HERE = Path(__file__).parent
INSTALL_S = 300.0
READY = ".ready"
# With this variable, a failed installation of a client fails its tests; otherwise they are skipped.
CHOICE, REQUIRED = "KVFORGE_CLIENTS", "required"
# The newest Python that a set of clients supports, if not the newest release.
NEWEST = {"aider": (3, 12)}
ARCHITECTURES = {"x86_64": "x64", "aarch64": "arm64"}
# Returns the interpreter of a set of clients by the set's name.
Python = Callable[[str], Path]


class Missing(Exception):
    """These clients cannot be installed here; the message has the reason."""


def node_modules() -> Path:
    """The folder of the packages in package-lock.json.

    Raises:
        Missing: There is no npm, no network, or no Linux on a known processor.
    """
    if (problem := unlocked()) is not None:
        raise Missing(problem)
    npm = shutil.which("npm")
    if npm is None:
        raise Missing("npm is not on the PATH")
    package, lock = HERE / "package.json", HERE / "package-lock.json"

    def install(folder: Path) -> None:
        for file in (package, lock):
            shutil.copy(file, folder)
        cache = folder / ".npm"
        quiet = ["--ignore-scripts", "--no-audit", "--no-fund", "--no-progress", "--loglevel=error"]
        # Not `npm ci`: it wants builds for every other platform in the lock, and not each registry has them all.
        _run([npm, "install", *quiet, "--cache", str(cache)], folder)
        shutil.rmtree(cache, ignore_errors=True)

    return _installed(f"npm-{_key(package, lock)}", install) / "node_modules"


def unlocked() -> str | None:
    """Return why the npm packages do not run on this machine, or None."""
    if sys.platform == "linux" and platform.machine() in ARCHITECTURES:
        return None
    return f"no builds of these clients are locked for {sys.platform} on {platform.machine()}"


def platform_package(modules: Path, name: str) -> Path:
    """Return the folder of a package named after the processor, which contains the programs."""
    return modules / f"{name}-{ARCHITECTURES[platform.machine()]}"


def node(modules: Path) -> Path:
    """Return Node.js in the clients' version, which is installed with them."""
    return platform_package(modules, "node-linux") / "bin" / "node"


def python_with(name: str) -> Path:
    """Return the interpreter of a separate environment with the packages of requirements/NAME.txt.

    Args:
        name: The lock file's. If its packages need an older Python (`NEWEST`), the PATH is searched for one.

    Raises:
        Missing: There is no network, or no such Python.
    """
    lock = HERE / "requirements" / f"{name}.txt"
    base = _python(NEWEST.get(name, sys.version_info[:2]))

    def install(folder: Path) -> None:
        environment = folder / "venv"
        _run([base, "-m", "venv", "--without-pip", str(environment)], folder)
        options = ["--quiet", "--no-deps", "--only-binary", ":all:", "-r", str(lock)]
        python = str(environment / "bin" / "python")
        if (uv := _uv()) is not None:
            cache = folder / ".uv"
            try:
                _run([uv, "pip", "install", "--python", python, "--cache-dir", str(cache), *options], folder)
                return
            except Missing:  # the index may be in pip's configuration alone
                pass
            finally:
                shutil.rmtree(cache, ignore_errors=True)
        pip = [sys.executable, "-m", "pip", "--python", python, "--disable-pip-version-check"]
        _run([*pip, "install", "--no-cache-dir", *options], folder)

    version = subprocess.run([base, "--version"], capture_output=True, text=True, check=True).stdout
    return _installed(f"{name}-{_key(lock, text=version)}", install) / "venv" / "bin" / "python"


def _uv() -> str | None:
    """Return the program uv, which installs in a tenth of pip's processor time; bytecode is made at the first use."""
    try:
        from uv import find_uv_bin

        return find_uv_bin()
    except (ImportError, FileNotFoundError):
        return None


def _python(newest: tuple[int, int]) -> str:
    if sys.version_info[:2] <= newest:
        return sys.executable
    for minor in range(newest[1], 10, -1):
        found = shutil.which(f"python{newest[0]}.{minor}")
        # pyenv puts a shim for each installed Python on the PATH.
        if found and subprocess.run([found, "-c", ""], capture_output=True).returncode == 0:
            return found
    raise Missing(f"no Python up to {newest[0]}.{newest[1]} is on the PATH")


def _key(*files: Path, text: str = "") -> str:
    digest = hashlib.sha256(text.encode())
    for file in files:
        digest.update(file.read_bytes())
    return digest.hexdigest()[:12]


def _installed(name: str, install: Callable[[Path], None]) -> Path:
    """Return the complete folder. One process installs, others wait for it."""
    folder = default_cache_dir() / "clients" / name
    folder.mkdir(parents=True, exist_ok=True)
    with _locked(folder):
        if not (folder / READY).exists():
            for left in folder.iterdir():
                shutil.rmtree(left) if left.is_dir() else left.unlink()
            install(folder)
            (folder / READY).touch()
    return folder


@contextmanager
def _locked(folder: Path) -> Iterator[None]:
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX)  # the kernel releases it if the holder crashes
        yield
    finally:
        os.close(descriptor)


def _run(command: Sequence[str], folder: Path) -> None:
    try:
        done = subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=INSTALL_S)
    except subprocess.TimeoutExpired:
        raise Missing(f"{Path(command[0]).name} did not end in {INSTALL_S:.0f} s") from None
    if done.returncode:
        printed = [
            line for line in (done.stderr or done.stdout).splitlines() if line.strip() and "complete log" not in line
        ]
        raise Missing(
            f"{Path(command[0]).name} could not install the clients: {printed[-1] if printed else 'no reason given'}"
        )
