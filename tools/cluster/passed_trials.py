"""Trials of rows that forked workers leave out, because an equal model has passed the trial in the same run of tests.

A load tries whether the rows of a model have the same bits alone and in company, which takes a quarter of the load of a
tiny model. Tests start hundreds of workers with a few models. Workers in fresh interpreters, those of several ranks,
and all workers outside of a run of all tests make each trial. A failed trial is never remembered.
"""

from __future__ import annotations

import hashlib
from pathlib import Path

import torch
from msgspec import structs

from kvforge.worker.kernels import LayerOperations
from kvforge.worker.loading import determinism
from kvforge.worker.loading.model import LoadedModel


def remember_trials(folder: Path) -> None:
    """Leave out trials that have passed, in this process and in its forks.

    Args:
        folder: An empty folder, with a file for each trial that has passed.
    """
    unsteady = determinism._unsteady

    def unsteady_once(model: LoadedModel, operations: LayerOperations) -> str:
        if model.ranks is not None:
            return unsteady(model, operations)
        passed = folder / _digest(model, operations)
        problem = "" if passed.exists() else unsteady(model, operations)
        if not problem:
            passed.touch()
        return problem

    determinism._unsteady = unsteady_once


def _digest(model: LoadedModel, operations: LayerOperations) -> str:
    """Return a digest of what the trial depends on: the fingerprint of the model covers its weights."""
    device = model.device
    parts = (
        sorted(device.described.items()),
        device.runs_kernels,
        structs.replace(model.info, source=""),
        model.geometry.states,
        model.fused is None,
        type(operations).__qualname__,
        getattr(operations, "slab", None),
        torch.get_num_threads(),
    )
    return hashlib.sha256(repr(parts).encode()).hexdigest()
