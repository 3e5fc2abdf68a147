"""The bugs of `planted` still apply: the code that they patch exists."""

from __future__ import annotations

import subprocess
import sys

import pytest

from tools.chaos.planted import FAULTS

LEAVES_NOTHING = sorted(FAULTS.keys() - {"orphan"})


@pytest.mark.parametrize("name", LEAVES_NOTHING)
def test_a_fault_can_be_planted(name: str) -> None:
    module = FAULTS[name].module
    command = [sys.executable, "-m", "tools.chaos.planted", name, module, "--help"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0 and f"python -m kvforge.{module}" in done.stdout, done.stderr
