"""Resident memory of a process that has loaded a model on a CPU, and what it is.

    python -m benchmarks.cpu_memory [--model PATH] [--json FILE]

For each kind of weights (`dtype`, `weight_dtype`) a process of its own imports what a worker does, loads the model, and
reads /proc/self/smaps: bytes that are its own (anonymous), and those of mapped files (libraries, the model's). What is
aimed at is 1.3 times the weights that are served, the embedding beside its packed head included, plus 250 MB; a KV
pool, which is not made here, comes on top of both. A kind that this CPU has no products for is passed over.
"""

from __future__ import annotations

import argparse
import json
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

from benchmarks.report import report

KINDS = (("float32", "dtype"), ("bfloat16", "dtype"), ("float32", "int8"), ("bfloat16", "auto"))
BOUND_SHARE, BOUND_BYTES = 1.3, 250e6
MAPPING = re.compile(r"^[0-9a-f]+-[0-9a-f]+ \S+ \S+ \S+ \S+ *(.*)$")


def resident() -> dict[str, int]:
    """Bytes of this process: in all, anonymous, and of each mapped file that takes a MiB or more, by its name."""
    found: dict[str, int] = {"all": 0, "anonymous": 0}
    name = ""
    for line in Path("/proc/self/smaps").read_text(encoding="utf-8").splitlines():
        if match := MAPPING.match(line):
            name = Path(match[1]).name
            continue
        what, _, rest = line.partition(":")
        if what in ("Rss", "Anonymous"):
            size = int(rest.split()[0]) * 1024
            found["all" if what == "Rss" else "anonymous"] += size
            if what == "Rss" and name and not name.startswith("["):
                found[name] = found.get(name, 0) + size
    return {name: size for name, size in found.items() if size >= 1 << 20}


def measure(model: str, dtype: str, weight_dtype: str) -> dict[str, Any]:
    """In a process of its own: before the load, and after."""
    from kvforge.protocol.errors import InvalidConfiguration
    from worker.device.device import open_device
    from worker.loading.load import load_model
    from worker.step.memory import weight_bytes

    before = resident()
    device = open_device("cpu")
    try:
        loaded = load_model(Path(model), dtype=dtype, weight_dtype=weight_dtype, device=device, block_size=16)
    except InvalidConfiguration as error:
        return {"refused": str(error)}
    device.release_cached()
    kept = loaded.info.weight_dtype
    return {"before": before, "after": resident(), "weight_bytes": weight_bytes(loaded), "kept_in": kept}


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
        files = sorted((name for name in after if name not in ("all", "anonymous")), key=lambda name: -after[name])
        numbers = (found["weight_bytes"], before["all"], after["all"], after["anonymous"])
        bound = BOUND_SHARE * found["weight_bytes"] + BOUND_BYTES
        rows.append(
            [
                f"{', '.join(kind)} ({found['kept_in']})",
                *(f"{number / 1e6:.0f}" for number in (*numbers, bound)),
                ", ".join(f"{name} {after[name] / 1e6:.0f}" for name in files[:3]),
            ]
        )
    header = ["weights", "weights MB", "before", "after", "anonymous", "aim", "largest mapped files"]
    report("resident memory of a process with a model, MB", header, rows, results, arguments.json)


if __name__ == "__main__":
    main()
