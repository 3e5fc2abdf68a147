"""Compares torch's elementwise functions, number by number, for tensors of many sizes and numbers of threads.

Run as a program, because the environment variable ATEN_CPU_CAPABILITY chooses torch's loops when torch is imported:

    python -m tests.worker.kernels.steady_functions SHARE THREADS...

One in SHARE of the pairs of a number of threads and a size is compared for each function and dtype. Other functions
have other pairs, so that all of them together have every pair several times. It prints one line for each function with
bits that depend on a number's place, and exits 1 if there is one.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Iterator

import torch
from torch.nn import functional

from kvforge.worker.kernels.partition import apply_aligned
from kvforge.worker.kernels.steady import same_bits

Function = Callable[[torch.Tensor], torch.Tensor]

# Different bits in torch's vector loop and in its scalar loop: `SteadyFunctions` and the activations of a model align
# these.
ALIGNED: dict[str, Function] = {
    "sigmoid": torch.sigmoid,
    "silu": functional.silu,
    "gelu": functional.gelu,
    "gelu by tanh": lambda x: functional.gelu(x, approximate="tanh"),
    "gelu and silu": lambda x: functional.silu(functional.gelu(x, approximate="tanh")),
    "quick gelu": lambda x: x * torch.sigmoid(1.702 * x),
    "softplus": functional.softplus,
    "elu": functional.elu,
    "selu": functional.selu,
    "celu": functional.celu,
    "mish": functional.mish,
    "hardswish": functional.hardswish,
    "rsqrt": lambda x: (x.abs() + 1).rsqrt(),
    "exp2": torch.exp2,
    "power": lambda x: x.abs().pow(0.75),
}
# The same bits in both loops: models use these as they are.
PLAIN: dict[str, Function] = {
    "exp": torch.exp,
    "tanh": torch.tanh,
    "erf": torch.erf,
    "log": lambda x: (x.abs() + 0.1).log(),
    "log1p": lambda x: x.abs().log1p(),
    "cos": torch.cos,
    "sin": torch.sin,
    "sqrt": lambda x: x.abs().sqrt(),
    "square": lambda x: x.pow(2),
    "cube": lambda x: x.pow(3),
    "squared relu": lambda x: functional.relu(x).square(),
    "hardsigmoid": functional.hardsigmoid,
    "leaky relu": functional.leaky_relu,
    "log sigmoid": functional.logsigmoid,
}
DTYPES = (torch.float32, torch.bfloat16, torch.float16)
COUNTS = (1, 5, 33, 63, 64, 100, 3000, 16383, 16384, 16385, 16640, 32769, 33001, 49153, 70001)


def unsteady(
    functions: dict[str, Function], threads: Iterable[int], share: int = 1
) -> Iterator[tuple[str, torch.dtype, int, int]]:
    """Yield name, dtype, threads and count where a number's bits differ from those in a tensor on one thread.

    Args:
        functions: Compared at each of COUNTS, from the start and from within the numbers.
        threads: Numbers of intra-op threads to try; torch's own setting is changed and put back.
        share: One in so many pairs of a number of threads and a size is compared, others for the next function.
    """
    every = list(threads)
    before = torch.get_num_threads()
    generator = torch.Generator().manual_seed(3)
    try:
        for turn, dtype in enumerate(DTYPES):
            x = (torch.randn(70_001, generator=generator) * 3).to(dtype)
            for number, (name, function) in enumerate(functions.items(), turn):
                torch.set_num_threads(1)
                whole = function(x)
                for place, each in enumerate(every, number):
                    torch.set_num_threads(each)
                    for count in COUNTS[place % share :: share]:
                        first = min(17, len(x) - count)
                        if not same_bits(function(x[first : first + count]), whole[first : first + count]):
                            yield name, dtype, each, count
    finally:
        torch.set_num_threads(before)


def aligned() -> dict[str, Function]:
    """Return ALIGNED, each applied by `apply_aligned`."""

    def align(function: Function) -> Function:
        return lambda x: apply_aligned(function, x)

    return {name: align(function) for name, function in ALIGNED.items()}


if __name__ == "__main__":
    found = list(unsteady(aligned() | PLAIN, [int(each) for each in sys.argv[2:]], int(sys.argv[1])))
    print(torch.backends.cpu.get_cpu_capability(), *found, sep="\n")
    sys.exit(1 if found else 0)
