"""Imports transformers without the parts that only training, several processes and torch's compiler need.

A plain import pulls in torch's compiler (through decorators that exclude functions from compilation), Triton, sympy and
torch's distributed tensors: 130 MB of resident memory and 2 s for code that serving never runs. During this import, a
stand-in with inert decorators replaces the compiler package, and torch reports that it was built without its
distributed part, as some builds are. torchvision, which transformers imports where it is installed, is hidden: it needs
the compiler, and no text needs it. boto3, which accelerate imports for a service of Amazon, is hidden too. While a
model is built on the meta device, torch asks for each size whether it is a symbol and imports sympy for that (33 MB),
so both have stand-ins too. If scipy or scikit-learn is installed, a stand-in also replaces the package of one function
that losses for object detection (0.5 s) or assisted generation (2 s) import. Later imports of the compiler, of symbols
or of these get the real modules, and so does code that imports a part of the compiler meanwhile.

With GPU builds of torch only versions of transformers that were tried are imported this way. If another one needed more
of the compiler, it could not be imported anew: the parts of torch that it had reached cannot be unloaded halfway.
"""

from __future__ import annotations

import contextlib
import importlib
import logging
import re
import sys
from collections.abc import Callable, Iterator, Mapping
from importlib import metadata
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from importlib.util import find_spec
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
import torch.distributed

from kvforge.text.transformers_index import quick_import
from kvforge.worker.device.device import built_for_gpus

COMPILER = "torch._dynamo"
TRIED = ((5, 17), (5, 25))  # versions of transformers, the second one excluded, for GPU builds
SYMBOLIC_SHAPES = "torch.fx.experimental.symbolic_shapes"
OPTIMISERS, METRICS = "scipy.optimize", "sklearn.metrics"
HIDDEN = "torchvision", "boto3"
ALONE = f"{COMPILER}._trace_wrapped_higher_order_op"  # a part of the compiler that imports no other, wanted for masks
# Modules of transformers that this package uses directly or on first use.
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


def _leaves_out() -> bool:
    """Return whether transformers is imported with less of torch."""
    if not built_for_gpus():
        return True
    try:
        found = tuple(int(part) for part in metadata.version("transformers").split(".")[:2])
    except (metadata.PackageNotFoundError, ValueError):
        return False
    return TRIED[0] <= found < TRIED[1]


LEAVES_OUT = _leaves_out()


def import_transformers() -> None:
    """Import transformers, unless it is already imported. A version that needs more of torch gets the whole.

    Raises:
        ImportError: transformers is missing or broken.
    """
    if "transformers" in sys.modules:
        return
    if not LEAVES_OUT:
        _import_all()
        return
    try:
        with less_of_torch():
            _import_all()
    except Exception as error:  # noqa: BLE001 - versions of transformers differ
        log.info("transformers needs all of torch: %s: %s", type(error).__name__, error)
        for name in [name for name in sys.modules if name.partition(".")[0] == "transformers"]:
            del sys.modules[name]
        _import_all()


def _import_all() -> None:
    with quick_import():
        for name in WANTED:
            importlib.import_module(f"transformers.{name}")


@contextlib.contextmanager
def less_of_torch() -> Iterator[None]:
    """Hide torch's compiler and symbols from code that imports them only to be excluded from compilation."""
    if COMPILER in sys.modules or not LEAVES_OUT:
        yield
        return
    compiler = StandIn(COMPILER, dict.fromkeys(("allow_in_graph", "assume_constant_result", "disable"), _unchanged))
    compiler.__path__ = [str(Path(torch.__file__).parent / "_dynamo")]  # its submodules stay importable
    source = Path(torch.__file__).parent.joinpath("fx", "experimental", "symbolic_shapes.py").read_text("utf-8")
    questions = {name: _question(name) for name in FUNCTION.findall(source)}
    others = [StandIn(SYMBOLIC_SHAPES, questions), StandIn("sympy", {"Basic": _NoSymbol})]
    if find_spec("scipy") is not None:
        others.append(StandIn(OPTIMISERS, {"linear_sum_assignment": _assignment}))
    if find_spec("sklearn") is not None:
        others.append(StandIn(METRICS, {"roc_curve": _roc_curve}))
    stand_ins = [compiler, *(each for each in others if each.__name__ not in sys.modules)]
    sys.modules.update({each.__name__: each for each in stand_ins})
    hidden = [name for name in HIDDEN if name not in sys.modules]
    # import's own sign of a module that is not there
    sys.modules.update(dict.fromkeys(hidden))  # type: ignore[arg-type]
    parts = CompilerParts()
    sys.meta_path.insert(0, parts)
    kept, torch.distributed.is_available = torch.distributed.is_available, lambda: False
    try:
        yield
    finally:
        torch.distributed.is_available = kept
        sys.meta_path.remove(parts)
        for name in hidden:
            del sys.modules[name]
        for each in stand_ins:
            each.step_aside()


