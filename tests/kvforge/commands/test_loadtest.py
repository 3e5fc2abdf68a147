"""`kvforge loadtest` is the harness itself: all arguments behind the name are the harness's."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path


def kvforge(*arguments: str, cwd: Path) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-P", "-m", "kvforge", *arguments]
    environment = {name: value for name, value in os.environ.items() if not name.startswith("KVFORGE_")}
    return subprocess.run(command, cwd=cwd, env=environment, capture_output=True, text=True, timeout=60)


def test_its_options_and_its_help_are_those_of_the_harness(tmp_path: Path) -> None:
    # A user's module of the same name does not run.
    (tmp_path / "loadtest.py").write_text("raise SystemExit('the user runs')")
    helped = kvforge("loadtest", "--help", cwd=tmp_path)
    assert helped.returncode == 0 and "--arrivals" in helped.stdout
    # Both have an option --timeout: here it is the harness's.
    wrong = kvforge("loadtest", "--timeout", "never", cwd=tmp_path)
    assert wrong.returncode == 2 and "usage" in wrong.stderr and "never" in wrong.stderr


def test_what_is_given_before_its_name_says_where_the_coordinator_is(tmp_path: Path) -> None:
    nowhere = tmp_path / "nowhere"
    ended = kvforge("--runtime-dir", str(nowhere), "loadtest", "--rate", "1", "--requests", "1", cwd=tmp_path)
    assert ended.returncode == 3 and str(nowhere) in ended.stderr
