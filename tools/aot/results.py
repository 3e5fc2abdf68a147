"""Compile results of every kernel in every configuration, stored in tests/data/compiled to recompile only changes.

    python -m tools.aot.results [--target gfx942 ...]  # compiles missing results, rewrites the files
    python -m tools.aot.results --print --target gfx942 ...  # a line of JSON each: for the tests

Compiling all kernels takes a core three minutes for each target. Each result is therefore stored under a *fingerprint*,
which covers all its inputs: Triton's version, the target, the launcher's specialisation of the arguments, the code of
the kernel and of every function it calls (without comments, docstrings and imports, wherever they lie), and the code
that reads the assembly. A missing fingerprint is compiled on the spot: an outdated file makes the tests slow, never
wrong. Each run verifies the stored results by recompiling a share (`anew`), and another share after every change.
"""

from __future__ import annotations

import argparse
import ast
import hashlib
import inspect
import json
import subprocess
import sys
import textwrap
from collections.abc import Iterator
from dataclasses import asdict, astuple, replace
from functools import cache
from importlib import import_module
from math import ceil
from pathlib import Path
from random import Random
from types import ModuleType
from typing import Any

import triton
import triton.language as tl
from triton.experimental.gluon._runtime import GluonJITFunction

from kvforge.worker.device.target import Target
from kvforge.worker.device.targets import TARGETS

from . import compilation
from .compilation import Compiled, Configuration, compile_one
from .configurations import every_configuration

VERSION = "3.6.0"  # Triton's version for the files; others compile other code, within other bounds
FOLDER = Path(__file__).parents[2] / "tests" / "data" / "compiled"
GLUON = (
    "kvforge.worker.attention.prefill_hopper",
    "kvforge.worker.attention.latent_hopper",
    "kvforge.worker.attention.gluon_names",
    "kvforge.worker.kernels.stored_hopper",
    "kvforge.worker.kernels.stored_hopper_linear",
    "kvforge.worker.kernels.stored_hopper_project",
    "kvforge.worker.kernels.stored_hopper_experts",
)
SHARE = 0.2  # share of each target's kernels that is verified in each run, one configuration each
UNTIDY = "gfx950"  # compiled last: after it, Triton 3.6 uses some of its instructions for other targets as well
READING = (compile_one, compilation._hip_usage, compilation._cuda_usage, compilation._unordered_stores)


def every(target: Target) -> list[Configuration]:
    """Return every configuration of every kernel for `target`."""
    return list(every_configuration(target))


def fingerprint(configuration: Configuration, target: Target) -> str:
    """Return a fingerprint that is equal exactly for equal inputs of the compiler and of the assembly's reader."""
    made = configuration.specialisation
    options = {name: value for name, value in made.options.items() if name != "extern_libs"}  # local paths
    parts = (
        *(triton.__version__, target.backend, target.arch, target.warp_size, target.matrix, code_of(made.kernel)),
        *(made.types, made.constants, made.attributes, options, [_plain(function) for function in READING]),
    )
    return hashlib.sha256(repr(parts).encode()).hexdigest()[:20]


def code_of(kernel: Any) -> str:
    """Return the code of a kernel and of every function of ours that it calls, with the constants that they read."""
    return _modules(kernel.fn) if isinstance(kernel, GluonJITFunction) else _functions(kernel.fn)


@cache
def _functions(function: Any) -> str:
    done: dict[str, str] = {}
    waiting = [function]
    while waiting:
        here = waiting.pop()
        name = f"{here.__module__}.{here.__qualname__}"
        if name in done:
            continue
        done[name] = _plain(here)
        for used in sorted({node.id for node in ast.walk(ast.parse(done[name])) if isinstance(node, ast.Name)}):
            found = here.__globals__.get(used)
            called = getattr(found, "fn", None)
            if called is not None and not called.__module__.startswith("triton."):
                waiting.append(called)
            elif isinstance(found, tl.constexpr):
                done[f"{here.__module__}.{used}"] = f"{used} = {found.value!r}"
            elif isinstance(found, (int, float, str)):
                done[f"{here.__module__}.{used}"] = f"{used} = {found!r}"
    return repr(sorted(done.values()))  # independent of the kernel's module


@cache
def _modules(function: Any) -> str:
    """Return the whole Gluon modules of a Gluon kernel, because part of its code is in classes."""
    found, waiting = set(), {function.__module__}
    while waiting:
        found.add(name := waiting.pop())
        used = {getattr(getattr(each, "fn", each), "__module__", None) for each in vars(import_module(name)).values()}
        waiting |= {each for each in used if each and each.startswith(GLUON)} - found
    return repr(sorted(map(module_code, found)))


def module_code(name: str) -> str:
    """Return a module's code without comments, docstrings and imports, with what its global names stand for.

    Where the module lies, and how it spells an import, does not matter. What an imported name stands for does.
    """
    module = import_module(name)
    tree = ast.parse(inspect.getsource(module))
    for node in ast.walk(tree):
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef):
            node.body = [each for each in node.body if not isinstance(each, ast.Import | ast.ImportFrom)]
    meanings = {name: _meaning(value) for name, value in vars(module).items() if not name.startswith("__")}
    return repr((_code(tree), sorted(meanings.items())))


