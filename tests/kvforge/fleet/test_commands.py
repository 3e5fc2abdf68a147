"""`kvforge fleet` without Ray, a cluster, or the file: one sentence, and its exit status."""

from __future__ import annotations

import importlib.util
import socket
from pathlib import Path

import pytest

from kvforge.process.installation import install_command
from tools.cluster.running import Process

FILE = '[up]\nmodel = "m"\n'
on_ray = pytest.mark.skipif(importlib.util.find_spec("ray") is None, reason="needs Ray, the extra `ray`")


def said(status: int, *arguments: str, **environment: str) -> str:
    with Process("fleet", *arguments, **environment) as process:
        assert process.end() == status, process.text
        assert "Traceback" not in process.text
        return process.text


def test_without_ray_it_says_what_to_install(tmp_path: Path) -> None:
    (tmp_path / "ray").mkdir()
    (tmp_path / "ray" / "__init__.py").write_text("raise ImportError('it is not here')")
    (tmp_path / "fleet.toml").write_text(FILE)
    words = f"kvforge: a fleet needs Ray (it is not here): {install_command('ray')}"
    path = f"{tmp_path}:{Path(__file__).parents[3]}"
    assert said(3, "up", str(tmp_path / "fleet.toml"), PYTHONPATH=path).strip() == words


@on_ray
def test_without_a_cluster_it_says_where_it_looked(tmp_path: Path) -> None:
    with socket.socket() as nobody:
        nobody.bind(("127.0.0.1", 0))
        address = f"127.0.0.1:{nobody.getsockname()[1]}"
        words = f"kvforge: no Ray cluster can be reached at {address} (Connection refused): see `ray status`"
        assert said(3, "status", "--address", address).strip() == words
    assert "invalid address ray://x: expected HOST:PORT of the cluster's head" in said(3, "down", RAY_ADDRESS="ray://x")


def test_a_file_that_is_wrong_is_refused_before_anything_is_asked(tmp_path: Path) -> None:
    assert "none.toml: cannot be read" in said(2, "up", str(tmp_path / "none.toml"))
    (tmp_path / "fleet.toml").write_text(f"[replicas]\nnumber = 1\n{FILE}")
    assert "kvforge: replicas.number: there is no such setting" in said(2, "up", str(tmp_path / "fleet.toml"))
