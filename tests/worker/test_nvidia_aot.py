"""Kernels for NVIDIA GPUs that are not here compile, and fit in what a block of each may use: see `nvidia_compile`."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from random import Random

import pytest
import torch

pytest.importorskip("triton")

from tests.worker.compiled import every
from tests.worker.launches import compiler_environment
from worker.attention import KvLayer
from worker.attention.aot import Configuration, configurations
from worker.attention.prefill_copy import FIELDS, PAGES_MAX, copy_rows, workspace_for
from worker.attention.specialise import recorded
from worker.attention.targets import TARGETS
from worker.kernels import registry

KIB = 1024
SHARED_KIB = {"sm_75": 64, "sm_80": 163, "sm_86": 99, "sm_89": 99, "sm_90": 227, "sm_100": 227, "sm_120": 99}
# Bytes of private memory that a thread may have: a few numbers, where heads are large or a tile was tuned on a device.
LOCAL_BYTES_MAX = dict.fromkeys(SHARED_KIB, 64) | {"sm_90": 256}
KERNELS = {"decode", "prefill", "write"}
HOPPERS, LAYERS, PRODUCTS = {"copy"}, {"sum"}, {"linear", "project"}
PRODUCT_KERNELS = {"linear_kernel", "project_kernel"}


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
        wanted = KERNELS | HOPPERS if target.hopper else KERNELS | LAYERS | (PRODUCTS if target.matrix else set())
        assert {each["label"].split()[0] for each in compiled} == wanted
        for each in compiled:
            assert each["local_bytes"] <= LOCAL_BYTES_MAX[name], each
            assert each["matrix"] > 0 or not each["wants_matrix"] or not target.matrix, each
            assert lowered.get(each["label"], each["shared_bytes"]) == each["shared_bytes"], each
    like = {each["label"]: each["shared_bytes"] for each in found if each["target"] == "sm_86"}
    for each in found:
        if each["target"] in ("sm_80", "sm_89") and each["label"] in like:
            assert each["shared_bytes"] == like[each["label"]], "is not what was lowered for sm_86"


@pytest.mark.parametrize("name", ["sm_75", "sm_90", "gfx942"])  # which kernels a target runs is as for one of these
def test_every_declared_kernel_is_compiled(name: str) -> None:
    """What is in the registry is among what these tests, those of the layers and those for AMD compile."""
    target = TARGETS[name]
    compiled = {each.specialisation.kernel.fn for each in every(target)}
    for kernel in registry.KERNELS:
        runs = target.hopper or not kernel.hopper
        if kernel.name in PRODUCT_KERNELS:
            runs = bool(target.matrix)  # products without matrix instructions are torch's
        if kernel.name != "prefill_hopper":  # Gluon's: compiled in `test_prefill`
            assert (kernel.function.fn in compiled) == runs, f"{kernel.module}.{kernel.name} for {name}"


@pytest.mark.parametrize("stored", [torch.int8, torch.float8_e4m3fn], ids=str)
def test_whatever_is_copied_to_a_workspace_was_compiled(stored: torch.dtype) -> None:
    """Rows of any length in workspaces of any size: a page alone among them, whose number Triton would compile in."""
    target, random = TARGETS["sm_90"], Random(11)
    with recorded(target) as made, torch.device("meta"):
        for _ in range(300):
            model, head_size = random.choice((torch.bfloat16, torch.float16)), 8 * random.randint(1, 32)
            keys = torch.empty((9, random.choice((8, 16, 128)), random.choice((1, 2, 8)), head_size), dtype=stored)
            layer = KvLayer(keys, keys, *(torch.empty(keys.shape[:3]) for _ in range(2)))
            pages, width = random.choice((1, 2, 3, 16, PAGES_MAX)), random.choice((1, 7, 8, 16))
            workspace = workspace_for(pages, layer, model)
            copies = torch.empty((random.randint(1, pages), FIELDS), dtype=torch.int32)
            copy_rows(layer, torch.empty((3, width), dtype=torch.int32), copies, workspace, random.choice((0, 1, 48)))
    compiled = {each.kind() for each in configurations(target)}
    assert not [str(each) for each in made if Configuration("", each, False).kind() not in compiled]
