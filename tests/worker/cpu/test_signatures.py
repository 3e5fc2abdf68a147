"""A kernel reads the arguments that it declares, from the addresses where they are packed."""

from __future__ import annotations

import ast
import inspect
import textwrap
from collections.abc import Iterator
from importlib import import_module
from typing import Any

import pytest

pytest.importorskip("numba")

from kvforge.worker.cpu.kernel import CpuKernel
from kvforge.worker.kernels.registry import CPU_KERNELS, CpuKernelEntry

COUNTERS = 2  # before the arguments: tickets taken, threads that arrived


def pairs(node: ast.Assign) -> Iterator[tuple[ast.expr, ast.expr]]:
    """Yield (target, value) of an assignment, also of `a, b = x, y`."""
    (target,) = node.targets
    if isinstance(target, ast.Tuple) and isinstance(node.value, ast.Tuple):
        yield from zip(target.elts, node.value.elts, strict=True)
    else:
        yield target, node.value


def names_of(target: ast.expr) -> list[str]:
    return [
        each.id for each in (target.elts if isinstance(target, ast.Tuple) else [target]) if isinstance(each, ast.Name)
    ]


def arguments_read(kernel: CpuKernel) -> dict[int, tuple[str, str]]:
    """Return (name, "q" or "d") of each argument that the code reads, by its place behind the counters."""
    found: dict[int, tuple[str, str]] = {}
    whole: set[str] = set()  # variables that hold all integers in order
    tree = ast.parse(textwrap.dedent(inspect.getsource(kernel.function)))
    for node in ast.walk(tree):
        for target, value in pairs(node) if isinstance(node, ast.Assign) else ():
            match value:
                case ast.Call(func=ast.Name(id=reader), args=[ast.Name(id="arguments")]) if reader.startswith("read_"):
                    if isinstance(target, ast.Name):
                        whole.add(target.id)
                    else:
                        read = names_of(target)[COUNTERS:]
                        found |= {place: (name, "q") for place, name in enumerate(read)}
                case ast.Call(
                    func=ast.Name(id=reader),
                    args=[ast.BinOp(left=ast.Name(id="arguments"), right=ast.Constant(value=int(offset)))],
                ) if isinstance(target, ast.Tuple) and reader.startswith("read_"):
                    found |= {
                        offset // 8 - COUNTERS + place: (name, "q") for place, name in enumerate(names_of(target))
                    }
                case ast.Subscript(value=ast.Name(id=name), slice=ast.Slice(lower=ast.Constant(value=int(first)))) if (
                    name in whole
                ):
                    found |= {first - COUNTERS + place: (name, "q") for place, name in enumerate(names_of(target))}
                case _:
                    found |= {place: (names_of(target)[0], kind) for place, kind in single_reads(value)}
    return found


def single_reads(value: ast.expr) -> Iterator[tuple[int, str]]:
    """Yield (place, kind) of each `read_integer(arguments + bytes)` and `read_double(arguments + bytes)`."""
    for node in ast.walk(value):
        match node:
            case ast.Call(
                func=ast.Name(id="read_integer" | "read_double" as reader),
                args=[ast.BinOp(left=ast.Name(id="arguments"), right=ast.Constant(value=int(offset)))],
            ):
                yield offset // 8 - COUNTERS, "d" if reader == "read_double" else "q"


@pytest.mark.parametrize("entry", [pytest.param(each, id=f"{each.module}.{each.name}") for each in CPU_KERNELS])
def test_a_kernel_reads_what_it_declares(entry: CpuKernelEntry) -> None:
    kernel: Any = getattr(import_module(entry.module), entry.name)
    kinds = kernel.layout.format.removeprefix("=" + "q" * COUNTERS)
    assert arguments_read(kernel) == dict(enumerate(zip(kernel.names, kinds, strict=True)))
