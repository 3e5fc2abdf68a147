"""Resident memory of a process that has loaded a model on a CPU, by kind.

    python -m benchmarks.cpu_memory [--model PATH] [--json FILE]

For each kind of weights (`dtype`, `weight_dtype`) a separate process imports the worker's modules, loads the model,
releases the pages of libraries as a worker does, and reads /proc/self/smaps: anonymous bytes, and bytes of mapped files
(libraries, the model's). It then decodes 8 prompts and reads the file again, without the KV pool, for the steps'
workspace and the library pages that came back; and once more after releasing the workspace, as an idle worker does. The
target is 1.3 times the served weights plus 250 MB; a KV pool comes on top of both. At the end it times decode steps,
with and without a release of library pages before them. Kinds without products on this CPU are skipped.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

from benchmarks.report import report

KINDS = (("float32", "dtype"), ("bfloat16", "dtype"), ("float32", "int8"), ("bfloat16", "auto"))
BOUND_SHARE, BOUND_BYTES = 1.3, 250e6
STEPS = 200
TIMED, EVERY = 100, 10  # steps, and the interval at which library pages are released
POOL = "/dev/zero (deleted)"  # the kernel's name for shared memory without a file


def resident() -> dict[str, int]:
    """Return the resident bytes of this process without its pool: total, anonymous, and by name of each mapped file of
    a MiB or more."""
    from kvforge.worker.device.file_pages import mappings

    found: dict[str, int] = {"all": 0, "anonymous": 0}
    for mapping in mappings():
        if mapping.path == POOL:
            continue
        found["all"] += mapping.resident
        found["anonymous"] += mapping.own
        if mapping.inode:
            name = Path(mapping.path).name
            found[name] = found.get(name, 0) + mapping.resident
    return {name: size for name, size in found.items() if size >= 1 << 20}


def measure(model: str, dtype: str, weight_dtype: str) -> dict[str, Any]:
    """Measure in a separate process: before the load, after it, and after `STEPS`."""
    import kvforge.worker.step.loop  # noqa: F401 - all that a worker imports
    from benchmarks.cpu_steps import BLOCK_SIZE, prompts_of, run_kvforge
    from kvforge.protocol.errors import InvalidConfiguration
    from kvforge.worker.device.device import open_device
    from kvforge.worker.loading.load import load_model
    from kvforge.worker.loading.weight_bytes import weight_bytes

    before = resident()
    device = open_device("cpu")
    try:
        loaded = load_model(Path(model), dtype=dtype, weight_dtype=weight_dtype, device=device, block_size=BLOCK_SIZE)
    except InvalidConfiguration as error:
        return {"refused": str(error)}
    device.release_cached()
    released = device.release_libraries()
    found: dict[str, Any] = {"before": before, "after": resident(), "released": released}
    prompts = prompts_of(loaded, 8)

    def after(step: int) -> None:
        if step == STEPS:
            found["after_steps"] = resident()
            device.release_cached()
            found["at_rest"] = resident()

    run_kvforge(loaded, prompts, STEPS + 1, after)
    seconds: dict[bool, list[float]] = {False: [], True: []}
    began = 0.0

    def time_it(step: int) -> None:
        nonlocal began
        if step:
            seconds[step % EVERY == 1].append(time.perf_counter() - began)
        if step % EVERY == 0:
            device.release_libraries()
        began = time.perf_counter()

    run_kvforge(loaded, prompts, TIMED + 1, time_it)
    found |= {"step_seconds": statistics.median(seconds[False]), "first_step_seconds": statistics.median(seconds[True])}
    return {**found, "weight_bytes": weight_bytes(loaded), "kept_in": loaded.info.weight_dtype}


def main() -> None:
    """Measures and prints."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", help="GGUF file or folder (default: smollm2-135m from the cache folder)")
    parser.add_argument("--json", metavar="FILE", help="write the numbers here too")
    parser.add_argument("--child", nargs=2, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.child:
        print(json.dumps(measure(arguments.model, *arguments.child)))
        return

    from kvforge.models.store import pull

    model = arguments.model or str(pull("smollm2-135m"))
    rows, results = [], []
    for kind in KINDS:
        command = [sys.executable, "-m", "benchmarks.cpu_memory", "--model", model, "--child", *kind]
        printed = subprocess.run(command, check=True, capture_output=True, text=True).stdout
        found = json.loads(printed.splitlines()[-1])
        results.append({"dtype": kind[0], "weight_dtype": kind[1], **found})
        if "refused" in found:
            print(f"{', '.join(kind)}: not on this machine: {found['refused']}")
            continue
        after, before = found["after"], found["before"]
        steps = found["after_steps"]
        files = sorted((name for name in steps if name not in ("all", "anonymous")), key=lambda name: -steps[name])
        numbers = (found["weight_bytes"], before["all"], after["all"], after["anonymous"])
        bound = BOUND_SHARE * found["weight_bytes"] + BOUND_BYTES
        rows.append(
            [
                f"{', '.join(kind)} ({found['kept_in']})",
                *(f"{number / 1e6:.0f}" for number in (*numbers, steps["all"], found["at_rest"]["all"], bound)),
                f"{1e3 * found['step_seconds']:.1f} ({1e3 * found['first_step_seconds']:.1f})",
                ", ".join(f"{name} {steps[name] / 1e6:.0f}" for name in files[:3]),
            ]
        )
    header = [
        "weights",
        "MB",
        "before",
        "after",
        "anonymous",
        f"{STEPS} steps",
        "at rest",
        "aim",
        "a step (the first), ms",
    ]
    header.append("largest mapped files after steps")
    report("resident memory of a process with a model, MB", header, rows, results, arguments.json)


if __name__ == "__main__":
    main()
