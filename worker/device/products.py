"""How torch's own products sum the inner dimension: in one pass, or in parts; on CPUs with which instructions.

cuBLAS splits the inner dimension where few rows would leave multiprocessors idle, so the sum of a row depends on the
number of rows. cuBLASLt can be configured not to split. Its bits then equal those of any kernel that adds from the
first number to the last with the same instructions, Triton's included, as measured on an H200 with the shapes of
Llama-3.1-8B and 1 to 16,384 rows of bfloat16. `kernels.steady` checks this at each start.

On CPUs oneDNN multiplies 16 bits by the tiles of Intel's AMX where a CPU has them, and divides the sums of a row by the
number of rows. With AVX-512 all rows have the same bits (benchmarks/NOTES.md). Steady workers use AMX by a kernel of
their own instead (`kernels.amx`).
"""

from __future__ import annotations

import logging
import os

import torch

log = logging.getLogger("worker")
CPU_INSTRUCTIONS, WITHOUT_TILES = "ONEDNN_MAX_CPU_ISA", "AVX512_CORE_FP16"
FEWER = ("SSE41", "AVX", "AVX2", "AVX2_VNNI", "AVX2_VNNI_2", "AVX512_CORE", "AVX512_CORE_VNNI", "AVX512_CORE_BF16")
TILES = "sums in the tiles of AMX depend on the number of rows; determinism = 'fast' allows them"


def sum_in_one_go(wanted: bool) -> None:
    """Configure all 16-bit products on GPUs in this process to sum in one pass, or restore the default.

    If this torch cannot, log a warning; the check at start finds the effect.
    """
    settings = torch.backends.cuda.matmul
    kept = (False, False) if wanted else (True, True)  # allow 16-bit sums; allow split sums
    try:
        torch.backends.cuda.preferred_blas_library("cublaslt" if wanted else "default")
        settings.allow_bf16_reduced_precision_reduction = kept
        settings.allow_fp16_reduced_precision_reduction = kept
    except (RuntimeError, TypeError) as error:
        log.warning("split sums stay enabled: torch %s: %s", torch.__version__, str(error).splitlines()[0])


def keep_from_tiles() -> None:
    """Keep oneDNN from the tiles of AMX in this process. A lower limit in the environment stays.

    oneDNN reads the variable at its first product.
    """
    before = os.environ.get(CPU_INSTRUCTIONS, WITHOUT_TILES)
    if before not in (WITHOUT_TILES, *FEWER):
        log.warning("%s=%s becomes %s: %s", CPU_INSTRUCTIONS, before, WITHOUT_TILES, TILES)
    if before not in FEWER:
        os.environ[CPU_INSTRUCTIONS] = WITHOUT_TILES


def keeps_from_tiles() -> bool:
    """Return whether `keep_from_tiles` has set oneDNN's limit, which is neither lower nor absent."""
    return os.environ.get(CPU_INSTRUCTIONS) == WITHOUT_TILES
