"""The determinism of a model: makes its rows independent of each other at load, or reports why they are not."""

from __future__ import annotations

import logging

import torch

from kvforge.worker.attention import PLAIN
from kvforge.worker.kernels import SLAB, LayerOperations
from kvforge.worker.kernels.recurrent_selftest import steps_of
from kvforge.worker.kernels.steady import unsteady_products, unsteady_steps

from .model import LoadedModel
from .probe import attending
from .trial import unsteady_mixers, unsteady_rows

log = logging.getLogger("worker")
FAST = "determinism = 'fast'"
FAST_WAY_OUT = f"set {FAST} to serve the model as transformers runs it"


def describe_determinism(problem: str) -> str:
    """Return the text that announces a model's determinism, for the result of `make_batch_invariant`."""
    if problem == FAST:
        return "fast"
    return f"not promised: {problem}" if problem else "batch-invariant"


@torch.inference_mode()
def make_batch_invariant(model: LoadedModel, operations: LayerOperations) -> str:
    """Make a model batch-invariant, or return why it is not.

    If a GPU's products differ with the number of rows, they are computed in slabs from now on.

    Args:
        model: The loaded model.
        operations: The operations that compute the model's products.

    Returns:
        Why a row's bits may depend on other rows, for people; "" if they do not.
    """
    device = model.device
    if not device.steady:
        return FAST
    if attends_in_plain_torch(model):
        return "attention in plain torch sums in an order that depends on the rows of a step"
    problem = _unsteady(model, operations)
    if problem and getattr(operations, "slab", None) == 0:
        log.warning("%s: all products are computed %d rows at a time", problem, SLAB)
        operations.slab = SLAB  # type: ignore[attr-defined]
        problem = _unsteady(model, operations)
    return problem


def attends_in_plain_torch(model: LoadedModel) -> bool:
    """Return whether any layer attends in plain torch, because of the setting or an unsupported head size."""
    geometry, attention = model.geometry, model.context.attention
    return any(
        describe_determinism.startswith(PLAIN)
        for shape, options in attending(model.module, geometry)
        for describe_determinism in attention.describe(
            *(shape.head_size, model.dtype, geometry.dtype.torch_dtype, geometry.block_size, options),
            latent=shape.latent,
        )
    )


def _unsteady(model: LoadedModel, operations: LayerOperations) -> str:
    """Test the model, and return the first problem that any rank found; "" if there is none."""
    if model.fused is not None:
        problem = unsteady_products(model.fused, model.device)
        if not problem and model.geometry.states:
            problem = unsteady_mixers(model) or unsteady_steps(operations, steps_of(model.fused), model.device)
    elif problem := unsteady_rows(model):
        problem = f"the layers of {model.info.architecture} are transformers' own: {problem}"
    else:
        problem = unsteady_steps(operations, [*model.context.steps.values()], model.device)
    return problem if model.ranks is None else next(filter(None, model.ranks.texts(problem)), "")
