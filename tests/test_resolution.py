"""The extras resolve for every supported Python, with the package index's build of torch.

uv resolves from metadata alone, in seconds, and needs no interpreter of the version. pip, which the Makefile uses where
uv cannot, reads every distribution, which takes minutes: soak tests, of one Python on each day.

pip resolves without installing (`--dry-run --report`) for an interpreter of each version. Missing Python versions, and
machines without a package index, are skipped by name.
"""

from __future__ import annotations

import functools
import json
import os
import re
import shutil
import subprocess
import sys
import tomllib
from pathlib import Path
from typing import Any

import pytest

from tests import fresh

REPOSITORY = Path(__file__).parents[1]
MAKEFILE = (REPOSITORY / "Makefile").read_text(encoding="utf-8")
PROJECT = tomllib.loads((REPOSITORY / "pyproject.toml").read_text(encoding="utf-8"))["project"]
TORCH = re.search(r"^TORCH\s+\?= (torch==\S+)$", MAKEFILE, re.MULTILINE)[1]  # type: ignore[index]
PYTHONS = ("3.11", "3.12", "3.13")
BY_UV = (*(pytest.param(version, marks=pytest.mark.soak) for version in ("3.11", "3.12")), "3.13")
UNREACHABLE = ("NewConnectionError", "Temporary failure in name resolution", "No matching distribution found for torch")
UNREACHABLE_BY_UV = re.compile(r"error sending request|dns error|Failed to fetch")
PIP = [sys.executable, "-m", "pip", "--disable-pip-version-check"]


Solutions = dict[tuple[str, str], dict[str, str]]


@pytest.fixture(scope="module")
def solutions(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Solutions:
    """Return name -> version of what uv would install into an empty environment, by Python and extras.

    All that this run asks for are computed at once, because they mostly wait for the package index.
    """
    uv = pytest.importorskip("uv", reason="resolves; it is in the extra dev").find_uv_bin()
    torch = tmp_path_factory.mktemp("torch") / "torch.txt"
    torch.write_text(TORCH)
    command = [uv, "pip", "compile", "--quiet", "--no-config", "--no-header", "--no-annotate"]
    command += ["--python", sys.executable, "--no-python-downloads", "--python-platform", "linux"]
    command += ["--default-index", _index(), str(REPOSITORY / "pyproject.toml"), str(torch)]
    running: dict[tuple[str, str], subprocess.Popen[str]] = {}
    for version in _versions(request.session.items):
        for extras in ("worker", _makes("ALL_EXTRAS")):
            wanted = [part for extra in extras.split(",") for part in ("--extra", extra)]
            running[version, extras] = subprocess.Popen(
                [*command, "--python-version", version, *wanted],
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                text=True,
            )
    found: Solutions = {}
    try:
        for key, process in running.items():
            printed, problem = process.communicate(timeout=900)
            if process.returncode and UNREACHABLE_BY_UV.search(problem):
                pytest.skip("no package index can be reached")
            assert process.returncode == 0, problem
            found[key] = dict(re.findall(r"^([\w.-]+)==([\w.!+-]+)", printed, re.MULTILINE))
    finally:  # without an index the first one skips the tests, and the others would fail a later test when collected
        for process in running.values():
            process.kill()
            process.communicate()
    return found


@pytest.mark.parametrize("version", BY_UV)
def test_a_worker_has_a_solution(version: str, solutions: Solutions) -> None:
    found = solutions[version, "worker"]
    assert {"torch", "transformers", "safetensors", "pyzmq"} <= set(found)
    assert not {"ray", "mkdocs-material", "starlette", "pytest"} & set(found)
    assert found["torch"] == TORCH.removeprefix("torch==")


@pytest.mark.parametrize("version", BY_UV)
def test_all_extras_have_a_solution(version: str, solutions: Solutions) -> None:
    found = solutions[version, _makes("ALL_EXTRAS")]
    assert {"torch", "ray", "starlette", "pytest", "mypy", "openai"} <= set(found)
    assert found["torch"] == TORCH.removeprefix("torch==")


def _versions(items: list[pytest.Item]) -> set[str]:
    """Return the Pythons of this file's tests in a run."""
    own = [getattr(item, "callspec", None) for item in items if item.path == Path(__file__)]
    return {case.params["version"] for case in own if case is not None}


@functools.cache
def _index() -> str:
    """Return the address of pip's package index."""
    command = [*PIP, "config", "get", "global.index-url"]
    configured = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False).stdout.strip()
    return os.environ.get("PIP_INDEX_URL") or configured or "https://pypi.org/simple"


def interpreter(version: str) -> Path:
    """Return an interpreter of that version: this one, on PATH, or of pyenv or uv. Skips the test if there is none."""
    roots = (Path(os.environ.get("PYENV_ROOT", "~/.pyenv")).expanduser() / "versions", _uv_folder())
    found = [Path(sys.executable), Path(shutil.which(f"python{version}") or "/nonexistent")]
    found += [path for root in roots for path in sorted(root.glob(f"*{version}.*/bin/python{version}"))]
    for path in found:
        code = "import sys; print('%d.%d' % sys.version_info[:2])"
        if path.exists():
            ran = subprocess.run([path, "-c", code], capture_output=True, text=True, timeout=60, check=False)
            if ran.stdout.strip() == version:
                return path
    pytest.skip(f"no Python {version} on this machine")


