"""Plants faults in the assembly of the worker's kernels; the suite must detect each. Prints {fault: finding}.

python -m tools.amdgcn.planted
"""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Callable
from dataclasses import dataclass

import triton
import triton.language as tl
from triton.compiler import ASTSource

from kvforge.worker.device.targets import TARGETS
from tools.aot.specialise import gpu_target

from .driver import Emulated
from .suite import checks, outcome

TARGET = "gfx942"


@dataclass(frozen=True)
class Fault:
    """A planted fault.

    Attributes:
        check: prefix of the name of the suite's check.
        edit: transforms the assembly.
    """

    check: str
    edit: Callable[[str], str]


FAULTS = {
    "nothing": Fault("decode bf16/bf16", str),
    "wrong arithmetic": Fault("sum and norm", lambda text: re.sub(r"\bv_add_f32", "v_sub_f32", text)),
    "store outside the arguments": Fault(
        "write bf16/bf16", lambda text: re.sub(r"(buffer_store_\S+ [^\n]*?offen)\b", r"\1 offset:4000", text)
    ),
    "no barrier between waves": Fault("sum and norm", lambda text: text.replace("s_barrier", "s_nop 0")),
    "no wait before an atomic": Fault("decode bf16/bf16", lambda text: text.replace("vmcnt(0)", "vmcnt(1)")),
    "LDS never written": Fault("sum and norm", lambda text: re.sub(r"\bds_write_\w+ [^\n]*", "s_nop 0", text)),
}


@triton.jit
def chooses_pointers(first, second, output, slots, stride):  # type: ignore[no-untyped-def]
    """Choose a pointer at run time, as an early KV write kernel did."""
    slot = tl.load(slots + tl.program_id(0))
    if slot >= 0:
        if tl.program_id(1) > 0:
            source = first + slot * stride
            target = output
        else:
            source = second + slot
            target = first
        at = tl.arange(0, 64)
        tl.store(target + at, tl.load(source + at))


def compiled(name: str) -> str:
    """Return the compiler's error for run-time chosen pointers, marked as Triton's launcher marks them; "" for none."""
    types = dict.fromkeys(("first", "second", "output"), "*fp32") | {"slots": "*i32", "stride": "i32"}
    attributes = {(place,): [["tt.divisibility", 16], ["tt.pointer_range", 32]] for place in range(4)}
    source = ASTSource(chooses_pointers, types, {}, attributes)
    try:
        triton.compile(source, target=gpu_target(TARGETS[name]))
    except RuntimeError as error:
        return str(error)
    return ""


def main() -> int:
    """Run every planted fault and print the findings as JSON."""
    seen = {}
    for name, fault in FAULTS.items():
        with Emulated(TARGET, edit=fault.edit) as emulated:
            check = next(each for each in checks(TARGET, quick=False) if each.name.startswith(fault.check))
            seen[name] = outcome(check, emulated)
    refused = {
        f"chosen pointers on {target.name}": compiled(target.name)
        for target in TARGETS.values()
        if target.backend == "hip"
    }
    print(json.dumps(seen | refused))
    return 0


if __name__ == "__main__":
    sys.exit(main())
