"""The worker's own self-tests, and more, with its kernels interpreted for GPUs that are not here.

    python -m tests.amdgcn.suite [--target gfx942 ...] [--only "decode bf16"] [--order mixed --seed 1] [--quick]

prints a line for each check: `agrees`, or what is wrong. The exit status is 1 where anything is. All of it takes a core
several minutes for each target; --quick is what `make test` runs. `make amd` runs all of it.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from unittest.mock import patch

from worker.device.targets import TARGETS

from . import formats, large, shapes
from .checks import Fault, Unsupported
from .driver import Emulated

NAMES = [name for name, target in TARGETS.items() if target.backend == "hip"]
WHOLE = ("gfx942", "gfx1100")  # --quick: more of these than of the others
SLOWEST = {"gfx1100": ("mixed-batch ", "sampling, ")}  # --quick: left out there, and seen on gfx942


@dataclass(frozen=True)
class Check:
    """run: on a device of that kind; gives what is wrong, "" where nothing is."""

    name: str
    run: Callable[[Emulated], str]


def checks(target: str, quick: bool) -> Iterator[Check]:
    """All of them, or a minute's worth over all targets."""
    left_out = SLOWEST.get(target, ()) if quick else ()
    yield from (check for check in _all(target, quick) if not check.name.startswith(left_out))


def _all(target: str, quick: bool) -> Iterator[Check]:
    for name, run in (*shapes.attention(quick, target in WHOLE), *shapes.layers(quick, target in WHOLE)):
        yield Check(name, run)
    if not quick or target in WHOLE:
        for name, run in shapes.sampling(quick):
            yield Check(name, run)
    if not quick:
        for name, run in (*formats.written(), *formats.read(), *large.pools()):
            yield Check(name, run)


def outcome(check: Check, emulated: Emulated) -> str:
    """What is wrong, with its answer or with the way to it; "" where nothing is."""
    first = len(emulated.launches)
    try:
        problem = check.run(emulated)
    except (Fault, Unsupported) as error:
        problem = f"{type(error).__name__}: {error}"
    except Exception as error:  # noqa: BLE001 - the compiler raises what it likes; the other checks are wanted too
        problem = f"{type(error).__name__}: {error}\n{traceback.format_exc()}"
    launches = emulated.launches[first:]
    found = dict.fromkeys(f"{each.kernel}: {what}" for each in launches for what in each.findings.problems())
    if not launches and not problem:
        problem = "no kernel was launched"
    return "; ".join(filter(None, (problem, *found)))


def main() -> int:
    parser = argparse.ArgumentParser(description="Run the worker's kernels for AMD GPUs that are not here.")
    parser.add_argument("--target", nargs="+", choices=NAMES, default=NAMES)
    parser.add_argument("--only", default="", help="checks whose names contain this text")
    parser.add_argument("--order", choices=("up", "down", "mixed"), default="up", help="of waves and workgroups")
    parser.add_argument("--seed", type=int, default=0, help="of a mixed order")
    parser.add_argument("--quick", action="store_true", help="a minute's worth")
    arguments = parser.parse_args()
    if len(arguments.target) == 1:
        return _run(arguments.target[0], arguments)
    # A process for each: after gfx950, Triton 3.6 uses some of its instructions for other targets as well.
    options = ["--only", arguments.only, "--order", arguments.order, "--seed", str(arguments.seed)]
    command = [sys.executable, "-m", "tests.amdgcn.suite", *options, *["--quick"] * arguments.quick, "--target"]
    return max(subprocess.run([*command, name], check=False).returncode for name in arguments.target)


def _run(target: str, arguments: argparse.Namespace) -> int:
    wrong = 0
    with contextlib.ExitStack() as stack:
        if "TRITON_CACHE_DIR" not in os.environ:
            cache = stack.enter_context(tempfile.TemporaryDirectory())
            stack.enter_context(patch.dict(os.environ, {"TRITON_CACHE_DIR": cache}))
        emulated = stack.enter_context(Emulated(target, arguments.order, arguments.seed))
        for check in checks(target, arguments.quick):
            if arguments.only not in check.name:
                continue
            began, first = time.perf_counter(), len(emulated.launches)
            problem = outcome(check, emulated)
            wrong += bool(problem)
            count = sum(each.findings.instructions for each in emulated.launches[first:])
            took = f"{count} instructions, {time.perf_counter() - began:.0f} s"
            print(f"{target:8} {check.name:70} {problem or 'agrees'}  [{took}]", flush=True)
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
