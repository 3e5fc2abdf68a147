"""Bytecode is kept in the cache folder where packages have none and can get none, and nowhere else."""

from __future__ import annotations

import os
import py_compile
import subprocess
import sys
from pathlib import Path

import pytest

PROGRAM = """
import sys
from pathlib import Path
from kvforge.worker.bytecode import keep_bytecode
kept = keep_bytecode(Path(sys.argv[1]))
import torch
print(kept, torch.__cached__)
"""


@pytest.fixture
def package(tmp_path: Path) -> Path:
    """Return a folder with packages that stand in for torch and transformers."""
    folder = tmp_path / "packages"
    for name in ("torch", "transformers"):
        (folder / name).mkdir(parents=True)
        (folder / name / "__init__.py").write_text("")
    return folder


def start(package: Path, cache: Path, **environment: str) -> tuple[str, str]:
    """Return what a process that imports it says: whether it keeps bytecode apart, and where."""
    root = Path(__file__).parents[2]
    clean = {name: value for name, value in os.environ.items() if not name.startswith("PYTHON")}
    path = {"PYTHONPATH": os.pathsep.join((str(package), str(root)))}
    command = [sys.executable, "-c", PROGRAM, str(cache)]
    done = subprocess.run(command, env=clean | path | environment, capture_output=True, text=True, check=True)
    kept, place = done.stdout.split()
    return kept, place


def test_where_python_may_not_write_bytecode_it_is_kept_in_the_cache(package: Path, tmp_path: Path) -> None:
    cache = tmp_path / "cache"
    kept, place = start(package, cache, PYTHONDONTWRITEBYTECODE="1")
    assert kept == "True"
    assert place.startswith(str(cache))
    assert Path(place).exists()
    assert not (package / "torch" / "__pycache__").exists()


def test_bytecode_beside_the_sources_is_used(package: Path, tmp_path: Path) -> None:
    for name in ("torch", "transformers"):
        py_compile.compile(str(package / name / "__init__.py"))
    kept, place = start(package, tmp_path / "cache", PYTHONDONTWRITEBYTECODE="1")
    assert kept == "False"
    assert place.startswith(str(package))
    assert not (tmp_path / "cache").exists()


def test_where_python_can_write_bytecode_it_does(package: Path, tmp_path: Path) -> None:
    kept, place = start(package, tmp_path / "cache")
    assert kept == "False"
    assert Path(place).exists()


def test_a_folder_that_the_user_chose_stays(package: Path, tmp_path: Path) -> None:
    chosen = tmp_path / "chosen"
    kept, place = start(package, tmp_path / "cache", PYTHONDONTWRITEBYTECODE="1", PYTHONPYCACHEPREFIX=str(chosen))
    assert kept == "False"
    assert place.startswith(str(chosen))
