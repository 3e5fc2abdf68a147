"""Compiles every declared kernel for GPUs that are not present, in every configuration that can be launched there.

    python -m tools.aot [--target gfx942 ...] [--only "decode bf16"]

Prints one line per configuration: registers, spilled registers, local (private) memory, shared memory (LDS) and matrix
instructions. The exit status is 1 if any does not compile.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
from dataclasses import asdict

from kvforge.worker.device.target import Target
from kvforge.worker.device.targets import TARGETS

from .compilation import compile_one
from .configurations import every_configuration


def main() -> int:
    """Run the command and return its exit status."""
    parser = argparse.ArgumentParser(description="Compile the kernels for GPUs that are not present.")
    names = [name for name, target in TARGETS.items() if target.backend != "cpu"]
    parser.add_argument("--target", nargs="+", choices=names, default=names)
    parser.add_argument("--only", default="", help="labels that contain this text")
    parser.add_argument("--json", action="store_true", help="print one JSON line per configuration")
    arguments = parser.parse_args()
    if len(arguments.target) == 1:
        return _compile_all(TARGETS[arguments.target[0]], arguments)
    # One process per target: after gfx950, Triton 3.6 also uses some of its instructions for other targets.
    options = ["--json"] * arguments.json + ["--only", arguments.only]
    command = [sys.executable, "-m", "tools.aot", *options, "--target"]
    return max(subprocess.run([*command, name], check=False).returncode != 0 for name in arguments.target)


def _compile_all(target: Target, arguments: argparse.Namespace) -> int:
    failures = 0
    for configuration in every_configuration(target):
        if arguments.only not in configuration.label:
            continue
        try:
            compiled = compile_one(configuration, target)
            print(json.dumps(asdict(compiled)) if arguments.json else compiled.line(), flush=True)
        except Exception as error:  # noqa: BLE001 - report any compiler error, then go on
            failures += 1
            print(f"{target.name:8} {configuration.label:52} FAILED: {_last_line(error)}", file=sys.stderr, flush=True)
    return 1 if failures else 0


def _last_line(error: Exception) -> str:
    """Return the last line: a compiler's message quotes the source before the fault."""
    return f"{type(error).__name__}: {(str(error).strip().splitlines() or [''])[-1]}"


if __name__ == "__main__":
    sys.exit(main())
