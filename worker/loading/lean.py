"""Imports transformers without what only training, several processes and torch's compiler need of it.

As it comes it imports torch's compiler (by decorators that tell the compiler to stay away), and with it Triton and
sympy, and torch's distributed tensors: 130 MB that stay resident, and 2 s, and nothing that is served uses them. While
it is imported, the compiler's package is a stand-in whose decorators change nothing, and torch says that it was built
without its distributed part, as there are builds of it. Whoever wants the compiler afterwards imports the real one.

A build of torch for a GPU is left alone: Triton is there for our own kernels, and what its transformers wants of the
compiler cannot be taken back once it has begun to come.
"""

from __future__ import annotations

import contextlib
import importlib
import logging
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
import torch.distributed

from ..device.device import built_for_gpus

COMPILER = "torch._dynamo"
ON_CPU_ALONE = not built_for_gpus()
DECORATORS = frozenset({"allow_in_graph", "assume_constant_result", "disable"})
# All that this room uses, and what it imports at its first use.
WANTED = (
    "masking_utils",
    "modeling_utils",
    "modeling_gguf_pytorch_utils",
    "models.auto.modeling_auto",
    "modeling_rope_utils",
    "quantizers.auto",
)
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
    """Inside, torch's compiler is not imported by who only wants to be left alone by it."""
    if COMPILER in sys.modules or not ON_CPU_ALONE:
        yield
        return
    stand_in = ModuleType(COMPILER)
    stand_in.__path__ = [str(Path(torch.__file__).parent / "_dynamo")]  # its parts can be imported by themselves
    stand_in.__getattr__ = _of_compiler  # type: ignore[method-assign]
    sys.modules[COMPILER] = stand_in
    kept, torch.distributed.is_available = torch.distributed.is_available, lambda: False
    try:
        yield
    finally:
        torch.distributed.is_available = kept
        if sys.modules.get(COMPILER) is stand_in:
            del sys.modules[COMPILER]


def _of_compiler(name: str) -> Any:
    """What the package has of this name. Whoever wants more than a decorator gets it from the real one."""
    if name in DECORATORS:
        return _unchanged
    if name.startswith("__"):
        raise AttributeError(name)
    del sys.modules[COMPILER]
    return getattr(importlib.import_module(COMPILER), name)


def _unchanged(function: Any = None, *_: Any, **__: Any) -> Any:
    """A decorator, with arguments or without."""
    return function if function is not None else _unchanged


import_transformers()