class StandIn(ModuleType):
    """Stands in for a module that is not imported yet. known: its attributes; any other comes from the real module."""

    def __init__(self, name: str, known: Mapping[str, Any]) -> None:
        super().__init__(name)
        self._known = known

    def step_aside(self) -> None:
        """Let the next import load the real module."""
        if sys.modules.get(self.__name__) is self:
            del sys.modules[self.__name__]

    def __getattr__(self, name: str) -> Any:
        if name in self._known and sys.modules.get(self.__name__) is self:
            return self._known[name]
        # An import of a part of sympy, or of a name from it, asks for its path first.
        if name.startswith("__") and (name, self.__name__) != ("__path__", "sympy"):
            raise AttributeError(name)
        return getattr(_real(self.__name__), name)


class CompilerParts(MetaPathFinder):
    """Makes an import of any other part of the compiler than `ALONE` import the whole first.

    A part whose package is the stand-in imports other parts, and one of these the package, which then finds the first
    part half made: with torchvision, which imports `torch._dynamo.utils`, workers did not start.
    """

    def find_spec(self, name: str, *_: Any) -> ModuleSpec | None:
        """Return how to load a module: a part that came with the whole as it is, anything else not from here."""
        if not name.startswith(f"{COMPILER}.") or name == ALONE or not isinstance(sys.modules[COMPILER], StandIn):
            return None
        _real(COMPILER)
        return ModuleSpec(name, _Imported(sys.modules[name])) if name in sys.modules else None


class _Imported(Loader):
    """Loads a module that is already imported: import itself looked for it before the whole brought it."""

    def __init__(self, module: ModuleType) -> None:
        self._module, self._spec = module, module.__spec__

    def create_module(self, _: ModuleSpec) -> ModuleType:
        return self._module

    def exec_module(self, module: ModuleType) -> None:
        module.__spec__ = self._spec


def _real(name: str) -> ModuleType:
    """Return the real module, importing it if needed."""
    here = sys.modules.get(name)
    if isinstance(here, StandIn):
        here.step_aside()
    return importlib.import_module(name)


def _assignment(*given: Any, **keywords: Any) -> Any:
    """Call scipy's function, importing it on first use."""
    return _real(OPTIMISERS).linear_sum_assignment(*given, **keywords)


def _roc_curve(*given: Any, **keywords: Any) -> Any:
    """Call scikit-learn's function, importing it on first use."""
    return _real(METRICS).roc_curve(*given, **keywords)


def _unchanged(function: Any = None, *_: Any, **__: Any) -> Any:
    """Return the function unchanged: a decorator with or without arguments."""
    return function if function is not None else _unchanged


class _NoSymbol:
    """Stands in for the class of sympy's symbols while there are none."""


def _question(name: str) -> Callable[..., Any]:
    """Return a stand-in for a function of torch's symbolic shapes, which torch imports wherever it inspects a shape.

    For symbols, or questions beyond `ANSWERS`, it calls the real function.
    """
    answer = ANSWERS.get(name)

    def function(*asked: Any, **keywords: Any) -> Any:
        if answer is not None and _is_plain(asked) and not keywords:
            return answer(asked)
        return getattr(_real(SYMBOLIC_SHAPES), name)(*asked, **keywords)

    return function


def _is_plain(value: Any) -> bool:
    return all(map(_is_plain, value)) if isinstance(value, (tuple, list)) else isinstance(value, (bool, int, float))


# Results of functions of torch's symbolic shapes for plain values.
ANSWERS: dict[str, Callable[[tuple[Any, ...]], bool]] = {
    **dict.fromkeys(("expect_true", "guard_or_false", "guard_or_true", "statically_known_true", "sym_and"), all),
    "sym_or": any,
    "sym_eq": lambda pair: bool(pair[0] == pair[1]),
    "is_nested_int": lambda _: False,
}


import_transformers()
