"""Kernels for NVIDIA GPUs that are not here compile, and fit in what a block of each may use: see `nvidia_compile`."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("triton")

from tests.worker.launches import compiler_environment
from worker.attention.targets import TARGETS

KIB = 1024
SHARED_KIB = {"sm_75": 64, "sm_80": 163, "sm_86": 99, "sm_89": 99, "sm_90": 227, "sm_100": 227, "sm_120": 99}
# Bytes of private memory that a thread may have: a few numbers, where heads are large or a tile was tuned on a device.
LOCAL_BYTES_MAX = dict.fromkeys(SHARED_KIB, 64) | {"sm_90": 256}
KERNELS = {"decode", "prefill", "write"}
LAYERS, PRODUCTS = {"sum"}, {"linear", "project"}


def test_every_target_has_the_limit_of_its_chip() -> None:
    assert {
        name: target.shared_bytes // KIB for name, target in TARGETS.items() if target.backend == "cuda"
    } == SHARED_KIB


@pytest.mark.parametrize("names", [("sm_75", "sm_86", "sm_80", "sm_89"), ("sm_90", "sm_100", "sm_120")], ids=" ".join)
def test_what_is_launched_compiles_and_fits(names: tuple[str, ...], tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "tests.worker.nvidia_compile", *names],
        env=compiler_environment(tmp_path),
        capture_output=True,
        text=True,
        timeout=600,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    found = [json.loads(line) for line in done.stdout.splitlines()]
    for name in names:
        target = TARGETS[name]
        mine = [each for each in found if each["target"] == name]
        for each in mine:
            assert 0 <= each["shared_bytes"] <= target.shared_bytes, each
        lowered = {each["label"]: each["shared_bytes"] for each in mine if each["depth"] == "lowered"}
        compiled = [each for each in mine if each["depth"] == "compiled"]
        wanted = KERNELS if target.hopper else KERNELS | LAYERS | (PRODUCTS if target.matrix else set())
        assert {each["label"].split()[0] for each in compiled} == wanted
        for each in compiled:
            assert each["local_bytes"] <= LOCAL_BYTES_MAX[name], each
            assert each["matrix"] > 0 or not each["wants_matrix"] or not target.matrix, each
            assert lowered.get(each["label"], each["shared_bytes"]) == each["shared_bytes"], each
    like = {each["label"]: each["shared_bytes"] for each in found if each["target"] == "sm_86"}
    for each in found:
        if each["target"] in ("sm_80", "sm_89") and each["label"] in like:
            assert each["shared_bytes"] == like[each["label"]], "is not what was lowered for sm_86"
