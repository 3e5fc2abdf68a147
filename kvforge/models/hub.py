"""Fetches models of the Hugging Face Hub by huggingface_hub: its cache, token (HF_TOKEN) and endpoint (HF_ENDPOINT).

    org/name            a folder of safetensors, or the only GGUF file of the repository
    org/name:FILE       one GGUF file, by its name or a unique part of that (Q4_K_M)
    org/name@REVISION   a branch, a tag or a commit; also org/name@REVISION:FILE

The list of files and config.json are read first, so that an unsupported model is refused before it is fetched.
"""

from __future__ import annotations

import importlib
import re
import shutil
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from kvforge.protocol.errors import InvalidRequest, ModelNotFound, Unavailable, UnsupportedModel

from .config_checks import check_config
from .files import ADAPTER_FILES, CONFIG, INDEX, WEIGHTS, read_config

OnProgress = Callable[[str, float], None]

NAME = re.compile(
    r"(?P<repo>[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*)(?:@(?P<revision>[A-Za-z0-9][\w./-]*))?(?::(?P<file>[^:@]+))?"
)
MAIN = "main"
BESIDE = (".json", ".model", ".jinja")  # files to fetch with safetensors, in addition to TEXTS
TEXTS = ("merges.txt", "vocab.txt")
PICKLED = (".bin", ".pt", ".pth", ".ckpt")
PART = re.compile(r"-\d{5}-of-\d{5}\.gguf$")
SPARE_BYTES = 64 << 20
LISTED_MAX = 8
SENTENCE_MAX = 300


@dataclass(frozen=True)
class HubName:
    """A name of the hub; `revision` and `file` are "" if the name has none."""

    repo: str
    revision: str = ""
    file: str = ""

    @property
    def text(self) -> str:
        """Return the name as a user writes it."""
        return self.repo + (f"@{self.revision}" if self.revision else "") + (f":{self.file}" if self.file else "")


@dataclass(frozen=True)
class RemoteFile:
    """A file of a repository. size: bytes, 0 if unknown."""

    name: str
    size: int


def parse(name: str) -> HubName | None:
    """Return the parts of a name of the hub, None for any other text."""
    match = NAME.fullmatch(name)
    if match is None or (match["file"] is None and name.endswith(".gguf")):
        return None
    return HubName(match["repo"], match["revision"] or "", match["file"] or "")


def find(wanted: HubName, cache_dir: Path | None = None) -> Path | None:
    """Return the place of a model of the hub in the cache, without using the network.

    Args:
        wanted: The name of the model.
        cache_dir: The folder of cached models; None: huggingface_hub's own cache.

    Returns:
        A folder or a GGUF file; None if it was not fetched.

    Raises:
        ModelNotFound: huggingface_hub is not installed.
    """
    cache = _cache(wanted, cache_dir)
    revision = wanted.revision or MAIN
    reference = cache / "refs" / revision
    commit = reference.read_text(encoding="ascii").strip() if reference.is_file() else revision
    folder = cache / "snapshots" / commit
    if not folder.is_dir():
        return None
    present = [RemoteFile(str(path.relative_to(folder)), 0) for path in folder.rglob("*") if path.is_file()]
    if not wanted.file and (folder / CONFIG).is_file():
        return folder
    names = [each.name for each in present if each.name.endswith(".gguf")]
    chosen = _matching(names, wanted) if wanted.file else names
    return folder / chosen[0] if len(chosen) == 1 else None


