"""The tests' side of a cluster receives every answer, whatever Ray prints beside it."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

from . import raylets
from .raylets import RayCluster

SAID = (
    b'A worker died\n@{"answer": 1}\n@{"ans',
    b'wer": 2}\nand another\n@{"answer": 3}\n',
)


def test_an_answer_that_comes_with_what_ray_says_is_heard(tmp_path: Path) -> None:
    """In one read, as when a queried actor was killed."""
    (tmp_path / "said").write_bytes(SAID[0])
    (tmp_path / "rest").write_bytes(SAID[1])
    script = f"cat {tmp_path}/said; sleep 0.2; cat {tmp_path}/rest; exec sleep 60"
    cluster = RayCluster.__new__(RayCluster)
    with subprocess.Popen(["sh", "-c", script], stdin=subprocess.PIPE, stdout=subprocess.PIPE, bufsize=0) as process:
        cluster._process, cluster._read, cluster._folder = process, b"", tmp_path
        try:
            assert [cluster.ask("what"), cluster.ask("what"), cluster.ask("what")] == [1, 2, 3]
        finally:
            process.kill()


def test_a_cluster_that_does_not_start_leaves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    started = tmp_path / "started"
    python = tmp_path / "python"
    python.write_text(f"#!/bin/sh\ntouch {started}\nread -r line\n")  # answers nothing; ends with its input
    python.chmod(0o755)
    monkeypatch.setattr(raylets.sys, "executable", str(python))
    monkeypatch.setattr(raylets, "ANSWER_S", 1.0)
    cluster = RayCluster(tmp_path)
    with pytest.raises(AssertionError, match="no answer within"):
        cluster.__enter__()
    assert cluster._process.stdin is not None and cluster._process.stdin.closed
    assert cluster._process.returncode is not None and not cluster.ray.exists()
