"""The names of the package `kvforge`, and what importing it loads."""

from __future__ import annotations

import subprocess
import sys

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