def fetch(wanted: HubName, progress: OnProgress, cache_dir: Path | None = None) -> Path:
    """Fetch the files of a model into huggingface_hub's cache.

    Args:
        wanted: The name of the model.
        progress: Called with the phase and the fraction of all bytes.
        cache_dir: The folder of cached models; None: huggingface_hub's own cache.

    Returns:
        The folder, or the GGUF file.

    Raises:
        ModelNotFound: The hub has no such repository, revision or file, or cannot be reached.
        UnsupportedModel: The model cannot be served; nothing but config.json was fetched.
        Unavailable: There is no room for it.
    """
    hub = _library(wanted)
    folder = None if cache_dir is None else cache_dir / "huggingface"
    progress("asking the hub", 0.0)
    try:
        commit, files = _listed(hub, wanted)
    except ModelNotFound as error:
        # A cached model is used if the hub is offline (HF_HUB_OFFLINE) or cannot be reached.
        answered = isinstance(error.__cause__, (hub.errors.RepositoryNotFoundError, hub.errors.RevisionNotFoundError))
        if answered or (here := find(wanted, cache_dir)) is None:
            raise
        return here
    chosen = choose(files, wanted)
    if CONFIG in [each.name for each in chosen]:
        path = Path(_fetched(hub, wanted, CONFIG, commit, folder))
        check_config(read_config(path.parent), wanted.text)
    total = sum(each.size for each in chosen)
    _check_room(total, folder or Path(hub.constants.HF_HUB_CACHE), wanted)
    done, path = 0, Path()
    for each in chosen:
        bar = _bar(progress, done, max(total, 1))
        path = Path(_fetched(hub, wanted, each.name, commit, folder, tqdm_class=bar))
        done += each.size
    progress("downloading", 1.0)
    # The reference is written once the snapshot is complete, so that `find` ignores an interrupted one.
    reference = _cache(wanted, cache_dir) / "refs" / (wanted.revision or MAIN)
    if reference.name != commit:
        reference.parent.mkdir(parents=True, exist_ok=True)
        fresh = reference.with_name(f"{reference.name}.fresh")
        fresh.write_text(commit, encoding="ascii")
        fresh.replace(reference)
    if chosen[0].name.endswith(".gguf"):
        return path
    return path.parents[chosen[-1].name.count("/")]


def choose(files: list[RemoteFile], wanted: HubName) -> list[RemoteFile]:
    """Return the files of a model, config.json first.

    Raises:
        UnsupportedModel: The repository holds an adapter, pickled weights or one part of a file.
        ModelNotFound: It holds no model, or several and the name selects none.
    """
    names = [each.name for each in files]
    gguf = [name for name in names if name.endswith(".gguf") and "mmproj" not in name.lower()]
    if wanted.file:
        return [each for each in files if each.name == _one_file(gguf, wanted)]
    if adapter := next((name for name in ADAPTER_FILES if name in names), None):
        problem = f"the repository holds an adapter ({adapter}): merge it into its model, and give that"
        raise UnsupportedModel(wanted.text, problem)
    weights = [each for each in files if each.name.endswith(".safetensors") and "/" not in each.name]
    if CONFIG in names and any(each.name == WEIGHTS or INDEX in names for each in weights):
        beside = [
            each
            for each in files
            if "/" not in each.name and each.name != CONFIG and (each.name.endswith(BESIDE) or each.name in TEXTS)
        ]
        kept = [each for each in weights if not each.name.startswith("consolidated")]
        return [*(each for each in files if each.name == CONFIG), *beside, *kept]
    if len(gguf) == 1:
        return [each for each in files if each.name == _one_file(gguf, wanted)]
    if gguf:
        problem = f"the repository holds {len(gguf)} GGUF files: name one, as {wanted.text}:FILE ({_listing(gguf)})"
        raise ModelNotFound(wanted.text, problem)
    if pickled := [name for name in names if name.endswith(PICKLED)]:
        problem = f"the repository holds only pickled weights ({pickled[0]}), which can run code and are not read"
        raise UnsupportedModel(wanted.text, problem)
    problem = f"the repository holds no model: neither {CONFIG} with {WEIGHTS} or {INDEX}, nor a GGUF file"
    raise ModelNotFound(wanted.text, problem)


def _one_file(names: list[str], wanted: HubName) -> str:
    found = _matching(names, wanted) if wanted.file else names
    if len(found) != 1:
        what = "no GGUF file" if not found else f"{len(found)} GGUF files"
        problem = f"the repository has {what} called {wanted.file!r}: it has {_listing(found or names) or 'none'}"
        raise ModelNotFound(wanted.text, problem)
    if PART.search(found[0]):
        join = "fetch all parts, join them (llama-gguf-split --merge), and give the path"
        raise UnsupportedModel(wanted.text, f"{found[0]} is one part of a split file: {join}")
    return found[0]


def _matching(names: list[str], wanted: HubName) -> list[str]:
    """Return the files with exactly this name, else those that contain it, ignoring case."""
    part = wanted.file.lower()
    return [name for name in names if name == wanted.file] or [name for name in names if part in name.lower()]


