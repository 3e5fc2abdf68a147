"""The table of GPU architectures that all kernels read, and the choice of a row for the device present."""

from __future__ import annotations

from dataclasses import replace
from functools import lru_cache
from typing import Any

import torch

from kvforge.protocol.errors import InvalidConfiguration

from .device import Device
from .target import HEAD_CLASSES, DecodeTiles, PrefillTiles, Target, TileKey, WriteTiles


def _keys() -> list[TileKey]:
    return [TileKey(head, itemsize) for head in HEAD_CLASSES for itemsize in (1, 2, 4)]


def _decode(
    bytes_per_tile: int, warps: int, stages: int, keys_max: int = 128, waves: int = 1
) -> dict[TileKey, DecodeTiles]:
    """Return tiles of K of `bytes_per_tile`, with 16 to `keys_max` keys."""
    return {
        key: DecodeTiles(max(16, min(keys_max, bytes_per_tile // (key.head * key.itemsize))), warps, stages, waves)
        for key in _keys()
    }


def _prefill(*rows: tuple[int, ...], stored: tuple[int, ...] = (1, 2, 4)) -> dict[TileKey, PrefillTiles]:
    """Build prefill tiles.

    They were chosen by the compiler's register use (no spills, or the fewest; see `tools/aot`), and
    on sm_90 by time as well.

    Args:
        rows: (queries, keys, warps, stages) for each of HEAD_CLASSES.
        stored: Bytes of a stored number.
    """
    return {
        TileKey(head, itemsize): PrefillTiles(*row)
        for itemsize in stored
        for head, row in zip(HEAD_CLASSES, rows, strict=True)
    }


def _decode_hopper(tiles_in_flight: int, waves: int) -> dict[TileKey, DecodeTiles]:
    """Return tiles of 32 KiB where 128 keys fill them, else twice as many tiles in flight.

    Each tile in flight takes two stages: its entries of the block table are loaded one stage before its K and V.
    """
    made = {}
    for key in _keys():
        keys = max(16, min(128, 32 * KIB // (key.head * key.itemsize)))
        full = keys * key.head * key.itemsize == 32 * KIB
        made[key] = DecodeTiles(keys, 4, 1 + 2 * tiles_in_flight * (1 if full else 2), waves)
    return made


def _decode_rdna() -> dict[TileKey, DecodeTiles]:
    """Return small tiles over many warps; more warps without matrix instructions or for large heads.

    A thread has 256 registers and no accumulators beside them. These tiles spill the least (see
    `tools/aot`).
    """
    return {
        key: DecodeTiles(
            keys=32 if key == TileKey(64, 2) else 16, warps=16 if key.itemsize == 4 or key.head == 256 else 8, stages=1
        )
        for key in _keys()
    }


def _nvidia(capability: int) -> dict[str, Any]:
    """Return the capabilities of NVIDIA GPUs of this compute capability (x 10)."""
    return {
        "hopper": capability == 90,
        "chained": capability >= 90,
        "packed": (torch.int8, torch.float8_e4m3fn) if capability >= 89 else (torch.int8,),
        "bitwise": () if capability >= 89 else (torch.float8_e4m3fn,),
        "lacks": () if capability >= 80 else (torch.bfloat16,),
        "float32_products": "tf32x3" if capability >= 80 else "ieee",
        "asks_softcap": capability != 90,
        "tensor_memory": 100 <= capability < 120,
    }


def _nvidia_target(capability: int, shared_kib: int, multiprocessors: int) -> Target:
    """Return an untuned target: its tiles leave room for two programs in the smallest shared memory, 99 KiB."""
    tensor_cores = capability >= 80  # with bfloat16 and float32, and asynchronous copies
    return Target(
        name=f"sm_{capability}",
        backend="cuda",
        arch=capability,
        warp_size=32,
        shared_bytes=shared_kib * KIB,
        matrix=r"mma\.sync|tcgen05\.mma" if tensor_cores else "",
        multiprocessors=multiprocessors,
        decode_rows=16,
        decode=_decode(16 * KIB, 4, 3, waves=2) if tensor_cores else _decode(4 * KIB, 8, 1, 32),
        decode_few=_decode(16 * KIB, 4, 3, waves=2) if tensor_cores else _decode(4 * KIB, 8, 1, 32),
        prefill=NVIDIA_PREFILL if tensor_cores else TURING_PREFILL,
        write=WriteTiles(warps=4),
        **_nvidia(capability),
    )


KIB = 1024
QUANTISED = (torch.int8, torch.float8_e4m3fn)
GFX9: dict[str, Any] = {"bitwise": QUANTISED, "barrier_waits": False, "two_tiles": (1, 2)}
RDNA: dict[str, Any] = {"bitwise": QUANTISED}
NVIDIA_PREFILL = (
    _prefill((128, 32, 8, 2), (64, 64, 4, 2), (64, 32, 8, 2), stored=(1,))
    | _prefill((128, 64, 8, 3), (64, 64, 4, 2), (64, 32, 8, 2), stored=(2,))
    | _prefill((64, 32, 8, 2), (32, 16, 8, 2), (32, 16, 8, 2), stored=(4,))
)
TURING_PREFILL = _prefill((32, 32, 8, 1), (32, 16, 8, 1), (16, 16, 8, 1))
TARGETS: dict[str, Target] = {
    target.name: target
    for target in (
        _nvidia_target(75, 64, 40),  # T4
        _nvidia_target(80, 163, 108),  # A100
        _nvidia_target(86, 99, 72),  # A10, 3090
        _nvidia_target(89, 99, 58),  # L4, L40S, 4090
        _nvidia_target(100, 227, 148),  # B200
        _nvidia_target(120, 99, 170),  # 5090
        Target(
            name="sm_90",
            backend="cuda",
            arch=90,
            warp_size=32,
            shared_bytes=227 * KIB,
            matrix=r"wgmma\.mma_async|mma\.sync",
            multiprocessors=132,
            decode_rows=64,
            decode=_decode_hopper(tiles_in_flight=1, waves=3),
            decode_few=_decode_hopper(tiles_in_flight=2, waves=1),
            prefill=_prefill((128, 64, 4, 3), (64, 64, 4, 2), (64, 32, 4, 3), stored=(1,))
            | _prefill((128, 64, 4, 3), (64, 64, 4, 3), (64, 32, 4, 3), stored=(2,))
            | _prefill((64, 32, 8, 2), (32, 16, 8, 2), (32, 16, 8, 2), stored=(4,)),
            write=WriteTiles(warps=4),
            two_tiles=(1, 2),
            **_nvidia(90),
        ),
        Target(
            name="gfx90a",
            backend="hip",
            arch="gfx90a",
            warp_size=64,
            shared_bytes=64 * KIB,
            matrix="v_mfma",
            multiprocessors=104,
            decode_rows=16,
            decode=_decode(8 * KIB, 4, 2, 64),
            decode_few=_decode(8 * KIB, 4, 2, 64),
            prefill=_prefill((128, 64, 4, 1), (128, 32, 4, 1), (64, 16, 4, 1), stored=(1, 2))
            | _prefill((128, 32, 4, 1), (128, 16, 4, 1), (64, 16, 4, 1), stored=(4,)),
            write=WriteTiles(warps=4),
            **GFX9,
        ),
        Target(
            name="gfx942",
            backend="hip",
            arch="gfx942",
            warp_size=64,
            shared_bytes=64 * KIB,
            matrix="v_mfma",
            multiprocessors=304,
            decode_rows=16,
            decode=_decode(8 * KIB, 4, 2, 64),
            decode_few=_decode(8 * KIB, 4, 2, 64),
            prefill=_prefill((128, 64, 4, 1), (128, 32, 4, 1), (64, 16, 4, 1), stored=(1, 2))
            | _prefill((128, 32, 4, 1), (128, 16, 4, 1), (64, 16, 4, 1), stored=(4,)),
            write=WriteTiles(warps=4),
            **GFX9,
        ),
        Target(
            name="gfx950",
            backend="hip",
            arch="gfx950",
            warp_size=64,
            shared_bytes=160 * KIB,
            matrix="v_mfma",
            multiprocessors=256,
            decode_rows=16,
            decode=_decode(16 * KIB, 4, 2, 64),
            decode_few=_decode(16 * KIB, 4, 2, 64),
            prefill=_prefill((128, 64, 4, 1), (128, 32, 4, 1), (64, 16, 4, 1), stored=(1,))
            | _prefill((128, 64, 4, 2), (128, 64, 4, 2), (64, 32, 4, 2), stored=(2,))
            | _prefill((128, 64, 4, 2), (128, 32, 4, 2), (64, 16, 4, 2), stored=(4,)),
            write=WriteTiles(warps=4),
            **GFX9,
        ),
        Target(
            name="gfx1100",
            backend="hip",
            arch="gfx1100",
            warp_size=32,
            shared_bytes=64 * KIB,
            matrix="v_wmma",
            multiprocessors=48,
            decode_rows=16,
            decode=_decode_rdna(),
            decode_few=_decode_rdna(),
            prefill=_prefill((64, 16, 8, 1), (64, 16, 16, 1), (16, 16, 8, 1), stored=(1,))
            | _prefill((64, 32, 4, 1), (64, 16, 8, 1), (16, 16, 8, 1), stored=(2,))
            | _prefill((32, 16, 8, 1), (16, 16, 8, 1), (16, 16, 8, 1), stored=(4,)),
            write=WriteTiles(warps=4),
            two_tiles=(),  # it takes every operand of a matrix instruction twice
            **RDNA,
        ),
        Target(
            name="gfx1201",
            backend="hip",
            arch="gfx1201",
            warp_size=32,
            shared_bytes=64 * KIB,
            matrix="v_wmma",
            multiprocessors=32,
            decode_rows=16,
            decode=_decode_rdna(),
            decode_few=_decode_rdna(),
            prefill=_prefill((64, 16, 8, 1), (64, 16, 8, 1), (16, 32, 8, 1), stored=(1,))
            | _prefill((64, 32, 4, 1), (64, 16, 8, 1), (16, 16, 8, 1), stored=(2,))
            | _prefill((32, 16, 8, 1), (16, 16, 8, 1), (16, 16, 8, 1), stored=(4,)),
            write=WriteTiles(warps=4),
            **RDNA,
        ),
        # Triton's interpreter: with one multiprocessor no row would be split; three split rows unevenly.
        Target(
            name="cpu",
            backend="cpu",
            arch=0,
            warp_size=1,
            shared_bytes=1 << 30,
            matrix="",
            multiprocessors=3,
            decode_rows=64,
            decode=_decode(8 * KIB, 1, 1, 32),
            decode_few=_decode(8 * KIB, 1, 1, 32),
            prefill=_prefill((32, 32, 1, 1), (32, 32, 1, 1), (32, 16, 1, 1)),
            write=WriteTiles(warps=1),
            two_tiles=(1, 2, 4),
            widens=True,
        ),
    )
}
# RDNA 3.5: gfx1100's matrix instructions and tiles, scalar float instructions, and fewer compute units.
TARGETS["gfx1151"] = replace(TARGETS["gfx1100"], name="gfx1151", arch="gfx1151", multiprocessors=20)
# Architectures that use the tiles of another one of the same family, newer or smaller. Unlisted ones use the family's.
_LIKE = {"gfx940": "gfx942", "gfx941": "gfx942", "gfx1101": "gfx1100", "gfx1102": "gfx1100", "gfx1200": "gfx1201"} | {
    "gfx1150": "gfx1151",
    "gfx1152": "gfx1151",
}
_FAMILIES = {"gfx9": "gfx942", "gfx12": "gfx1201", "gfx": "gfx1100"}


def current_target(device: Device) -> Target:
    """Return the table's row for `device`, with the device's multiprocessors and, on NVIDIA, its own limits.

    An unlisted architecture uses the tiles of the nearest one; its self-test decides whether they work there.

    Raises:
        InvalidConfiguration: Names `kernels` if no row fits the device.
    """
    name, multiprocessors = device.architecture
    return _target_of(name, multiprocessors, device.shared_bytes, device.steady)


def check_dtypes(device: Device, dtype: torch.dtype, kv_dtype: torch.dtype) -> None:
    """Check that `device` can compute in `dtype` over K and V of `kv_dtype`.

    Raises:
        InvalidConfiguration: Names the unsupported one.
    """
    lacks = current_target(device).lacks
    for field, wanted in (("dtype", dtype), ("kv_dtype", kv_dtype)):
        if wanted in lacks:
            problem = f"{device.name} has no {_name(wanted)} arithmetic: set {field} = 'float16' or 'float32'"
            raise InvalidConfiguration(field, problem)


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


@lru_cache(maxsize=64)
def _target_of(name: str, multiprocessors: int, shared_bytes: int = 0, steady: bool = False) -> Target:
    """Return the target of an architecture. shared_bytes: per block; 0: unknown, use the table's value."""
    if steady:
        return replace(_target_of(name, multiprocessors, shared_bytes), steady=True)
    if name == "cpu":
        return TARGETS[name]
    if name.startswith("sm_"):
        return _nvidia_target_of(name, multiprocessors, shared_bytes)
    family = next(family for family in _FAMILIES if name.startswith(family))
    like = TARGETS[name if name in TARGETS else _LIKE.get(name, _FAMILIES[family])]
    return replace(like, name=name, multiprocessors=multiprocessors)


def _nvidia_target_of(name: str, multiprocessors: int, shared_bytes: int) -> Target:
    """Return the newest row that is no newer than the device and needs no more shared memory than it has.

    Rows tuned for Hopper serve Hopper only.
    """
    capability = _capability(name)
    if name in TARGETS:
        shared_bytes = shared_bytes or TARGETS[name].shared_bytes
    rows = [row for row in TARGETS.values() if row.backend == "cuda" and (row.name == name or not row.hopper)]
    room = shared_bytes or 99 * KIB
    fitting = [row for row in rows if _capability(row.name) <= capability and row.shared_bytes <= room]
    if not fitting:
        smallest = min(rows, key=lambda row: row.shared_bytes)
        problem = f"need at least {smallest.name} with {smallest.shared_bytes // KIB} KiB of shared memory for a block"
        raise InvalidConfiguration(
            "kernels", f"{problem}; this device is {name} with {shared_bytes // KIB} KiB: set kernels = 'reference'"
        )
    like = max(fitting, key=lambda row: _capability(row.name))
    more = {"shared_bytes": shared_bytes or like.shared_bytes, **_nvidia(capability), "matrix": like.matrix}
    return replace(like, name=name, arch=capability, multiprocessors=multiprocessors, **more)


def _capability(name: str) -> int:
    return int(name.removeprefix("sm_"))
