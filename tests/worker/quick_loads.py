"""Loads of tiny models without checks that have passed in this process before.

A load tests kernels that no weight of the model reaches, and tries whether rows have the same bits alone and in
company. Tests load the same model many times with equal settings: what has passed once would pass again. A failed check
is never remembered. A test that plants a fault in a kernel or in a product and then loads a model must not use this.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import cache, wraps
from importlib import import_module
from typing import Any

import pytest

from kvforge.worker.device.device import Device
from kvforge.worker.kernels import LayerOperations
from kvforge.worker.loading import determinism
from kvforge.worker.loading.model import LoadedModel

CHECKS = (
    ("attention.selftest", "_key"),  # a digest of the kernels' files, which names the record of a pass
    ("kernels.stored_selftest", "stored_test"),
    ("kernels.tiles", "tiles_test"),
    ("sampling.selftest", "copies_test"),
    ("sampling.selftest", "sampling_test"),
)


def _once(module: Any, check: Callable[..., Any]) -> Callable[..., Any]:
    passed: dict[Any, Any] = {}

    @wraps(check)
    def run(*given: Any) -> Any:
        values = [tuple(each) if isinstance(each, Sequence) else each for each in given]
        kernels = [each.runs_kernels for each in given if isinstance(each, Device)]  # some tests patch it
        key = *values, *kernels, getattr(module, "TOKENS", None)
        if key not in passed:
            passed[key] = check(*given)
        return passed[key]

    return run


_unsteady = determinism._unsteady
_steady: set[tuple[Any, ...]] = set()


def unsteady_once(model: LoadedModel, operations: LayerOperations) -> str:
    """Return what the trial of rows returns; a model that passed it in this process passes without another trial.

    The fingerprint covers the weights, and the geometry the dtypes of states.
    """
    device = model.device, model.device.runs_kernels  # some tests patch it
    products = type(operations), getattr(operations, "slab", None)
    key = device, repr(model.info), repr(model.geometry.states), products, model.fused is None
    if model.ranks is None and key in _steady:
        return ""
    problem = _unsteady(model, operations)
    if not problem:
        _steady.add(key)
    return problem


@cache
def _checks() -> list[tuple[Any, str, Callable[..., Any]]]:
    """Return the module, the name and the replacement of each check; modules without their libraries are left out."""
    return [(module, name, _once(module, getattr(module, name))) for module, name in _importable()]


def _importable() -> Iterator[tuple[Any, str]]:
    for path, name in CHECKS:
        try:
            yield import_module(f"kvforge.worker.{path}"), name
        except ImportError:  # Triton is not everywhere
            continue


def load_quickly(monkeypatch: pytest.MonkeyPatch) -> None:
    """Leave out checks that have passed before."""
    for module, name, check in _checks():
        monkeypatch.setattr(module, name, check)
    monkeypatch.setattr(determinism, "_unsteady", unsteady_once)
