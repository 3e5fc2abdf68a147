"""Every choice of tiles compiles for every target, keeps its numbers in registers, and uses matrix instructions.

No GPU is needed. The compiler runs in a process of its own: in this one kernels are interpreted.
"""

from __future__ import annotations

import itertools
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("triton")

from worker.attention.aot import DTYPES, Compiled
from worker.attention.targets import HEAD_CLASSES, TARGETS, TileKey, current_target, head_class
from worker.device import Device

COMPILED = [name for name, target in TARGETS.items() if target.backend == "hip"]
# Bytes of private memory that a thread may have. gfx9 has 512 registers and needs none. RDNA has 256: too few for heads
# of more than 128 on gfx1100, whose matrix instructions take every operand twice, and for float32, which has no matrix
# instructions there.
LOCAL_BYTES_MAX = {"gfx90a": 0, "gfx942": 0, "gfx950": 0, "gfx1100": 96, "gfx1201": 0}
LOCAL_BYTES_MAX_LARGE = LOCAL_BYTES_MAX | {"gfx1100": 384}
LOCAL_BYTES_MAX_FLOAT32 = LOCAL_BYTES_MAX | {"gfx1100": 640, "gfx1201": 640}
SCALAR_SPILLS_MAX = 320  # into lanes of vector registers: the masks of tiles that are padded and windowed
REGISTERS = {32: 256, 64: 512}


@pytest.mark.parametrize("name", COMPILED)
def test_compiles_within_bounds(name: str, tmp_path: Path) -> None:
    target = TARGETS[name]
    environment = {key: value for key, value in os.environ.items() if key != "TRITON_INTERPRET"}
    result = subprocess.run(
        [sys.executable, "-m", "worker.attention.aot", "--json", "--target", name],
        env=environment | {"TRITON_CACHE_DIR": str(tmp_path)},
        capture_output=True,
        text=True,
        timeout=600,
        check=False,
    )
    assert result.returncode == 0, result.stderr
    compiled = [Compiled(**json.loads(line)) for line in result.stdout.splitlines()]
    assert {each.label.split()[0] for each in compiled} == {"decode", "prefill", "write"}
    for each in compiled:
        is_large = "head 256" in each.label or "head 192" in each.label
        bounds = LOCAL_BYTES_MAX_LARGE if is_large else LOCAL_BYTES_MAX
        local_bytes_max = (LOCAL_BYTES_MAX_FLOAT32 if "fp32" in each.label else bounds)[name]
        assert each.local_bytes <= local_bytes_max, each.line()
        assert each.spills <= local_bytes_max // 4 + 16, each.line()  # a few go to accumulators, not to memory
        assert each.scalar_spills <= SCALAR_SPILLS_MAX, each.line()
        assert each.shared_bytes <= target.shared_bytes, each.line()
        assert each.registers <= REGISTERS[target.warp_size], each.line()
        assert (each.matrix > 0) == each.wants_matrix, each.line()


def test_selection_holds_every_choice_of_tiles_and_every_dtype(monkeypatch: pytest.MonkeyPatch) -> None:
    from worker.attention import aot

    chosen: dict[str, list[tuple[Any, ...]]] = {"decode": [], "prefill": [], "write": []}
    for kind in chosen:
        monkeypatch.setattr(aot, f"_{kind}", lambda target, *factors, kind=kind: chosen[kind].append(factors))
    aot._selection(TARGETS["gfx942"])
    keys = {TileKey(*key) for key in itertools.product(HEAD_CLASSES, (1, 2, 4))}
    for kind in ("decode", "prefill"):
        assert {dtypes for dtypes, *_ in chosen[kind]} == set(DTYPES)
        worst = [(dtypes, head) for dtypes, head, _, *optional in chosen[kind] if all(optional)]
        assert {TileKey(head_class(head), dtypes[1].itemsize) for dtypes, head in worst} == keys
        assert not any(head in HEAD_CLASSES for _, head in worst)
        assert any(not any(optional) for _, _, _, *optional in chosen[kind])
    assert {dtypes for dtypes, *_ in chosen["write"]} == set(aot.WRITTEN)


def test_tables_are_complete(cpu: Device) -> None:
    for target in TARGETS.values():
        for key in itertools.product(HEAD_CLASSES, (1, 2, 4)):
            assert TileKey(*key) in target.decode
            assert TileKey(*key) in target.prefill
    assert current_target(cpu).backend == "cpu"
