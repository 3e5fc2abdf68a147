"""A kernel's parameters are declared by its own function, and an operation's by its interface: each of them once."""

from __future__ import annotations

import ast
import inspect
import re
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cache
from itertools import chain
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("triton")

from triton.runtime.interpreter import InterpretedFunction

from kvforge import worker
from kvforge.worker.attention import PagedAttention, ReferenceAttention
from kvforge.worker.attention.cpu_attention import CpuAttention
from kvforge.worker.attention.triton_attention import TritonAttention
from kvforge.worker.kernels import LayerOperations, PlainOperations
from kvforge.worker.kernels.cpu_operations import CpuOperations
from kvforge.worker.kernels.fused import FusedOperations
from kvforge.worker.kernels.packed import PackedOperations
from kvforge.worker.kernels.registry import KERNELS, Kernel
from kvforge.worker.kernels.wide import WideOperations
from tools.aot.compilation import ADDRESSING
from tools.aot.configurations import DECLARED

PACKAGE = Path(worker.__file__).parent
REPOSITORY = Path(__file__).parents[3]
ELSEWHERE = ("tools", "tests", "benchmarks")
OPERATIONS = (PlainOperations, WideOperations, PackedOperations, CpuOperations, FusedOperations)
ATTENTION = (ReferenceAttention, TritonAttention, CpuAttention)
QUOTED = re.compile(r"""["'](\w+)["']""")
LAUNCHED = re.compile(r"\b(\w+)\s*\[")
FEW = 3  # so many parameters may be passed on
each_kernel = pytest.mark.parametrize(
    "kernel", [pytest.param(each, id=f"{each.module}.{each.name}") for each in KERNELS]
)


def nodes_of(path: Path) -> tuple[ast.AST, ...]:
    return tuple(ast.walk(ast.parse(path.read_text())))


def sources() -> list[Path]:
    """Return every file in which a kernel might be launched or declared."""
    folders = (PACKAGE, *(REPOSITORY / name for name in ELSEWHERE))
    assert all(folder.is_dir() for folder in folders)
    return sorted(chain.from_iterable(folder.rglob("*.py") for folder in folders))


@dataclass
class Scan:
    """Launches: file, name and call of each `name[grid](...)`. Literals: file, line and strings of lists and tables."""

    launches: list[tuple[Path, str, ast.Call]] = field(default_factory=list)
    literals: list[tuple[Path, int, frozenset[str]]] = field(default_factory=list)


def concerns_kernels(text: str) -> bool:
    """Return whether a source may hold a launch, or a literal with more than half of a kernel's parameters.

    A text has the words of its code. Parsing all sources takes seconds.
    """
    if not kernel_names().isdisjoint(LAUNCHED.findall(text)):
        return True
    quoted = parameter_names().intersection(QUOTED.findall(text))
    return bool(quoted) and any(2 * len(quoted & names) > len(names) for names in parameters_by_kernel())


@cache
def kernel_names() -> frozenset[str]:
    return frozenset(kernel.name for kernel in KERNELS)


@cache
def parameters_by_kernel() -> frozenset[frozenset[str]]:
    """Return the names of each kernel's parameters, and of its constants, which may be listed alone."""
    all_names = (frozenset(each.name for each in parameters(kernel)) for kernel in KERNELS)
    return frozenset((*all_names, *(frozenset(constants(kernel)) for kernel in KERNELS))) - {frozenset()}


@cache
def parameter_names() -> frozenset[str]:
    return frozenset().union(*parameters_by_kernel())


@cache
def scan() -> Scan:
    """Scan all sources. Literals of up to FEW strings and those in decorators are left out."""
    found = Scan()
    for path in sources():
        if not concerns_kernels(path.read_text()):
            continue
        nodes = nodes_of(path)
        decorators = {
            id(each)
            for node in nodes
            if isinstance(node, ast.FunctionDef)
            for decorator in node.decorator_list
            for each in ast.walk(decorator)
        }
        for node in nodes:
            match node:
                case ast.Call(func=ast.Subscript(value=ast.Name(id=name) | ast.Attribute(attr=name))):
                    found.launches.append((path, name, node))
                case ast.List(elts=parts) | ast.Tuple(elts=parts) | ast.Set(elts=parts) | ast.Dict(keys=parts):
                    values = [part.value for part in parts if isinstance(part, ast.Constant)]
                    words = frozenset(each for each in values if isinstance(each, str))
                    if len(words) > FEW and id(node) not in decorators:
                        found.literals.append((path, node.lineno, words))
    return found


