"""kvforge installed from a wheel, used from a folder with modules that have the names of our packages."""

from __future__ import annotations

import ast
import os
import subprocess
import sys
import tomllib
import zipfile
from email.parser import Parser
from pathlib import Path

import pytest

from tools.cluster.running import Process, tiny_model

pytest.importorskip("hatchling", reason="builds the wheel; it is in the extra dev")
REPOSITORY = Path(__file__).parents[2]
OURS = ("protocol", "coordinator", "worker", "loadtest", "gateway")


@pytest.fixture(scope="module")
def installed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Unzip the wheel into a folder, which installs it."""
    folder = tmp_path_factory.mktemp("installed")
    command = [sys.executable, "-m", "hatchling", "build", "-t", "wheel", "-d", str(folder / "dist")]
    subprocess.run(command, cwd=REPOSITORY, check=True, capture_output=True, timeout=120)
    (wheel,) = (folder / "dist").glob("*.whl")
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(folder / "site")
    return folder / "site"


@pytest.fixture
def users(tmp_path: Path) -> Path:
    """Return a user's folder with modules of these names; our code fails if it imports one by mistake."""
    for name in OURS:
        (tmp_path / f"{name}.py").write_text(
            f"if __name__ != {name!r}: raise SystemExit('the wrong {name}')\nWHOSE = 'the user'\n"
        )
    return tmp_path


def environment(installed: Path, *before: Path) -> dict[str, str]:
    """Return an environment with the wheel instead of the checkout, behind the user's PYTHONPATH `before`."""
    paths = [str(path) for path in (*before, installed)]
    return {**os.environ, "PYTHONPATH": os.pathsep.join(paths), "PYTHONDONTWRITEBYTECODE": "1"}


SCRIPT = """
import sys
from kvforge import Client, SamplingParams, KvforgeError
import kvforge, kvforge.commands.cli, kvforge.launch.supervisor, kvforge.text.tokenizer
assert kvforge.__file__.startswith(sys.argv[1]), kvforge.__file__
assert sys.modules[Client.__module__].__file__.startswith(sys.argv[1])
others = ("protocol", "coordinator", "worker", "loadtest", "gateway")
ours = [name for name in sys.modules if name.partition(".")[0] in others]
assert not ours, ours
import protocol, coordinator, worker, loadtest
assert {module.WHOSE for module in (protocol, coordinator, worker, loadtest)} == {"the user"}
with Client("ipc:///nobody") as kv:
    assert kv.endpoint
print("served")
"""


IMPORT_KERNELS = """
import importlib, pkgutil, sys
from kvforge.worker import attention, cpu, kernels
for package in (attention, cpu, kernels):
    for module in pkgutil.iter_modules(package.__path__, package.__name__ + "."):
        print(importlib.import_module(module.name).__file__)
assert not {"protocol", "coordinator", "worker", "loadtest", "gateway"} & set(sys.modules)
"""


