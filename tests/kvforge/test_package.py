"""The names of the package `kvforge`, and what importing it loads."""

from __future__ import annotations

import ast
import subprocess
import sys
from importlib import import_module
from pathlib import Path

import pytest

import kvforge
from kvforge.protocol import errors


def test_every_error_can_be_caught_by_its_name() -> None:
    for cls in errors.BY_CODE.values():
        assert getattr(kvforge, cls.__name__, None) is cls, cls
        assert cls.__name__ in kvforge.__all__


def test_the_names_of_the_package_are_found_where_they_are() -> None:
    assert set(kvforge.__all__) <= set(dir(kvforge))
    for name in kvforge.__all__:
        assert getattr(kvforge, name).__name__ == name
    with pytest.raises(AttributeError, match="nothing_of_the_kind"):
        kvforge.nothing_of_the_kind  # noqa: B018


def test_a_type_checker_sees_every_name_where_it_is_loaded_from() -> None:
    """Names are loaded lazily: a type checker reads the block that never runs."""
    tree = ast.parse(Path(kvforge.__file__).read_text())
    (block,) = (one for one in tree.body if isinstance(one, ast.If))
    assert isinstance(block.test, ast.Name) and block.test.id == "TYPE_CHECKING"
    homes = {
        alias.asname or alias.name: f"{'.' * one.level}{one.module}"
        for one in block.body
        if isinstance(one, ast.ImportFrom)
        for alias in one.names
    }
    assert set(homes) == set(kvforge.__all__) and len(kvforge.__all__) == len(set(kvforge.__all__))
    for name, home in homes.items():
        typed = getattr(import_module(home, kvforge.__name__), name)
        assert typed is getattr(kvforge, name), f"{name} is another than the type checker sees"


def test_importing_the_client_loads_neither_torch_nor_transformers() -> None:
    script = """
import sys
sys.modules["torch"] = sys.modules["transformers"] = None
import kvforge, kvforge.commands.cli
with kvforge.Client("ipc:///nowhere") as kv:
    assert kv.endpoint
print("imported")
"""
    ran = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=60)
    assert (ran.returncode, ran.stdout, ran.stderr) == (0, "imported\n", "")
