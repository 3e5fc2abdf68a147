"""The benchmark of a start: it names where the time to the first token goes."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from benchmarks import startup


def test_each_start_is_split_into_phases(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    found, log = tmp_path / "startup.json", tmp_path / "startup.log"
    options = ["--tiny", "--warm", "1", "--folder", str(tmp_path), "--json", str(found), "--log", str(log)]
    options += ["--", "--kernels", "reference"]  # the first start would compile all kernels
    assert startup.main(options) == 0
    results = json.loads(found.read_text())["results"]
    assert results["bytes"] > 100_000
    assert list(results["starts"]) == ["first", "warm 1"]
    for start in results["starts"].values():
        phases = start["phases_s"]
        assert {"up", "process start", "imports", "first token"} <= phases.keys()
        assert sum(phases.values()) == pytest.approx(start["total_s"], abs=0.5)  # phases below 50 ms are not named
    assert "first token" in capsys.readouterr().out
    assert len(re.findall(r"registered: blocks 0 to \d+; started in [\d.]+ s: process start", log.read_text())) == 2
    assert sorted(tmp_path.iterdir()) == [found, log], "the weights and caches are removed"


def test_a_start_that_fails_shows_the_log_of_the_worker(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    # The worker ends before it reads weights, which the test above writes: seconds of imports.
    monkeypatch.setattr(startup, "_WRITE", "import shutil, sys; shutil.copy(sys.argv[1], sys.argv[2])")
    found = tmp_path / "startup.json"
    options = ["--tiny", "--warm", "0", "--folder", str(tmp_path), "--json", str(found), "--", "--dtype", "float16x"]
    assert startup.main(options) == 0
    starts = json.loads(found.read_text())["results"]["starts"]
    assert "ended with status 2" in starts["first"]["error"]
    assert "float16x" in capsys.readouterr().err
