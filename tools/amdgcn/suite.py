"""The worker's self-tests and further checks, with its kernels interpreted for AMD GPUs; `tools.ptx.suite`: NVIDIA's.

    python -m tools.amdgcn.suite [--target gfx942 ...] [--only "decode bf16"] [--order mixed --seed 1] [--quick]

Prints one line per check: `agrees`, or the problem. The exit status is 1 if any check fails. The whole suite (`make
amd`) takes one core several minutes per target; `make test-all` runs `--quick`.
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

from kvforge.worker.device.targets import TARGETS

from . import formats, large, shapes
from .checks import Fault, Unsupported
from .driver import Emulated

NAMES = [name for name, target in TARGETS.items() if target.backend == "hip"]
WHOLE = ("gfx942", "gfx1100", "sm_90", "sm_100")  # --quick runs more checks for these targets
SLOWEST = {"gfx1100": ("mixed-batch ", "sampling, ")}  # --quick skips these here; gfx942 covers them

# torch multiplies on Turing, and attends over latents.
OF_TORCH = {
    "sm_75": (
        *("projection bf16 ", "projection fp16 ", "projection into the cache ", "output ", "vocabulary head "),
        *("write of latents ", "decode of latents ", "prefill of latents "),
    )
}


@dataclass(frozen=True)
class Interpreter:
    """What a suite runs on.

    Attributes:
        module: the suite's.
        names: its targets.
        orders: how waves, or copies, may follow each other.
        make: from a target, an order and a seed.
    """

    module: str
    names: list[str]
    orders: tuple[str, ...]
    make: Callable[[str, str, int], Emulated]


@dataclass(frozen=True)
class Check:
    """A check of the suite; `run` returns the problem, or "" if there is none."""

    name: str
    run: Callable[[Emulated], str]


def checks(target: str, quick: bool) -> Iterator[Check]:
    """Yield the checks for a target: all, or with `quick` a minute's worth over all targets."""
    left_out = OF_TORCH.get(target, ()) + (SLOWEST.get(target, ()) if quick else ())
    yield from (check for check in _all(target, quick) if not check.name.startswith(left_out))


def _all(target: str, quick: bool) -> Iterator[Check]:
    whole = target in WHOLE
    for name, run in (*shapes.attention(quick, whole), *shapes.layers(quick, whole), *shapes.codes(quick, whole)):
        yield Check(name, run)
    if TARGETS[target].hopper:
        for name, run in shapes.hopper(quick):
            yield Check(name, run)
    for name, run in shapes.sorts(quick):
        yield Check(name, run)
    if not quick or target in WHOLE:
        for name, run in (*shapes.latents(quick), *shapes.attention_over_latents(quick)):
            yield Check(name, run)
        for name, run in shapes.sampling(quick):
            yield Check(name, run)
    if not quick:
        for name, run in (*formats.written(), *formats.read(), *large.pools()):
            yield Check(name, run)


def outcome(check: Check, emulated: Emulated) -> str:
    """Run a check and return its problems, findings of the launches included; "" if there are none."""
    first = len(emulated.launches)
    try:
        problem = check.run(emulated)
    except (Fault, Unsupported) as error:
        problem = f"{type(error).__name__}: {error}"
    except Exception as error:  # noqa: BLE001 - the compiler may raise anything; run the other checks too
        problem = f"{type(error).__name__}: {error}\n{traceback.format_exc()}"
    launches = emulated.launches[first:]
    found = dict.fromkeys(f"{each.kernel}: {what}" for each in launches for what in each.findings.problems())
    if not launches and not problem:
        problem = "no kernel was launched"
    return "; ".join(filter(None, (problem, *found)))


AMD = Interpreter("tools.amdgcn.suite", NAMES, ("up", "down", "mixed"), Emulated)


def main(interpreter: Interpreter = AMD) -> int:
    """Run the selected checks on each target and return the exit status."""
    names, orders = interpreter.names, interpreter.orders
    parser = argparse.ArgumentParser(description="Run the worker's kernels for absent GPUs on an interpreter.")
    parser.add_argument("--target", nargs="+", choices=names, default=names)
    parser.add_argument("--only", default="", help="run only checks with this text in their name")
    parser.add_argument("--order", choices=orders, default=orders[0], help="order of waves, or when copies end")
    parser.add_argument("--seed", type=int, default=0, help="seed of the mixed order")
    parser.add_argument("--quick", action="store_true", help="run a selection of about a minute")
    arguments = parser.parse_args()
    if len(arguments.target) == 1:
        return _run(arguments.target[0], arguments, interpreter)
    # One process per target: after compiling for gfx950, Triton 3.6 emits some of its instructions for other targets.
    options = ["--only", arguments.only, "--order", arguments.order, "--seed", str(arguments.seed)]
    command = [sys.executable, "-m", interpreter.module, *options, *["--quick"] * arguments.quick, "--target"]
    return max(subprocess.run([*command, name], check=False).returncode for name in arguments.target)


def _run(target: str, arguments: argparse.Namespace, interpreter: Interpreter) -> int:
    wrong = 0
    with contextlib.ExitStack() as stack:
        if "TRITON_CACHE_DIR" not in os.environ:
            cache = stack.enter_context(tempfile.TemporaryDirectory())
            stack.enter_context(patch.dict(os.environ, {"TRITON_CACHE_DIR": cache}))
        emulated = stack.enter_context(interpreter.make(target, arguments.order, arguments.seed))
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
