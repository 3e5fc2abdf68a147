"""Whether a model computes each row the same whatever is beside it: made so at its load, or said why not."""

from __future__ import annotations

import logging

import torch

from worker.attention import PLAIN
from worker.kernels import SLAB, LayerOperations
from worker.kernels.steady import unsteady_products

from .model import LoadedModel
from .probe import bound_options
from .trial import unsteady_rows

log = logging.getLogger("worker")
FAST = "determinism = 'fast'"
FAST_WAY_OUT = f"set {FAST} to serve the model as transformers runs it"


def told(problem: str) -> str:
    """What a model says of itself, for what `made_steady` found."""
    if problem == FAST:
        return "fast"
    return f"not promised: {problem}" if problem else "batch-invariant"


@torch.inference_mode()
def made_steady(model: LoadedModel, operations: LayerOperations) -> str:
    """Why a row's bits may depend on the rows beside it, for people; "" where they do not.

    operations: that make the model's products. On a GPU where these differ with the number of rows, they are made in
    slabs from now on.
    """
    device = model.device
    if not device.steady:
        return FAST
    if attends_in_plain_torch(model):
        return "attention in plain torch sums in an order that depends on the rows of a step"
    problem = _unsteady(model)
    if problem and getattr(operations, "slab", None) == 0:
        log.warning("%s: all products are made %d rows at a time", problem, SLAB)
        operations.slab = SLAB  # type: ignore[attr-defined]
        problem = _unsteady(model)
    return problem


def attends_in_plain_torch(model: LoadedModel) -> bool:
    """Whether a layer does: all of them, or those with heads that no kernel takes."""
    geometry, attention = model.geometry, model.context.attention
    return any(
        told.startswith(PLAIN)
        for shape, options in zip(geometry.layers, bound_options(model.module), strict=True)
        for told in attention.describe(
            shape.head_size, model.dtype, geometry.dtype.torch_dtype, geometry.block_size, options.window
        )
    )


def _unsteady(model: LoadedModel) -> str:
    """What was found by trying, by any of the ranks that compute the model together; "" if nothing."""
    if model.fused is not None:
        problem = unsteady_products(model.fused, model.device)
    elif problem := unsteady_rows(model):
        problem = f"the layers of {model.info.architecture} are transformers' own: {problem}"
    return problem if model.ranks is None else next(filter(None, model.ranks.texts(problem)), "")
