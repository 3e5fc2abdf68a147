"""Imports transformers without what only training, several processes and torch's compiler need of it.

As it comes it imports torch's compiler (by decorators that tell the compiler to stay away), and with it Triton and
sympy, and torch's distributed tensors: 130 MB that stay resident, and 2 s, and nothing that is served uses them. While
it is imported, the compiler's package is a stand-in whose decorators change nothing, and torch says that it was built
without its distributed part, as there are builds of it. While a model is built without numbers, torch asks of each of
its sizes whether it is a symbol, and imports sympy for that (33 MB): so there are stand-ins for these two as well; and
where somebody has installed scipy, for that of which losses for finding objects in pictures want one function (0.5 s).
Whoever wants the compiler or symbols afterwards imports the real ones.

A build of torch for a GPU is left alone: Triton is there for our own kernels, and what its transformers wants of the
compiler cannot be taken back once it has begun to come.
"""

from __future__ import annotations

import contextlib
import importlib
import logging
import re
import sys
from collections.abc import Callable, Iterator, Mapping
from importlib.util import find_spec
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
import torch.distributed

from ..device.device import built_for_gpus

COMPILER = "torch._dynamo"
ON_CPU_ALONE = not built_for_gpus()
SYMBOLIC_SHAPES = "torch.fx.experimental.symbolic_shapes"
OPTIMISERS = "scipy.optimize"
# All that this room uses, and what it imports at its first use.
WANTED = (
    "masking_utils",
    "modeling_utils",
    "modeling_gguf_pytorch_utils",
    "models.auto.modeling_auto",
    "modeling_rope_utils",
    "quantizers.auto",
)
FUNCTION = re.compile(r"^def (\w+)\(", re.MULTILINE)
log = logging.getLogger(__name__)


def import_transformers() -> None:
    """Does so, unless it was imported before. A version that needs more gets it. Errors: ImportError."""
    if "transformers" in sys.modules:
        return
    if not ON_CPU_ALONE:
        _import_all()
        return
    try:
        with less_of_torch():
            _import_all()
    except Exception as error:  # noqa: BLE001 - whatever a version does with what it imports
        log.info("transformers needs all of torch: %s: %s", type(error).__name__, error)
        for name in [name for name in sys.modules if name.partition(".")[0] == "transformers"]:
            del sys.modules[name]
        _import_all()


def _import_all() -> None:
    for name in WANTED:
        importlib.import_module(f"transformers.{name}")


@contextlib.contextmanager
def less_of_torch() -> Iterator[None]:
    """Inside, torch's compiler and its symbols are not imported by who only wants to be left alone by them."""
    if COMPILER in sys.modules or not ON_CPU_ALONE:
        yield
        return
    compiler = StandIn(COMPILER, dict.fromkeys(("allow_in_graph", "assume_constant_result", "disable"), _unchanged))
    compiler.__path__ = [str(Path(torch.__file__).parent / "_dynamo")]  # its parts can be imported by themselves
    source = Path(torch.__file__).parent.joinpath("fx", "experimental", "symbolic_shapes.py").read_text("utf-8")
    questions = {name: _question(name) for name in FUNCTION.findall(source)}
    others = [StandIn(SYMBOLIC_SHAPES, questions), StandIn("sympy", {"Basic": _NoSymbol})]
    if find_spec("scipy") is not None:
        others.append(StandIn(OPTIMISERS, {"linear_sum_assignment": _assignment}))
    stand_ins = [compiler, *(each for each in others if each.__name__ not in sys.modules)]
    sys.modules.update({each.__name__: each for each in stand_ins})
    kept, torch.distributed.is_available = torch.distributed.is_available, lambda: False
    try:
        yield
    finally:
        torch.distributed.is_available = kept
        for each in stand_ins:
            each.step_aside()


class StandIn(ModuleType):
    """In the place of a module that is not imported yet. known: what it has; whoever wants more gets the real one's."""

    def __init__(self, name: str, known: Mapping[str, Any]) -> None:
        super().__init__(name)
        self._known = known

    def step_aside(self) -> None:
        """From now on the next to import it imports the real one."""
        if sys.modules.get(self.__name__) is self:
            del sys.modules[self.__name__]

    def __getattr__(self, name: str) -> Any:
        if name in self._known and sys.modules.get(self.__name__) is self:
            return self._known[name]
        # Whoever imports a part of sympy, or a name from it, asks for its path first.
        if name.startswith("__") and (name, self.__name__) != ("__path__", "sympy"):
            raise AttributeError(name)
        return getattr(_real(self.__name__), name)


def _real(name: str) -> ModuleType:
    """The module, imported if it was not."""
    here = sys.modules.get(name)
    if isinstance(here, StandIn):
        here.step_aside()
    return importlib.import_module(name)


def _assignment(*given: Any, **keywords: Any) -> Any:
    """scipy's function, from when it is called on."""
    return _real(OPTIMISERS).linear_sum_assignment(*given, **keywords)


def _unchanged(function: Any = None, *_: Any, **__: Any) -> Any:
    """A decorator, with arguments or without."""
    return function if function is not None else _unchanged


class _NoSymbol:
    """The class of sympy's symbols while there are none."""


def _question(name: str) -> Callable[..., Any]:
    """A function of torch's symbolic shapes, which is imported wherever a shape is looked at. Asked about symbols, or
    more than `ANSWERS` know, it is the real one."""
    answer = ANSWERS.get(name)

    def function(*asked: Any, **keywords: Any) -> Any:
        if answer is not None and _is_plain(asked) and not keywords:
            return answer(asked)
        return getattr(_real(SYMBOLIC_SHAPES), name)(*asked, **keywords)

    return function


def _is_plain(value: Any) -> bool:
    return all(map(_is_plain, value)) if isinstance(value, (tuple, list)) else isinstance(value, (bool, int, float))


# What functions of torch's symbolic shapes say of plain values.
ANSWERS: dict[str, Callable[[tuple[Any, ...]], bool]] = {
    **dict.fromkeys(("expect_true", "guard_or_false", "guard_or_true", "statically_known_true", "sym_and"), all),
    "sym_or": any,
    "sym_eq": lambda pair: bool(pair[0] == pair[1]),
    "is_nested_int": lambda _: False,
}


import_transformers()
