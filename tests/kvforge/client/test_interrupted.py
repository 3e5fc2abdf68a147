"""After Ctrl-C at any Python step the client can connect, make the next call, and close."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[3]
END_S = 200


# What is interrupted, the stride of the steps in `make test` and in `make test-all`, and the least number of steps.
CALLS = [
    ("opening", 4, 1, 300),
    ("closing", 4, 1, 100),
    ("ending", 4, 1, 100),
    ("submit", 283, 71, 1000),
    ("result", 1327, 331, 2000),
    ("stats", 283, 71, 1000),
]


@pytest.mark.parametrize(("what", "stride", "steps_min"), [(what, stride, least) for what, stride, _, least in CALLS])
def test_ctrl_c_at_many_steps_of(what: str, stride: int, steps_min: int, folder: Path) -> None:
    interrupt(what, stride, steps_min, folder)


@pytest.mark.parametrize(("what", "stride", "steps_min"), [(what, stride, least) for what, _, stride, least in CALLS])
def test_ctrl_c_at_any_step_of(what: str, stride: int, steps_min: int, folder: Path) -> None:
    interrupt(what, stride, steps_min, folder)


def interrupt(what: str, stride: int, steps_min: int, folder: Path) -> None:
    """Interrupt each `stride`-th step, in a process of its own."""
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
