"""Plants faults in the PTX of the worker's kernels; the suite must detect each. Prints {fault: finding}.

python -m tools.ptx.planted
"""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Callable
from dataclasses import dataclass

from tools.amdgcn.suite import checks, outcome

from .driver import Emulated

TARGET = "sm_90"
_WAIT = r"mbarrier\.try_wait\.parity\.shared\.b64 complete, \[(%\w+)\], (%\w+);"


@dataclass(frozen=True)
class Planted:
    """A planted fault.

    Attributes:
        check: prefix of the name of the suite's check.
        edit: transforms the PTX.
        order: when copies end.
    """

    check: str
    edit: Callable[[str], str]
    order: str = "late"


_PRODUCT = "product on Hopper with int4 in groups of 128, 16"


def _without_wait(text: str, which: int) -> str:
    """Return the text without the `which`-th wait for a barrier in shared memory, from the last one if negative."""
    places = [*re.finditer(_WAIT, text)]
    return text[: places[which].start()] + "mov.pred complete, -1;" + text[places[which].end() :]


PLANTED = {
    "nothing": Planted(_PRODUCT, str),
    "wrong arithmetic": Planted("sum and norm", lambda text: re.sub(r"\badd\.f32\b", "sub.f32", text)),
    "store outside the arguments": Planted(
        "write bf16/bf16", lambda text: re.sub(r"(st\.global\S* \[ %\w+ \+) 0 \]", r"\1 40000000 ]", text)
    ),
    "another swizzle": Planted(
        # The bits 62 and 63 of a descriptor: 1 is 128 bytes, 2 is 64.
        _PRODUCT,
        lambda text: re.sub(r"\b46116862\d{11}\b", lambda found: str(int(found[0]) - (1 << 62) + (2 << 62)), text),
    ),
    "no wait for a box": Planted(_PRODUCT, lambda text: _without_wait(text, 1)),
    "no wait until a box was read": Planted(_PRODUCT, lambda text: _without_wait(text, -1), order="early"),
    "no wait for a product": Planted(_PRODUCT, lambda text: re.sub(r"wgmma\.wait_group\.sync\.aligned \d+;", "", text)),
    "a box of other bytes": Planted(
        _PRODUCT, lambda text: re.sub(r"(expect_tx\.shared\.b64 _, \[%\w+\]), (\d+)", r"\1, 1\2", text)
    ),
    "no arrival": Planted(_PRODUCT, lambda text: re.sub(r"@%\w+ mbarrier\.arrive\.shared::cta[^;]*;", "", text)),
}


def main() -> int:
    """Run every planted fault and print the findings as JSON."""
    seen = {}
    for name, planted in PLANTED.items():
        with Emulated(TARGET, planted.order, edit=planted.edit) as emulated:
            check = next(each for each in checks(TARGET, quick=False) if each.name.startswith(planted.check))
            seen[name] = outcome(check, emulated)
    print(json.dumps(seen))
    return 0


if __name__ == "__main__":
    sys.exit(main())
