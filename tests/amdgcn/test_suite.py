"""The worker's kernels, interpreted for AMD GPUs; planted faults must be detected.

Each suite runs in its own process, because Triton interprets kernels in this one. `make amd` runs the whole suite.
"""

from __future__ import annotations

import json
from importlib.metadata import version
from pathlib import Path

import pytest

pytest.importorskip("triton")

from tests.worker.kernels.launches import check_suite, run_module
from tools.amdgcn.suite import NAMES, WHOLE, checks
from tools.aot.results import VERSION

# Other Triton releases choose other instructions and registers, and refuse other code.
known_triton = pytest.mark.skipif(version("triton") != VERSION, reason=f"needs the code of Triton {VERSION}")


@known_triton
@pytest.mark.parametrize("name", NAMES)
def test_kernels_agree_with_their_references(name: str, tmp_path: Path) -> None:
    count = len(list(checks(name, quick=True)))
    assert count >= (10 if name in WHOLE else 3)
    check_suite("tools.amdgcn.suite", name, count, cache=tmp_path)


@known_triton
def test_faults_in_kernels_are_seen(tmp_path: Path) -> None:
    found = run_module("tools.amdgcn.planted", cache=tmp_path)
    assert found.returncode == 0, found.stderr
    seen = json.loads(found.stdout)
    assert seen.pop("nothing") == ""
    words = {
        "wrong arithmetic": "differs from the reference",
        "store outside the arguments": "store outside the arguments",
        "no barrier between waves": "race in LDS",
        "no wait before an atomic": "stores that nothing waited for",
        "LDS never written": "uninitialised LDS",
    }
    for fault, word in words.items():
        assert word in seen.pop(fault), fault
    # Pointers chosen in an `if`, marked as Triton's launcher marks them, fail to compile on every target.
    assert seen == dict.fromkeys((f"chosen pointers on {name}" for name in NAMES), "PassManager::run failed")