@functools.cache
def _uv_folder() -> Path:
    if shutil.which("uv") is None:
        return Path("/nonexistent")
    ran = subprocess.run(["uv", "python", "dir"], capture_output=True, text=True, timeout=60, check=False)
    return Path(ran.stdout.strip() or "/nonexistent")


def resolve(version: str, extras: str, folder: Path) -> dict[str, dict[str, Any]]:
    """Return name -> metadata of each distribution that pip would install into an empty environment."""
    report = folder / "report.json"
    command = [*PIP, "--python", str(interpreter(version)), "install", "--quiet", "--dry-run", "--ignore-installed"]
    command += ["--report", str(report), TORCH, f"{REPOSITORY}[{extras}]"]
    ran = subprocess.run(command, capture_output=True, text=True, timeout=900, check=False)
    if ran.returncode and any(each in ran.stderr for each in UNREACHABLE):
        pytest.skip("no package index can be reached")
    assert ran.returncode == 0, ran.stderr
    packages = [each["metadata"] for each in json.loads(report.read_text())["install"]]
    return {each["name"].lower(): each for each in packages}


def _torch_is_pinned(found: dict[str, dict[str, Any]]) -> None:
    assert found["torch"]["version"].partition("+")[0] == TORCH.removeprefix("torch==")
    wanted = [each for each in found["torch"].get("requires_dist", ()) if re.match(r"triton\b", each)]
    if wanted:  # a build for GPUs
        assert found["triton"]["version"] in wanted[0]


@pytest.mark.parametrize("version", fresh.of_the_day(PYTHONS, len(PYTHONS)))
def test_a_worker_resolves(version: str, tmp_path: Path) -> None:
    found = resolve(version, "worker", tmp_path)
    assert {"kvforge", "torch", "transformers", "safetensors", "pyzmq"} <= set(found)
    assert not {"ray", "mkdocs-material", "starlette", "pytest"} & set(found)
    _torch_is_pinned(found)


@pytest.mark.parametrize("version", fresh.of_the_day(PYTHONS, len(PYTHONS)))
def test_all_extras_resolve(version: str, tmp_path: Path) -> None:
    found = resolve(version, _makes("ALL_EXTRAS"), tmp_path)
    assert {"kvforge", "torch", "ray", "starlette", "pytest", "mypy", "openai"} <= set(found)
    _torch_is_pinned(found)


def test_each_target_installs_extras_that_exist() -> None:
    extras = set(PROJECT["optional-dependencies"])
    assert _makes("DEMO_EXTRAS") == "worker"
    assert [_makes("DEMO_MODEL")] == PROJECT["optional-dependencies"]["demo"]
    assert set(_makes("ALL_EXTRAS").split(",")) == extras - {"text", "demo"}  # `text` is a part of `gateway`
    assert set(_makes("DOCS_EXTRAS").split(",")) <= extras


def test_supported_pythons_are_declared() -> None:
    declared = [each.rpartition(" ")[2] for each in PROJECT["classifiers"] if re.search(r":: 3\.\d+$", each)]
    assert tuple(declared) == PYTHONS
    assert PROJECT["requires-python"] == f">={PYTHONS[0]}"
    assert f'tested = "%d.%d" % sys.version_info[:2], "Python {PYTHONS[0]} to {PYTHONS[-1]}"' in MAKEFILE
    for document in ("README.md", "docs/install.md", "docs/quickstart.md"):
        assert f"Python {PYTHONS[0]} to {PYTHONS[-1]}" in (REPOSITORY / document).read_text(encoding="utf-8"), document


def test_no_extra_pins_what_torch_decides() -> None:
    """torch needs one release of Triton; an extra with another release cannot be installed beside it."""
    for extra, requirements in PROJECT["optional-dependencies"].items():
        assert not [each for each in requirements if re.match(r"triton\b|nvidia", each)], extra


def test_every_install_line_pins_torch() -> None:
    recipes = [line for line in MAKEFILE.splitlines() if line.startswith("\t") and "DOCS_EXTRAS" not in line]
    lines = [line for line in recipes if "$(PIP) install" in line or "$(INSTALL) " in line]
    assert len(lines) == 7
    others = ("$(TRITON)", "--no-deps", "install --quiet uv")
    assert [line for line in lines if '"$(TORCH)"' not in line and not any(each in line for each in others)] == []
    dockerfile = (REPOSITORY / "deploy" / "docker" / "Dockerfile").read_text(encoding="utf-8")
    assert f'ARG TORCH="{TORCH}"' in dockerfile
    assert re.search(r"ARG TORCH_INDEX=", dockerfile) and re.search(r"^TORCH_INDEX \?=", MAKEFILE, re.MULTILINE)


def test_a_cpu_build_is_tested_with_the_triton_of_the_kept_code() -> None:
    compiled = (REPOSITORY / "tools" / "aot" / "results.py").read_text(encoding="utf-8")
    (version,) = re.findall(r'^VERSION = "([^"]+)"', compiled, re.MULTILINE)
    assert re.findall(r"^TRITON \?= triton==([^;]+);", MAKEFILE, re.MULTILINE) == [version]


def _makes(variable: str) -> str:
    return re.search(rf"^{variable}\s+:= (\S+)$", MAKEFILE, re.MULTILINE)[1]  # type: ignore[index]
