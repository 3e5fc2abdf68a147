"""The worker's kernels, interpreted for NVIDIA GPUs; planted faults must be detected. See `tests/amdgcn`."""

from __future__ import annotations

import json
import subprocess
import sys
from importlib.metadata import version
from pathlib import Path

import pytest

pytest.importorskip("triton")

from tests.worker.kernels.launches import check_suite, compiler_environment, run_module
from tools.amdgcn.suite import checks
from tools.aot.results import VERSION
from tools.ptx.suite import NAMES

known_triton = pytest.mark.skipif(version("triton") != VERSION, reason=f"needs the code of Triton {VERSION}")


@known_triton
@pytest.mark.parametrize(
    ("name", "order"), [*((name, "late") for name in NAMES), ("sm_90", "early"), ("sm_90", "mixed")]
)
def test_kernels_agree_with_their_references(name: str, order: str, tmp_path: Path) -> None:
    count = len(list(checks(name, quick=True)))
    assert count >= {"sm_90": 20, "sm_100": 10}.get(name, 3)
    check_suite("tools.ptx.suite", name, count, "--order", order, cache=tmp_path)


@known_triton
def test_faults_in_kernels_are_seen(tmp_path: Path) -> None:
    found = run_module("tools.ptx.planted", cache=tmp_path)
    assert found.returncode == 0, found.stderr
    seen = json.loads(found.stdout)
    assert seen.pop("nothing") == ""
    words = {
        "wrong arithmetic": "differs from the reference",
        "store outside the arguments": "store outside the arguments",
        "another swizzle": "differs from the reference",
        "no wait for a box": "shared memory that nothing has written",
        "no wait until a box was read": "wait forever",
        "no wait for a product": "sums of a product under way",
        "a box of other bytes": "wait forever",
        "no arrival": "wait forever",
    }
    for fault, word in words.items():
        assert word in seen.pop(fault), fault
    assert not seen


@known_triton
def test_gpu_tests_of_kernels_run_on_an_emulated_gpu(tmp_path: Path) -> None:
    """`KVFORGE_EMULATED` as CONTRIBUTING.md names it: bits of Hopper's kernels beside those of the portable ones."""
    chosen = "tests/worker/kernels/test_stored_hopper.py::test_a_broken_row_changes_no_other"
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-p", "no:xdist", chosen]
    environment = compiler_environment(tmp_path)
    for target, problem in (("sm_90", ""), ("sm_77", "KVFORGE_EMULATED: 'sm_77' is not one of")):
        given = environment | {"KVFORGE_EMULATED": target}
        found = subprocess.run(command, env=given, capture_output=True, text=True, timeout=600, check=False)
        if problem:
            assert found.returncode != 0 and problem in found.stdout + found.stderr
        else:
            assert found.returncode == 0 and "1 passed" in found.stdout, found.stdout + found.stderr
