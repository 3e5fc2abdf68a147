"""Which products with weights in codes the kernels of `stored_hopper` take; this module needs no Gluon."""

from __future__ import annotations

import torch

from kvforge.worker.attention.prefill_plan import gluon_problem
from kvforge.worker.device.target import Target

from .code_tables import unit_columns
from .stored import Codes

UNIT_COLUMNS = unit_columns("int4")  # of all codes of 4 bits
KINDS = {"int4": (64, 128), "nf4": (64,)}  # columns of a group
TILE = 64  # rows of a tile
TOKENS_MAX = 16


def can_sum(codes: Codes, x: torch.Tensor, results: int, halves: int, target: Target) -> bool:
    """Return whether `stored_hopper.sum_steps` can compute products with `x` [tokens, k].

    Args:
        codes: A weight, or those of experts.
        x: [tokens, k].
        results: Rows of the weight, or of each of its halves.
        halves: Halves of the weight of which a tile has as many rows each: 1 or 2.
        target: The GPU.
    """
    return (
        target.hopper
        and target.chained  # not the interpreter, which does not know Gluon
        and not gluon_problem()
        and 0 < len(x) <= TOKENS_MAX
        and codes.group in KINDS.get(codes.kind, ())
        and codes.scaled_rows == 1
        and codes.span == codes.group // UNIT_COLUMNS
        and results % (TILE // halves) == 0
        and x.data_ptr() % 16 == 0
        and (len(x) == 1 or x.stride(0) * x.element_size() % 16 == 0)
    )
