"""Whether a model computes each row the same whatever is beside it: made so at its load, or said why not."""

from __future__ import annotations

import logging

import torch

from worker.attention import ReferenceAttention
from worker.kernels import SLAB
from worker.kernels.steady import unsteady_products

from .model import LoadedModel

log = logging.getLogger("worker")
FAST = "determinism = 'fast'"


def told(problem: str) -> str:
    """What a model says of itself, for what `made_steady` found."""
    if problem == FAST:
        return "fast"
    return f"not promised: {problem}" if problem else "batch-invariant"


@torch.inference_mode()
def made_steady(model: LoadedModel) -> str:
    """Why a row's bits may depend on the rows beside it, for people; "" where they do not.

    On a GPU whose products differ with the number of rows, they are made in slabs from now on.
    """
    device, fused = model.device, model.fused
    if not device.steady:
        return FAST
    if fused is None:
        return f"the layers of {model.info.architecture} are transformers' own, whose sums depend on the number of rows"
    if isinstance(model.context.attention, ReferenceAttention):
        return "attention in plain torch sums in an order that depends on the rows of a step"
    problem = unsteady_products(fused, device)
    slabbed = getattr(fused.operations, "slab", None)
    if problem and slabbed == 0:
        log.warning("%s: all products are made %d rows at a time", problem, SLAB)
        fused.operations.slab = SLAB  # type: ignore[attr-defined]
        problem = unsteady_products(fused, device)
    return problem
