"""How torch's own products on a GPU sum: each number in one go along the inner dimension, or in parts.

cuBLAS cuts the inner dimension into parts where few rows would leave multiprocessors idle, so how a row is summed
depends on how many others there are. Its light version can be told not to. Then, as measured on an H200 with the shapes
of Llama-3.1-8B and 1 to 16,384 rows of bfloat16, its bits are those of any kernel that adds up with the same
instructions from the first number to the last, Triton's among them. `kernels.steady` checks that at each start.
"""

from __future__ import annotations

import logging

import torch

log = logging.getLogger("worker")


def sum_in_one_go(wanted: bool) -> None:
    """For all products of 16-bit numbers on GPUs in this process, from now on. Where this torch cannot, it says so in
    the log, and the check at start finds what that means."""
    settings = torch.backends.cuda.matmul
    kept = (False, False) if wanted else (True, True)  # sums in 16 bits; sums in parts
    try:
        torch.backends.cuda.preferred_blas_library("cublaslt" if wanted else "default")
        settings.allow_bf16_reduced_precision_reduction = kept
        settings.allow_fp16_reduced_precision_reduction = kept
    except (RuntimeError, TypeError) as error:
        log.warning("products may be summed in parts: torch %s: %s", torch.__version__, str(error).splitlines()[0])
