"""The compilation that Triton performs for a launch, determined without the device.

Triton compiles a kernel for every *specialisation* of its arguments: which pointers are multiples of 16 bytes, and on
AMD's GPUs which ones point to storages below 2 GiB (its compiler addresses those differently); which integers are 1,
and so constants, and which are multiples of 16. `recorded` runs the launching functions on tensors of the device
"meta", and records the result of Triton's own launcher for each launch.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Hashable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache
from typing import Any
from unittest.mock import patch

from triton.backends.compiler import GPUTarget
from triton.compiler import make_backend
from triton.runtime.interpreter import InterpretedFunction
from triton.runtime.jit import JITFunction, create_function_from_signature

from kvforge.worker.device.target import Target


@dataclass(frozen=True)
class Specialisation:
    """All inputs of a compilation.

    Attributes:
        kernel: The kernel.
        types: Triton's type of each argument, "constexpr" for compile-time constants.
        attributes: Attributes of arguments, by index.
        constants: Values of constant arguments, by index.
        options: num_warps, num_stages and other options of the launch.
    """

    kernel: Any
    types: dict[str, str]
    attributes: dict[tuple[int, ...], list[list[Any]]]
    constants: dict[tuple[int, ...], Any]
    options: dict[str, Any]

    def __str__(self) -> str:
        """Return the kernel and the known properties of its arguments."""
        names = self.kernel.arg_names
        known = {names[place[0]]: [word for word, _ in found] for place, found in self.attributes.items() if found}
        constants = {names[place[0]]: value for place, value in self.constants.items()}
        return f"{self.kernel.__name__}: {self.types}, {known}, {constants}"

    def key(self, without: tuple[str, ...] = ()) -> Hashable:
        """Return a key that is equal for equal compilations. without: names of constants to ignore."""
        names = self.kernel.arg_names
        constants = [(place, value) for place, value in self.constants.items() if names[place[0]] not in without]
        attributes = [(place, found) for place, found in self.attributes.items() if found]
        # A descriptor's type includes the shape of its box, which follows from constants.
        types = map(_without_box, self.types.values()) if without else self.types.values()
        return self.kernel.fn, *types, str((constants, attributes, self.options))


@cache
def _without_box(argument_type: str) -> str:
    return re.sub(r"^(tensordesc<\w+)\[.*", r"\1", argument_type)


def gpu_target(target: Target) -> GPUTarget:
    """Return Triton's description of a target."""
    return GPUTarget(target.backend, target.arch, target.warp_size)


@contextmanager
def recorded(target: Target) -> Iterator[list[Specialisation]]:
    """Record the distinct compilations of kernels that are launched inside, instead of running them.

    Yields:
        The list that receives the compilations for `target`.
    """
    made: set[Hashable] = set()
    listed: list[Specialisation] = []
    wanted = gpu_target(target)
    backend = _backend(wanted)

    def run(kernel: Any, *arguments: Any, grid: Any, warmup: bool, **options: Any) -> None:
        """Replaces JITFunction.run."""
        if isinstance(kernel, InterpretedFunction):
            kernel = _compiled(kernel)
        options["debug"], options["instrumentation_mode"] = False, ""
        bound, found, rest = _binder(kernel, wanted)(*arguments, **options)
        key = wanted, kernel.fn, str(found), str(options)
        if key not in _specialisations:
            parsed, types, constants, attributes = kernel._pack_args(backend, options, bound, found, rest)
            _specialisations[key] = Specialisation(kernel, types, attributes, constants, dict(parsed.__dict__))
        if key not in made:
            made.add(key)
            listed.append(_specialisations[key])

    with patch.object(JITFunction, "run", run), patch.object(InterpretedFunction, "run", run):
        yield listed


@cache
def _backend(target: GPUTarget) -> Any:
    return make_backend(target)


_functions: dict[Any, JITFunction[Any]] = {}
_specialisations: dict[Hashable, Specialisation] = {}  # two thirds of the recorded launches repeat one
_binders: dict[tuple[Any, GPUTarget], Callable[..., Any]] = {}


def _compiled(kernel: InterpretedFunction[Any]) -> JITFunction[Any]:
    """Return the kernel in its compiled form, not Triton's interpreted one."""
    if kernel.fn not in _functions:
        _functions[kernel.fn] = JITFunction(kernel.fn, **kernel.kwargs)
    return _functions[kernel.fn]


def _binder(kernel: JITFunction[Any], target: GPUTarget) -> Callable[..., Any]:
    """Return the code that Triton's launcher generates for the kernel's signature, which is slow to generate."""
    key = kernel.fn, target
    if key not in _binders:
        _binders[key] = create_function_from_signature(kernel.signature, kernel.params, _backend(target))
    return _binders[key]
