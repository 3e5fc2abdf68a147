"""Checks of a load that forked workers leave out, because an equal model has passed in the same run of tests.

A load tries whether the rows of a model have the same bits alone and in company, loads the names and shapes of its
files without weights, and compares its logits with those of transformers: half of the load of a tiny model. Tests start
hundreds of workers with a few models. Workers in fresh interpreters, those of several ranks, and all workers outside of
a run of all tests make each check. A failed check is never remembered. The trial of rows tries few single rows.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Callable, Mapping
from importlib import import_module
from pathlib import Path
from typing import Any

import torch
from msgspec import structs

from kvforge.models.safetensors_header import StoredTensor
from kvforge.worker.device.device import Device
from kvforge.worker.kernels import LayerOperations, steady
from kvforge.worker.loading import determinism, trial
from kvforge.worker.loading.model import LoadedModel
from kvforge.worker.loading.verification import Reference

SINGLES = 5
COMPARED = Reference([])  # in place of the logits of a model that was compared before


def try_few_rows() -> None:
    """Let trials of this process and its forks try few single rows. Most of their time goes into single rows."""
    steady.OFFSET = SINGLES
    trial.SINGLES = SINGLES


def remember_trials(folder: Path) -> None:
    """Leave out trials of rows that have passed, in this process and in its forks.

    Args:
        folder: With an empty file for each check that has passed.
    """
    unsteady = determinism._unsteady

    def unsteady_once(model: LoadedModel, operations: LayerOperations) -> str:
        if model.ranks is not None:
            return unsteady(model, operations)
        passed = folder / _digest(model, type(operations).__qualname__, getattr(operations, "slab", None))
        problem = "" if passed.exists() else unsteady(model, operations)
        if not problem:
            passed.touch()
        return problem

    determinism._unsteady = unsteady_once


def remember_comparisons(folder: Path) -> None:
    """Leave out comparisons with transformers where an equal model has loaded, in this process and its forks.

    Args:
        folder: As for `remember_trials`, which comes first: the trial of rows is the last check of a load.
    """
    load: Any = import_module("kvforge.worker.loading.load")  # the package has a function of that name
    compare: Callable[..., Reference] = load.verify
    unsteady = determinism._unsteady
    begun: list[Path] = []

    def compare_once(model: LoadedModel, reference: Reference | None = None, quantised: bool = False) -> Reference:
        if model.ranks is not None:
            return compare(model, reference, quantised)
        if reference is None:  # weights as they were read; packed ones follow
            begun[:] = [folder / _digest(model, "compared", sorted(model.context.steps), model.prompt_chunk)]
            reference = COMPARED if begun[0].exists() else None
        return reference if reference is COMPARED else compare(model, reference, quantised)

    def unsteady_behind(model: LoadedModel, operations: LayerOperations) -> str:
        if not (problem := unsteady(model, operations)) and model.ranks is None:
            for passed in begun:
                passed.touch()
        return problem

    load.verify = compare_once
    determinism._unsteady = unsteady_behind


def remember_rehearsals(folder: Path) -> None:
    """Leave out loads without weights where equal names and shapes have passed, in this process and its forks.

    Args:
        folder: As for `remember_trials`.
    """
    build: Any = import_module("kvforge.worker.loading.build")
    rehearse, foresee = build.rehearse, build.foresee
    begun: list[Path] = []

    def rehearse_once(kind: Any, config: Any, stored: Mapping[str, StoredTensor], dtype: torch.dtype, name: str) -> Any:
        passed = folder / hashlib.sha256(repr(rehearsed_key(kind, config, stored)).encode()).hexdigest()
        if passed.exists():
            return None  # as for a model that needs weights
        begun[:] = [passed]
        return rehearse(kind, config, stored, dtype, name)

    def foresee_behind(module: Any, device: Device) -> Any:
        found = foresee(module, device)
        for passed in begun:
            passed.touch()
        return found

    build.rehearse, build.foresee = rehearse_once, foresee_behind


def rehearsed_key(kind: Any, config: Any, stored: Mapping[str, StoredTensor]) -> tuple[Any, ...]:
    """Return what a load without weights depends on. Each test has the same files elsewhere."""
    shapes = sorted((name, each.type_name, tuple(each.shape)) for name, each in stored.items())
    fields = config.to_dict()
    fields.pop("_name_or_path", None)  # the test's folder
    return kind, repr(fields), *shapes


def _digest(model: LoadedModel, *more: Any) -> str:
    """Return a digest of what a check of a model depends on: the fingerprint of the model covers its weights."""
    device = model.device
    parts = (
        sorted(device.described.items()),
        device.runs_kernels,
        structs.replace(model.info, source=""),
        model.geometry,
        model.fused is None,
        torch.get_num_threads(),
        os.environ.get("PYTHONPATH"),  # a sitecustomize.py there may plant a fault
        *more,
    )
    return hashlib.sha256(repr(parts).encode()).hexdigest()