@pytest.mark.parametrize("first", ["beside the script", "in PYTHONPATH"])
def test_a_client_and_the_users_modules_do_not_meet(installed: Path, users: Path, first: str) -> None:
    script = (users if first == "beside the script" else users / "elsewhere") / "script.py"
    script.parent.mkdir(exist_ok=True)
    script.write_text(SCRIPT)
    before = () if first == "beside the script" else (users,)
    ran = subprocess.run(
        [sys.executable, str(script), str(installed)],
        env=environment(installed, *before),
        cwd=users,
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert (ran.returncode, ran.stdout, ran.stderr) == (0, "served\n", "")


def test_up_starts_our_processes_wherever_it_is_called(
    installed: Path, users: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(users)
    model, runtime = tiny_model(users), users / "r"
    options = ("--model", str(model), "--load-format", "dummy", "--device", "cpu", "--blocks", "64", "--threads", "1")
    options += ("--kernels", "reference")  # those of the CPU would be compiled anew for this folder, for ten seconds
    with Process("--runtime-dir", str(runtime), "up", *options, **environment(installed, users)) as running:
        running.expect("ready: 1 worker")
    assert "the wrong" not in running.text


def test_the_kernels_import_our_modules(installed: Path, users: Path) -> None:
    ran = subprocess.run(
        [sys.executable, "-c", IMPORT_KERNELS],
        env=environment(installed, users),
        cwd=users,
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert (ran.returncode, ran.stderr) == (0, "")
    assert {Path(line).is_relative_to(installed) for line in ran.stdout.splitlines()} == {True}


def test_the_wheel_is_typed_and_holds_nothing_twice(installed: Path) -> None:
    assert (installed / "kvforge" / "py.typed").is_file()
    assert (installed / "kvforge" / "protocol" / "messages" / "shared.py").is_file()
    top = {path.name for path in installed.iterdir() if not path.name.endswith(".dist-info")}
    assert top == {"kvforge"}


def test_the_service_is_installed_from_the_wheel(installed: Path, users: Path) -> None:
    """The package contains the units; the service gets exactly the installed files."""
    script = (
        "import pathlib, sys; from kvforge.deploy.wheel import Wheel; print(Wheel().write(pathlib.Path(sys.argv[1])))"
    )
    settings = {"env": environment(installed, users), "cwd": users, "capture_output": True, "text": True, "timeout": 60}
    packed = subprocess.run([sys.executable, "-c", script, str(users)], check=True, **settings)
    (built,) = (installed.parent / "dist").glob("*.whl")
    with zipfile.ZipFile(packed.stdout.strip()) as ours, zipfile.ZipFile(built) as hatchs:
        names = {name for name in hatchs.namelist() if not name.endswith(("RECORD", "licenses/LICENSE"))}
        assert {name for name in ours.namelist() if not name.endswith("RECORD")} == names
        assert all(ours.read(name) == hatchs.read(name) for name in names)
    command = [sys.executable, "-m", "kvforge", "deploy", "install", "--dry-run", "--no-venv", "--worker", "gpu0"]
    done = subprocess.run([*command, "--root", str(users / "system")], check=False, **settings)
    assert (done.returncode, done.stdout) == (0, "")
    assert f"would write {users}/system/etc/systemd/system/kvforge-worker@.service\n" in done.stderr
    assert not (users / "system").exists()


def test_a_wheel_of_the_sdist_holds_the_same(installed: Path, tmp_path: Path) -> None:
    build = [sys.executable, "-m", "hatchling", "build"]
    subprocess.run([*build, "-t", "sdist", "-d", str(tmp_path)], cwd=REPOSITORY, check=True, timeout=120)
    (sdist,) = tmp_path.glob("*.tar.gz")
    subprocess.run(["tar", "-xzf", sdist, "-C", tmp_path], check=True, timeout=120)
    (source,) = tmp_path.glob("kvforge-*/")
    carried = {str(path.relative_to(source)) for path in source.rglob("*") if path.is_file()}
    documents = {f"docs/{path.name}" for path in (REPOSITORY / "docs").glob("*.md")}
    assert (
        documents | {"Makefile", "mkdocs.yml", ".ci/run", "README.md", "CHANGELOG.md", "LICENSE", "examples/chat.py"}
        <= carried
    )
    subprocess.run([*build, "-t", "wheel", "-d", str(tmp_path)], cwd=source, check=True, timeout=120)
    names = []
    for wheel in (*tmp_path.glob("*.whl"), *(installed.parent / "dist").glob("*.whl")):
        with zipfile.ZipFile(wheel) as archive_of_it:
            names.append(set(archive_of_it.namelist()))
    assert names[0] == names[1]


def test_the_protocol_imports_only_itself() -> None:
    """By relative imports, so that it works in any parent package."""
    for path in sorted((REPOSITORY / "protocol").rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            names = [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
            if isinstance(node, ast.ImportFrom) and not node.level:
                names = [node.module or ""]
            assert not [name for name in names if name.partition(".")[0] in ("kvforge", *OURS)], (path.name, names)


def test_the_metadata_is_complete(installed: Path) -> None:
    (info,) = installed.glob("kvforge-*.dist-info")
    metadata = Parser().parsestr((info / "METADATA").read_text(encoding="utf-8"))
    for field in ("Author", "Keywords", "Summary", "License-Expression", "Requires-Python", "Description"):
        assert metadata[field] or (field == "Description" and metadata.get_payload()), field
    links = {each.partition(",")[0] for each in metadata.get_all("Project-URL", [])}
    assert links >= {"Homepage", "Issues", "Changelog"}
    classifiers = metadata.get_all("Classifier", [])
    assert [each for each in classifiers if each.endswith(":: 3.13")] and "Typing :: Typed" in classifiers


def test_the_version_is_written_once(installed: Path) -> None:
    """`kvforge.__version__` is the source of the package's metadata."""
    from kvforge import __version__

    (info,) = installed.glob("kvforge-*.dist-info")
    assert info.name == f"kvforge-{__version__}.dist-info"
    project = tomllib.loads((REPOSITORY / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    assert "version" not in project and project["dynamic"] == ["version"]
