"""cvt: conversions between integers and floats of all widths."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import torch

from tools.amdgcn.checks import Unsupported
from tools.amdgcn.values import Array

from .operands import KINDS, narrowed, put_result, source, widened
from .text import Instruction
from .unit import Code, Source, Unit

_ROUNDED: dict[str, Callable[[Array], Array]] = {"rni": np.rint, "rzi": np.trunc, "rmi": np.floor, "rpi": np.ceil}
_EIGHTS = {"e4m3x2": torch.float8_e4m3fn, "e5m2x2": torch.float8_e5m2}


def build(i: Instruction) -> Code:
    """Translate cvt."""
    to, of = i.parts[-2], i.parts[-1]
    if of in _EIGHTS:
        return put_result(i, _from_eights(i, to, _EIGHTS[of]))
    if to in _EIGHTS:
        return put_result(i, _to_eights(i, _EIGHTS[to]))
    if to in ("bf16x2", "f16x2"):
        if of != "f32":
            raise Unsupported(i.text)
        high, low = source(i.operands[1], "f32"), source(i.operands[2], "f32")
        kind = to.removesuffix("x2")

        def pair(u: Unit) -> Array:
            upper, lower = (narrowed(each(u), kind).astype(np.uint32) for each in (high, low))
            return upper << np.uint32(16) | lower

        return put_result(i, pair)
    return put_result(i, _single(i, to, of))


def _single(i: Instruction, to: str, of: str) -> Source:
    x = source(i.operands[1], of if of not in ("bf16", "f16") else "b16")

    def numbers(u: Unit) -> Array:
        return widened(x(u), of) if of in ("bf16", "f16") else x(u)

    if to in ("bf16", "f16"):
        if "rn" not in i.parts and (to, of) != ("bf16", "f16"):
            raise Unsupported(i.text)
        return lambda u: narrowed(numbers(u), to)
    if to == "tf32":
        if "rna" not in i.parts:
            raise Unsupported(i.text)
        bits = source(i.operands[1], "u32")
        return lambda u: bits(u) + np.uint32(0x1000) & np.uint32(0xFFFFE000)
    if to.startswith("f"):
        rounded = next((_ROUNDED[part] for part in i.parts if part in _ROUNDED), None)
        return lambda u: (rounded(numbers(u)) if rounded else numbers(u)).astype(KINDS[to])
    if of.startswith(("f", "b")):
        how = next(_ROUNDED[part] for part in i.parts if part in _ROUNDED)
        limits: Any = np.iinfo(KINDS[to])

        def whole(u: Unit) -> Array:
            found = np.nan_to_num(how(numbers(u).astype(np.float64)), nan=0.0)
            return np.asarray(np.clip(found, float(limits.min), float(limits.max)).astype(KINDS[to]))

        return whole
    if "sat" in i.parts:
        bounds: Any = np.iinfo(KINDS[to])
        return lambda u: np.clip(x(u).astype(np.int64), bounds.min, bounds.max).astype(KINDS[to])
    return lambda u: x(u).astype(KINDS[to])


def _from_eights(i: Instruction, to: str, dtype: torch.dtype) -> Source:
    if to != "f16x2":
        raise Unsupported(i.text)
    x = source(i.operands[1], "b16")

    def pair(u: Unit) -> Array:
        eights = torch.from_numpy(np.ascontiguousarray(x(u)).view(np.uint8)).view(dtype)
        return eights.to(torch.float16).numpy().view(np.uint32)

    return pair


def _to_eights(i: Instruction, dtype: torch.dtype) -> Source:
    if i.parts[-1] != "f32" or "satfinite" not in i.parts:
        raise Unsupported(i.text)
    high, low = source(i.operands[1], "f32"), source(i.operands[2], "f32")
    most = torch.finfo(dtype).max

    def pair(u: Unit) -> Array:
        both = np.stack(np.broadcast_arrays(low(u), high(u)), 1)
        return torch.from_numpy(both).clamp(-most, most).to(dtype).view(torch.uint8).numpy().view(np.uint16).ravel()

    return pair