def parameters(kernel: Kernel) -> list[inspect.Parameter]:
    return list(inspect.signature(kernel.function.fn).parameters.values())


def constants(kernel: Kernel) -> set[str]:
    return {each.name for each in parameters(kernel) if "constexpr" in str(each.annotation)}


def launches_of(kernel: Kernel) -> list[tuple[Path, ast.Call]]:
    return [(path, call) for path, name, call in scan().launches if name == kernel.name and is_the_kernel(kernel, path)]


def is_the_kernel(kernel: Kernel, path: Path) -> bool:
    """Whether `kernel.name` means this kernel in a file. Two modules have a `copy_kernel`."""
    twins = [each for each in KERNELS if each.name == kernel.name]
    return len(twins) == 1 or path.stem == kernel.module.rpartition(".")[2] or PACKAGE not in path.parents


def spelt(node: ast.expr) -> str:
    """Return the name of an argument: of a variable, an attribute, or what is asked of them; "" for anything else."""
    match node:
        case ast.Name(id=name) | ast.Attribute(attr=name):
            return name
        case ast.IfExp(orelse=otherwise):
            return spelt(otherwise)
    return ""


@each_kernel
def test_a_kernel_has_one_launch(kernel: Kernel) -> None:
    """Tests, tools and benchmarks call the launching function, and thus pass what a worker passes."""
    ((path, _),) = launches_of(kernel)
    assert path == PACKAGE.joinpath(*kernel.module.split(".")[2:]).with_suffix(".py")


@each_kernel
def test_a_launch_passes_numbers_in_order_and_constants_by_name(kernel: Kernel) -> None:
    """A number that has the name of a parameter has its place."""
    ((_, call),) = launches_of(kernel)
    names, fixed = [each.name for each in parameters(kernel)], constants(kernel)
    by_name = [each.arg for each in call.keywords if each.arg is not None]
    assert fixed >= set(by_name) - {"num_warps", "num_stages"}, "an argument that is no constant"
    assert [each for each in names if each in fixed] == names[len(names) - len(fixed) :], "constants come last"
    moving = names[: len(names) - len(fixed)]
    assert len(call.args) <= len(moving)
    plain = list(call.args)
    # Behind a `*argument` of any length, places are counted from the end.
    first = next((at for at, each in enumerate(plain) if isinstance(each, ast.Starred)), len(plain))
    last = next((at for at, each in enumerate(reversed(plain)) if isinstance(each, ast.Starred)), 0)
    placed = [*enumerate(plain[:first]), *((at - last, each) for at, each in enumerate(plain[len(plain) - last :]))]
    for at, each in placed:
        name = spelt(each)
        assert name not in moving or name == moving[at], f"{name} is passed as {moving[at]}"


@each_kernel
def test_the_exceptions_of_specialisation_are_parameters(kernel: Kernel) -> None:
    """Triton ignores a name that the kernel does not have, and compiles the kernel for more cases."""
    function, names = kernel.function, {each.name for each in parameters(kernel)}
    options = function.kwargs if isinstance(function, InterpretedFunction) else vars(function)
    listed = [
        name for option in ("do_not_specialize", "do_not_specialize_on_alignment") for name in options.get(option) or ()
    ]
    assert set(listed) <= names - constants(kernel)
    assert len(listed) == len(set(listed))


@each_kernel
def test_nothing_else_lists_the_parameters(kernel: Kernel) -> None:
    """A list or a table of most of a kernel's names is a second declaration.

    The decorator may name what is not specialised, and a launch may take many constants from one function.
    """
    names, fixed = {each.name for each in parameters(kernel)}, constants(kernel)
    ((_, call),) = launches_of(kernel)
    spread = any(each.arg is None and isinstance(each.value, ast.Name) for each in call.keywords)
    repeats = [
        (path, line, found)
        for path, line, found in scan().literals
        if 2 * len(found & names) > len(names) or 2 * len(found & fixed) > max(len(fixed), 2 * FEW)
    ]
    tables = [found for path, _, found in repeats if PACKAGE in path.parents and found == fixed]
    assert len(repeats) == len(tables) <= spread, repeats