def _meaning(value: Any) -> str:
    """Return a constant's value; of everything else the name, with its module if that is not ours."""
    value = getattr(value, "fn", value)
    if isinstance(value, tl.constexpr):
        value = value.value
    if isinstance(value, int | float | str):
        return repr(value)
    if isinstance(value, ModuleType):
        return value.__name__
    kind = value if hasattr(value, "__qualname__") else type(value)
    ours = kind.__module__.partition(".")[0] not in ("triton", "torch", "numpy")
    return kind.__qualname__ if ours else f"{kind.__module__}.{kind.__qualname__}"


@cache
def _plain(function: Any) -> str:
    """Return a function's code without comments, docstring and decorators."""
    tree = ast.parse(textwrap.dedent(inspect.getsource(function)))
    definition = tree.body[0]
    assert isinstance(definition, ast.FunctionDef)
    definition.decorator_list.clear()
    return _code(tree)


def _code(tree: ast.Module) -> str:
    """Return the code without docstrings."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef) and ast.get_docstring(node) is not None:
            del node.body[0]
    return ast.unparse(tree)


def kept(target: Target) -> dict[str, Compiled]:
    """By fingerprint."""
    path = FOLDER / f"{target.name}.txt"
    results = {}
    for line in path.read_text().splitlines() if path.exists() else ():
        key, *found, label = line.split(" ", 8)
        registers, spills, scalar, local, unordered, shared, matrix = map(int, found)
        numbers = (registers, spills, scalar, local, unordered, shared, matrix)
        results[key] = Compiled(target.name, label, *numbers, wants_matrix=matrix > 0, seconds=0.0)
    return results


def by_fingerprint(target: Target) -> dict[str, Configuration]:
    """Return every configuration by its unique fingerprint."""
    configurations = every(target)
    found = {fingerprint(configuration, target): configuration for configuration in configurations}
    assert len(found) == len(configurations), "two configurations have one fingerprint"
    return found


def results(target: Target, configurations: dict[str, Configuration]) -> Iterator[tuple[str, Compiled, bool]]:
    """Yield (fingerprint, result, whether the result was stored) of each configuration."""
    before = kept(target)
    for key, configuration in configurations.items():
        if key in before:
            relabelled = replace(before[key], label=configuration.label, wants_matrix=configuration.matrix)
            yield key, relabelled, True
        else:
            yield key, compile_one(configuration, target), False


def anew(target: Target, configurations: dict[str, Configuration]) -> Iterator[tuple[Compiled, Compiled]]:
    """Return the stored and the newly compiled result of one configuration of each selected kernel."""
    before = kept(target)
    random = Random("".join(before))
    kernels: dict[str, list[str]] = {}
    for key, configuration in configurations.items():
        if key in before:
            kernels.setdefault(configuration.specialisation.kernel.__name__, []).append(key)
    for name in random.sample(sorted(kernels), ceil(SHARE * len(kernels))):
        key = random.choice(kernels[name])
        yield before[key], compile_one(configurations[key], target)


def numbers(result: Compiled) -> tuple[int, ...]:
    """Return the stored numbers of a result."""
    return tuple(int(number) for number in astuple(result)[2:9])


def main() -> int:
    """Run the command and return its exit status."""
    parser = argparse.ArgumentParser(description="Compile every kernel in every configuration that has changed.")
    names = [name for name, target in TARGETS.items() if target.backend != "cpu"]
    parser.add_argument("--target", nargs="+", choices=TARGETS, default=names)
    parser.add_argument(
        "--print", action="store_true", help="a line of JSON for each configuration; nothing is written"
    )
    arguments = parser.parse_args()
    if arguments.print:
        for name in sorted(arguments.target, key=UNTIDY.__eq__):
            _print(TARGETS[name])
        return 0
    if len(arguments.target) == 1:
        return _renew(TARGETS[arguments.target[0]])
    command = [sys.executable, "-m", "tools.aot.results", "--target"]
    return max(subprocess.run([*command, name], check=False).returncode for name in arguments.target)


def _print(target: Target) -> None:
    configurations = by_fingerprint(target)
    for _, result, _ in results(target, configurations):
        print(json.dumps(["all", asdict(result)]))
    for before, now in anew(target, configurations):
        print(json.dumps(["anew", numbers(before), numbers(now), now.target, now.label]))


def _renew(target: Target) -> int:
    found = list(results(target, by_fingerprint(target)))
    lines = {key: f"{key} {' '.join(map(str, numbers(result)))} {result.label}\n" for key, result, _ in found}
    FOLDER.mkdir(exist_ok=True)
    (FOLDER / f"{target.name}.txt").write_text("".join(lines.values()))
    print(f"{target.name}: {len(lines)} configurations, {sum(not was_kept for *_, was_kept in found)} compiled now")
    return 0


if __name__ == "__main__":
    sys.exit(main())
