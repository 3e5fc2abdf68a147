"""What a GPU architecture is to a kernel: its limits, what it can do, and the tile sizes chosen for it.

A kernel never asks which GPU it runs on. It is given a `Target` and takes its tiles from it, by the bytes of a stored
number and by head size, rounded up to a few classes. So every choice can be compiled and inspected for every target in
the tests (see `worker.kernels.aot`).
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

HEAD_CLASSES = (64, 128, 256)  # head sizes are padded to the next one: powers of two, as Triton's tiles must be
HEAD_UNIT = 8  # divides every head size that the kernels are made for


@dataclass(frozen=True)
class TileKey:
    """What a choice of tiles depends on. head: one of HEAD_CLASSES. itemsize: bytes of a stored number of K or V."""

    head: int
    itemsize: int


@dataclass(frozen=True)
class DecodeTiles:
    """keys: of one tile of the loop over a row's tokens. warps, stages: Triton's num_warps and num_stages.

    waves_per_block: work items in flight for each multiprocessor that the planner balances for.
    """

    keys: int
    warps: int
    stages: int
    waves_per_block: int = 1


@dataclass(frozen=True)
class PrefillTiles:
    """queries: rows of a tile, counted as tokens x query heads of one KV head. keys: of one step of the inner loop."""

    queries: int
    keys: int
    warps: int
    stages: int


@dataclass(frozen=True)
class WriteTiles:
    """warps: Triton's num_warps."""

    warps: int


@dataclass(frozen=True)
class Target:
    """One architecture.

    name: for people, and the key of `TARGETS`. backend: cuda, hip or cpu (Triton's interpreter). arch: what Triton's
    GPUTarget takes. warp_size: threads of a warp or wave. shared_bytes: shared memory (LDS) that one block may use.
    matrix: pattern of the names of its matrix instructions in assembly, "" where there are none.
    multiprocessors: SMs or compute units; of the device at hand where there is one.
    hopper: its matrix instructions and copies are those that `prefill_hopper` is written in. chained: a kernel may
    start before the one before it has ended (programmatic dependent launch). packed: quantised dtypes of which two
    numbers become two float16 in a few instructions, as written out in `decode_kernel`. bitwise: those that no
    instruction converts, or that the compiler does not know there: their bits are put together as integers.
    lacks: dtypes that it has no arithmetic for.
    float32_products: Triton's input_precision. barrier_waits: for stores to memory, not to shared memory alone.
    asks_softcap: its kernels are told at run time whether there is one, so that the tests can compile them all.
    widens: multiplies bfloat16 as float32 (Triton 3.6's interpreter would as if it were integers).
    steady: see `Device.steady`.
    decode_rows: most query heads of one decode program; a KV head with more of them takes several programs.
    decode, prefill: by TileKey. decode_few: where rows are so few that every program has a multiprocessor to itself.
    write: the one choice.
    """

    name: str
    backend: str
    arch: int | str
    warp_size: int
    shared_bytes: int
    matrix: str
    multiprocessors: int
    decode_rows: int
    decode: dict[TileKey, DecodeTiles]
    decode_few: dict[TileKey, DecodeTiles]
    prefill: dict[TileKey, PrefillTiles]
    write: WriteTiles
    hopper: bool = False
    chained: bool = False
    packed: tuple[torch.dtype, ...] = ()
    bitwise: tuple[torch.dtype, ...] = ()
    lacks: tuple[torch.dtype, ...] = ()
    float32_products: str = "ieee"
    barrier_waits: bool = True
    asks_softcap: bool = True
    widens: bool = False
    steady: bool = False


def head_class(head_size: int) -> int:
    """`head_size` rounded up to one of HEAD_CLASSES, or to the next power of two beyond them."""
    for size in HEAD_CLASSES:
        if head_size <= size:
            return size
    return 1 << (head_size - 1).bit_length()


def in_units(*strides: int) -> list[int]:
    """Strides and head sizes as kernels are given them: in units of HEAD_UNIT numbers, by which they multiply again.

    So the compiler knows how wide a load may be without compiling the kernel anew for strides that are multiples of 16.
    """
    assert not any(stride % HEAD_UNIT for stride in strides), strides
    return [stride // HEAD_UNIT for stride in strides]
