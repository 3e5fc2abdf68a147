"""GPU architectures as kernels see them: limits, capabilities, and tile sizes.

A kernel never asks which GPU it runs on. It takes its tiles from a `Target`, by the bytes of a stored number and by
head size, rounded up to a few classes. The tests can therefore compile and inspect every choice for every target (see
`tools/aot`).
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

HEAD_CLASSES = (64, 128, 256)  # head sizes are padded to the next one: powers of two, as Triton's tiles must be
HEAD_UNIT = 8  # divides every supported head size


@dataclass(frozen=True)
class TileKey:
    """Key of a choice of tiles. head: one of HEAD_CLASSES. itemsize: bytes of a stored number of K or V."""

    head: int
    itemsize: int


@dataclass(frozen=True)
class DecodeTiles:
    """Tile sizes of decode attention.

    Attributes:
        keys: Keys of one tile of the loop over a row's tokens.
        warps: Triton's num_warps.
        stages: Triton's num_stages.
        waves_per_block: Work items in flight on each multiprocessor, which the planner balances for.
        registers: Most registers of a thread where a head takes two tiles; 0: as many as the compiler takes.
    """

    keys: int
    warps: int
    stages: int
    waves_per_block: int = 1
    registers: int = 0


@dataclass(frozen=True)
class PrefillTiles:
    """Tile sizes of prefill attention.

    Attributes:
        queries: Rows of a tile, counted as tokens x query heads of one KV head.
        keys: Keys of one step of the inner loop.
        warps: Triton's num_warps.
        stages: Triton's num_stages.
    """

    queries: int
    keys: int
    warps: int
    stages: int


@dataclass(frozen=True)
class WriteTiles:
    """Launch parameters of the write kernel. warps: Triton's num_warps."""

    warps: int


@dataclass(frozen=True)
class Target:
    """One architecture.

    Attributes:
        name: Name for people, and the key of `TARGETS`.
        backend: cuda, hip or cpu (Triton's interpreter).
        arch: Architecture as Triton's GPUTarget takes it.
        warp_size: Threads of a warp or wave.
        shared_bytes: Shared memory (LDS) that one block may use.
        matrix: Pattern of the names of its matrix instructions in assembly; "" if it has none.
        multiprocessors: SMs or compute units; the count of the device present, if there is one.
        decode_rows: Most query heads of one decode program; a KV head with more takes several programs.
        decode: Decode tiles by TileKey.
        decode_few: Decode tiles for so few rows that every program has a multiprocessor to itself.
        prefill: Prefill tiles by TileKey.
        write: Parameters of the write kernel.
        hopper: Whether it has the matrix instructions and copies that `prefill_hopper` uses.
        chained: Whether a kernel may start before the previous one has ended (programmatic dependent launch).
        packed: Quantised dtypes that convert in pairs to float16 in a few instructions, as `decode_kernel`
            does.
        bitwise: Dtypes without a conversion instruction, or with one unknown to the compiler: kernels assemble their
            bits as integers.
        lacks: Dtypes without arithmetic.
        float32_products: Triton's input_precision.
        barrier_waits: Whether a barrier waits for stores to global memory and not only to shared memory.
        asks_softcap: Whether kernels learn at run time if there is a soft cap, so that the tests can compile them all.
        widens: Whether bfloat16 is multiplied as float32 (Triton 3.6's interpreter would multiply the bits as
            integers).
        steady: See `Device.steady`.
        tensor_memory: Whether matrix products go through a memory of their own (tcgen05).
        two_tiles: Bytes of the numbers of K and V for which a program's registers hold two tiles of query heads, each
            with the sums of a head of 128, over one tile of keys.
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
    tensor_memory: bool = False
    two_tiles: tuple[int, ...] = (2,)


def head_class(head_size: int) -> int:
    """Return `head_size` rounded up to one of HEAD_CLASSES, or to a power of two beyond them."""
    for size in HEAD_CLASSES:
        if head_size <= size:
            return size
    return 1 << (head_size - 1).bit_length()


def head_tiles(head_size: int) -> tuple[int, int]:
    """Return the sizes of the tiles that hold a head; the second is 0 if there is one.

    Triton's tiles are powers of two: a head of 96 numbers takes one of 64 and one of 32.
    """
    return (64, 32) if 64 < head_size <= 96 else (head_class(head_size), 0)


def in_units(*strides: int) -> list[int]:
    """Convert strides and head sizes to units of HEAD_UNIT numbers; kernels multiply them again.

    The compiler then knows the width of a load without compiling the kernel anew for strides that are multiples of 16.
    """
    assert not any(stride % HEAD_UNIT for stride in strides), strides
    return [stride // HEAD_UNIT for stride in strides]