def _listing(names: list[str]) -> str:
    more = f" and {len(names) - LISTED_MAX} more" if len(names) > LISTED_MAX else ""
    return ", ".join(sorted(names)[:LISTED_MAX]) + more


def _listed(hub: Any, wanted: HubName) -> tuple[str, list[RemoteFile]]:
    """Return the commit of the revision, and its files."""
    try:
        info = hub.HfApi().model_info(wanted.repo, revision=wanted.revision or None, files_metadata=True)
    except Exception as error:
        raise ModelNotFound(wanted.text, _refusal(hub, error, wanted)) from error
    if not info.sha:
        raise ModelNotFound(wanted.text, "the hub names no commit for it")
    return info.sha, [RemoteFile(each.rfilename, each.size or 0) for each in info.siblings or ()]


def _fetched(hub: Any, wanted: HubName, name: str, commit: str, folder: Path | None, **more: Any) -> str:
    try:
        found: str = hub.hf_hub_download(wanted.repo, name, revision=commit, cache_dir=folder, **more)
        return found
    except OSError as error:
        if error.errno is not None:  # an error of the disk
            raise Unavailable(f"model {wanted.text} could not be stored: {error}") from error
        raise ModelNotFound(wanted.text, f"{name}: {_refusal(hub, error, wanted)}") from error
    except Exception as error:
        raise ModelNotFound(wanted.text, f"{name}: {_refusal(hub, error, wanted)}") from error


def _refusal(hub: Any, error: Exception, wanted: HubName) -> str:
    errors = hub.errors
    reason = " ".join(str(error).split())[:SENTENCE_MAX] or type(error).__name__
    if isinstance(error, errors.GatedRepoError):
        return f"it is gated: accept its terms on the hub, and set HF_TOKEN to a token that may read it ({reason})"
    if isinstance(error, errors.RevisionNotFoundError):
        return f"the hub has no revision {wanted.revision or MAIN!r} of {wanted.repo} ({reason})"
    if isinstance(error, errors.RepositoryNotFoundError):
        return f"the hub has no such model, or it is private: check the name, and HF_TOKEN for a private one ({reason})"
    return f"could not be fetched from the hub: {reason}. Check the network and HF_TOKEN, or give the path of a folder"


def _check_room(total: int, folder: Path, wanted: HubName) -> None:
    there = next((each for each in (folder, *folder.parents) if each.is_dir()), Path("/"))
    free = shutil.disk_usage(there).free
    if total + SPARE_BYTES > free:
        raise Unavailable(f"model {wanted.text} takes {total} bytes, and {folder} has room for {free}: set HF_HOME")


def _bar(progress: OnProgress, before: int, total: int) -> Any:
    """Return a class of hidden progress bars that report bytes as a fraction of all files."""
    base = importlib.import_module("tqdm").tqdm
    seen = before

    def update(_self: Any, count: float | None = 1) -> None:
        nonlocal seen
        seen += int(count or 0)
        progress("downloading", min(1.0, seen / total))

    def begin(self: Any, *given: Any, **named: Any) -> None:
        named.pop("name", None)  # an argument of huggingface_hub's own bars
        base.__init__(self, *given, **{**named, "disable": True})

    return type("Bar", (base,), {"__init__": begin, "update": update})


def _cache(wanted: HubName, cache_dir: Path | None) -> Path:
    root = Path(_library(wanted).constants.HF_HUB_CACHE) if cache_dir is None else cache_dir / "huggingface"
    return root / f"models--{wanted.repo.replace('/', '--')}"


def _library(wanted: HubName) -> Any:
    try:
        for part in ("constants", "errors"):
            importlib.import_module(f"huggingface_hub.{part}")
        return importlib.import_module("huggingface_hub")
    except ImportError as error:
        problem = f"there is no such path here, and names of the hub need the extra `text` ({error})"
        raise ModelNotFound(wanted.text, problem) from error


def check_name(name: str) -> None:
    """Check a name that looks like one of the hub.

    Raises:
        InvalidRequest: Its revision or file is empty or malformed.
    """
    if parse(name) is None and re.fullmatch(r"[\w.-]+/[\w.-]+[@:].*", name):
        problem = f"invalid hub name {name!r}: expected org/name, org/name@REVISION or org/name:FILE"
        raise InvalidRequest("model", problem)
