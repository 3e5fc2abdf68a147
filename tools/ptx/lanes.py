"""Instructions between the lanes of a warp."""

from __future__ import annotations

import numpy as np

from .arithmetic import TWO
from .operands import registers, source
from .text import Instruction, Register
from .unit import LANES, Code, Unit


def shuffle(i: Instruction) -> Code:
    """Translate shfl.sync."""
    how = i.parts[2]
    first = i.operands[0] if isinstance(i.operands[0], tuple) else (i.operands[0],)
    (target, *valid) = first
    x, by, clamp = source(i.operands[1], "b32"), source(i.operands[2], "u32"), source(i.operands[3], "u32")

    def shuffled(u: Unit) -> None:
        lane = u.threads % LANES
        distance, control = by(u).astype(np.int64), clamp(u).astype(np.int64)
        within = control >> 8 & 31
        last = lane & within | control & 31 & ~within
        sources = {
            "bfly": lane ^ distance,
            "idx": lane & within | distance & 31 & ~within,
            "down": lane + distance,
            "up": lane - distance,
        }[how]
        inside = sources >= last if how == "up" else sources <= last
        values = np.broadcast_to(x(u), lane.shape)
        place = np.where(inside, sources, lane)
        assert isinstance(target, Register)
        u.put(target, np.take_along_axis(u.by_warp(values), u.by_warp(place), 1).ravel())
        if valid and isinstance(valid[0], Register):
            u.put(valid[0], np.broadcast_to(inside, lane.shape))

    return shuffled


def elect(i: Instruction) -> Code:
    """Translate elect.sync: the first lane of each warp is elected."""
    pair = i.operands[0]
    assert isinstance(pair, tuple)

    def elected(u: Unit) -> None:
        if isinstance(pair[0], Register):
            u.put(pair[0], 0)
        assert isinstance(pair[1], Register)
        u.put(pair[1], u.threads % LANES == 0)

    return elected


def vote(i: Instruction) -> Code:
    """Translate vote.sync: the predicates of a warp's executing lanes, combined."""
    how, x = i.parts[2], source(i.operands[1], "pred")
    (target,) = registers(i.operands[0])

    def voted(u: Unit) -> None:
        asked, votes = u.by_warp(u.mask), u.by_warp(u.mask & x(u))
        if how == "ballot":
            found = (votes.astype(np.uint64) << np.arange(LANES, dtype=np.uint64)).sum(1).astype(np.uint32)
        else:
            found = {"any": votes.any(1), "all": (votes | ~asked).all(1)}[how]
        u.put(target, np.repeat(found, LANES))

    return voted


def reduce(i: Instruction) -> Code:
    """Translate redux.sync: one result of the executing lanes of a warp."""
    how, kind = i.parts[2], i.parts[3]
    x, combine = source(i.operands[1], kind), {"add": np.add, "xor": np.bitwise_xor, **TWO}[how]
    (target,) = registers(i.operands[0])

    def reduced(u: Unit) -> None:
        values, warps = np.broadcast_to(x(u), u.mask.shape), u.by_warp(u.mask)
        found = np.zeros(len(warps), values.dtype)
        for warp, lanes in enumerate(warps):
            if lanes.any():
                found[warp] = combine.reduce(u.by_warp(values)[warp][lanes])  # type: ignore[attr-defined]
        u.put(target, np.repeat(found, LANES).view(np.uint32))

    return reduced
