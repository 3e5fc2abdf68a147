"""After Ctrl-C at any Python step the client can connect, make the next call, and close."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[3]
END_S = 200


@pytest.mark.parametrize(
    ("what", "stride", "steps_min"),
    [
        ("opening", 1, 300),
        ("closing", 1, 100),
        ("ending", 1, 100),
        ("submit", 71, 1000),
        ("result", 331, 2000),
        ("stats", 71, 1000),
    ],
)
def test_ctrl_c_at_any_step_of(what: str, stride: int, steps_min: int, folder: Path) -> None:
    run = subprocess.run(
        [sys.executable, "-m", "tests.kvforge.client.interrupting", what, str(folder), str(stride)],
        capture_output=True,
        text=True,
        timeout=END_S,
        check=False,
        cwd=ROOT,
    )
    assert run.returncode == 0, run.stderr
    assert int(run.stdout) > steps_min
