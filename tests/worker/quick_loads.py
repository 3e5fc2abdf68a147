"""Loads of tiny models without checks that have passed in this process before.

A load tests kernels that no weight of the model reaches, and tries whether rows have the same bits alone and in
company. Before, it loads the names and shapes of the files without weights. Tests load the same model many times with
equal settings: what has passed once would pass again. A failed check is never remembered. A test that plants a fault in
a kernel or in a product, or changes the device's memory, and then loads a model must not use this.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import cache, wraps
from importlib import import_module
from typing import Any

import pytest
import torch
from msgspec import structs

from kvforge.models.safetensors_header import StoredTensor
from kvforge.worker.device.device import Device
from kvforge.worker.kernels import LayerOperations, steady
from kvforge.worker.loading import determinism, trial, verification
from kvforge.worker.loading.model import LoadedModel
from tests.amount import thinned
from tools.cluster.passed_checks import SINGLES, rehearsed_key

CHECKS = (
    ("attention.selftest", "_key"),  # a digest of the kernels' files, which names the record of a pass
    ("kernels.stored_selftest", "stored_test"),
    ("kernels.tiles", "tiles_test"),
    ("kernels.amx", "amx_test"),
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


def _key(model: LoadedModel) -> tuple[Any, ...]:
    """Return what a check of a model depends on.

    The fingerprint covers the weights, and the geometry the dtypes of states. Each test has the same files elsewhere.
    """
    device = model.device, model.device.runs_kernels  # some tests patch it
    return *device, repr(structs.replace(model.info, source="")), repr(model.geometry.states), model.fused is None


def unsteady_once(model: LoadedModel, operations: LayerOperations) -> str:
    """Return what the trial of rows returns; a model that passed it in this process passes without another trial."""
    key = *_key(model), type(operations), getattr(operations, "slab", None)
    if model.ranks is None and key in _steady:
        return ""
    problem = _unsteady(model, operations)
    if not problem:
        _steady.add(key)
    return problem


_verify = verification.verify
_verified: dict[tuple[Any, ...], verification.Reference] = {}


def verify_once(
    model: LoadedModel, reference: verification.Reference | None = None, quantised: bool = False
) -> verification.Reference:
    """Return what `verify` returns. A model that was like transformers' own in this process is not compared again."""
    operations = None if model.fused is None else type(model.fused.operations)
    key = *_key(model), operations, model.geometry, reference is None, quantised
    if model.ranks is not None or key not in _verified:
        _verified[key] = _verify(model, reference, quantised)
    return _verified[key]


_build = import_module("kvforge.worker.loading.build")  # the package has a function of that name
_rehearse, _foresee = _build.rehearse, _build.foresee
_rehearsing: list[tuple[Any, ...]] = []
_rehearsed: set[tuple[Any, ...]] = set()


def rehearse_once(kind: Any, config: Any, stored: Mapping[str, StoredTensor], dtype: torch.dtype, model: str) -> Any:
    """Return the model without weights; None, as for one that needs weights, if the same files have passed before."""
    key = rehearsed_key(kind, config, stored)
    if key in _rehearsed:
        return None
    _rehearsing[:] = [key]
    return _rehearse(kind, config, stored, dtype, model)


def foresee_once(module: Any, device: Device) -> Any:
    """Return what `foresee` returns. It is the last check of a model without weights, which has now passed."""
    found = _foresee(module, device)
    _rehearsed.update(_rehearsing)
    return found


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


def load_alike(monkeypatch: pytest.MonkeyPatch) -> None:
    """Leave out comparisons with transformers that have passed before.

    A test that plants a fault in layers or their description and then loads a model must not use this.
    """
    monkeypatch.setattr(import_module("kvforge.worker.loading.load"), "verify", verify_once)


def load_quickly(monkeypatch: pytest.MonkeyPatch) -> None:
    """Leave out checks that have passed before; in `make test` the trial of rows tries fewer single rows."""
    if thinned(2) > 1:
        monkeypatch.setattr(steady, "OFFSET", SINGLES)
        monkeypatch.setattr(trial, "SINGLES", SINGLES)
    for module, name, check in _checks():
        monkeypatch.setattr(module, name, check)
    monkeypatch.setattr(determinism, "_unsteady", unsteady_once)
    monkeypatch.setattr(_build, "rehearse", rehearse_once)
    monkeypatch.setattr(_build, "foresee", foresee_once)