def test_every_kernel_has_configurations_and_no_other() -> None:
    listed = [f"{kernel.module.removeprefix('kvforge.worker.')}.{kernel.name}" for kernel in KERNELS]
    assert list(map(".".join, DECLARED)) == listed


def test_constants_of_addressing_are_constants() -> None:
    """A renamed one would be a factor of all configurations."""
    assert set(ADDRESSING) <= set().union(*map(constants, KERNELS))


# ---------------------------------------------------------------------------------------------------------- operations


def operations_of(interface: type) -> dict[str, Callable[..., Any]]:
    return {name: each for name, each in vars(interface).items() if inspect.isfunction(each) and name[0] != "_"}


def arguments_of(function: Callable[..., Any], bound: bool) -> list[tuple[str, Any]]:
    """Return (name, default) of each argument of a call."""
    found = list(inspect.signature(function).parameters.values())[0 if bound else 1 :]
    if any(each.kind is inspect.Parameter.VAR_POSITIONAL for each in found):
        return []  # passes all of them on, or uses none
    return [(each.name, each.default) for each in found]


@pytest.mark.parametrize(
    ("interface", "implementation"),
    [*((LayerOperations, each) for each in OPERATIONS), *((PagedAttention, each) for each in ATTENTION)],
)
def test_an_operation_has_the_arguments_of_its_interface(interface: type, implementation: type) -> None:
    """mypy compares types, but not names of arguments."""
    for name, declared in operations_of(interface).items():
        static = isinstance(inspect.getattr_static(implementation, name), staticmethod)
        found = arguments_of(getattr(implementation, name), static)
        assert not found or found == arguments_of(declared, bound=False), name


@pytest.mark.parametrize("room", ["attention", "cpu", "kernels", "sampling"])
def test_no_function_passes_its_arguments_on(room: str) -> None:
    """A method that calls a function with its own arguments repeats them; it can be that function."""
    for path in PACKAGE.joinpath(room).glob("*.py"):
        for node in nodes_of(path):
            if isinstance(node, ast.FunctionDef):
                passed = passed_on(node)
                assert len(passed) <= FEW, f"{path.name}: {node.name} passes {', '.join(passed)} on"


def passed_on(function: ast.FunctionDef) -> list[str]:
    """Return the arguments of a function that does nothing but call another one with all of them, in their order."""
    body = function.body[1:] if ast.get_docstring(function) is not None else function.body
    match body:
        case [ast.Return(value=ast.Call() as call) | ast.Expr(value=ast.Call() as call)] if not is_super(call):
            own = [each.arg for each in function.args.args if each.arg != "self"]
            rest = [each for each in call.args if not (isinstance(each, ast.Name) and each.id in own)]
            passed = [each.id for each in call.args if isinstance(each, ast.Name) and each.id in own]
            if passed == own and all(is_own(each) for each in rest) and not call.keywords:
                return own
    return []


def is_super(call: ast.Call) -> bool:
    return any(isinstance(node, ast.Name) and node.id == "super" for node in ast.walk(call.func))


def is_own(node: ast.expr) -> bool:
    """Return whether an expression is `self` or something of it."""
    while isinstance(node, ast.Attribute):
        node = node.value
    return isinstance(node, ast.Name) and node.id == "self"


def test_a_method_that_passes_its_arguments_on_is_found() -> None:
    def passing(text: str) -> list[str]:
        (function,) = ast.parse(text).body
        assert isinstance(function, ast.FunctionDef)
        return passed_on(function)

    assert passing('def f(self, x, y):\n    """Implement it."""\n    return g(x, y, self.overlap)') == ["x", "y"]
    assert passing("def f(self, x, y):\n    return g(self, y, x)") == []
    assert passing("def f(self, x, y):\n    return super().f(x, y)") == []
    assert passing("def f(self, x, y):\n    return g(x, y, 2 * self.n)") == []
    assert passing("def f(self, x, y):\n    return g(x, y=y)") == []
