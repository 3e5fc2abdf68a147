"""Counts what a step launches: kernels of Triton, and operations of torch that are more than a view."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from triton.runtime.interpreter import GridExecutor

# Allocations, and what fills them with NaN in tests.
NOT_LAUNCHED = ("aten.empty", "aten.new_empty", "aten.fill_", "aten.detach")


class _Watching(TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()
        self.found: list[str] = []
        self.is_inside_kernel = False

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        made = func(*args, **(kwargs or {}))
        is_launched = func._schema.is_mutable or not _is_view(made, args)
        if is_launched and not self.is_inside_kernel and not str(func).startswith(NOT_LAUNCHED):
            self.found.append(str(func).removeprefix("aten.").rpartition(".")[0])
        return made


def _is_view(made: Any, given: Any) -> bool:
    """Return whether results lie in the memory of an argument."""
    results = made if isinstance(made, list | tuple) else [made]
    memories = [each.untyped_storage().data_ptr() for each in given if isinstance(each, torch.Tensor)]
    return all(each.untyped_storage().data_ptr() in memories for each in results if isinstance(each, torch.Tensor))


def launches(run: Callable[[], object], monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Return the names of what `run` launches under Triton's interpreter, in order."""
    watching, launch = _Watching(), GridExecutor.__call__

    def counted(self: Any, *given: Any, **named: Any) -> Any:
        watching.found.append(self.fn.__name__)
        watching.is_inside_kernel = True
        try:
            return launch(self, *given, **named)
        finally:
            watching.is_inside_kernel = False

    with monkeypatch.context() as patched, watching:
        patched.setattr(GridExecutor, "__call__", counted)
        run()
    return watching.found
