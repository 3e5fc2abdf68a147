"""Products of 16 bits on a CPU have the same bits among any other rows, also where the CPU has AMX."""

from __future__ import annotations

import json
import os
import subprocess
import sys

import pytest

CODE = """
import json, os, sys
import torch
from torch.nn.functional import linear
from kvforge.worker.device.device import open_device
open_device("cpu", steady=sys.argv[1] == "steady")
torch.set_num_threads(1)
found = []
for n, k in ((576, 576), (192, 2048), (1536, 1024)):
    x, weight = torch.randn(260, k).bfloat16(), torch.randn(n, k).bfloat16()
    whole = linear(x, weight)
    found += [rows for rows in (4, 8, 33, 65, 129) if not torch.equal(linear(x[:rows], weight), whole[:rows])]
print(json.dumps([found, os.environ.get("ONEDNN_MAX_CPU_ISA")]))
"""


@pytest.mark.parametrize(
    ("asked", "before", "limited"),
    [
        ("steady", None, "AVX512_CORE_FP16"),
        ("steady", "AVX2", "AVX2"),
        ("steady", "AVX512_CORE_AMX", "AVX512_CORE_FP16"),
        ("steady", "fewest", "AVX512_CORE_FP16"),
        ("fast", None, None),
        ("fast", "AVX512_CORE_AMX", "AVX512_CORE_AMX"),
    ],
)
def test_a_steady_worker_multiplies_without_tiles(asked: str, before: str | None, limited: str | None) -> None:
    own = {name: value for name, value in os.environ.items() if name != "ONEDNN_MAX_CPU_ISA"}
    if before is not None:
        own["ONEDNN_MAX_CPU_ISA"] = before
    done = subprocess.run([sys.executable, "-c", CODE, asked], env=own, capture_output=True, text=True, check=True)
    differing, limit = json.loads(done.stdout)
    assert (f"ONEDNN_MAX_CPU_ISA={before} becomes" in done.stderr) == (before not in (None, limited))
    assert limit == limited
    assert differing == [] or asked == "fast"
