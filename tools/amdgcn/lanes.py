"""Instructions that read the registers of other lanes."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from .assembly import Instruction, Isa
from .checks import Unsupported
from .operands import INTEGER, SINGLE, scalar_source, scalar_target, source, vector_register
from .tables import FLOAT32, INTEGER32
from .values import U32, U64, Array, as_f32, bits32, fma, set_bits
from .wave import Code, Wave


def build(name: str, instruction: Instruction) -> Code | None:
    """Translate a cross-lane instruction, or return None if `name` is none."""
    made = _FORMS.get(name)
    return None if made is None else made(instruction)


def build_dpp(name: str, instruction: Instruction, isa: Isa) -> Code:
    """Translate a DPP instruction: the first operand comes from a lane of the same row of 16, or of an earlier row.

    Args:
        name: the mnemonic without `v_` and its encoding suffix.
        instruction: the parsed instruction.
        isa: the instruction set.

    Returns:
        A function that executes the instruction on a wave.
    """
    lane = np.arange(isa.lanes)
    row, modifiers = lane // 16, instruction.modifiers
    from_lane, exists = _dpp_lanes(instruction, lane)
    from_lane = np.where(exists, from_lane, 0)
    enabled = ((modifiers["row_mask"] >> row) & 1).astype(bool)
    enabled &= ((modifiers["bank_mask"] >> (lane % 16 // 4)) & 1).astype(bool)
    zero_outside = modifiers.get("bound_ctrl", 0)
    kind = SINGLE if name in FLOAT32 or name == "fmac_f32" else INTEGER
    target, first = vector_register(instruction.operands[0]), source(instruction.operands[1], kind)
    others = [source(text, kind) for text in instruction.operands[2:]]
    calculate = _dpp_operation(name, instruction)

    def run(w: Wave) -> None:
        valid = exists & w.m[from_lane]
        moved = np.where(valid, first(w)[from_lane], U32(0))
        result = calculate(w.v[target], moved, *(read(w) for read in others))
        written = w.m & enabled
        np.copyto(w.v[target], result, where=written if zero_outside else written & valid)

    return run


def _dpp_operation(name: str, instruction: Instruction) -> Callable[..., Array]:
    """Return the operation as a function of the old destination and the operands."""
    if name == "fmac_f32":
        return lambda before, a, b: bits32(fma(as_f32(a), as_f32(b), as_f32(before)))
    if name in FLOAT32:
        function = FLOAT32[name][1]
        return lambda before, *operands: bits32(function(*(as_f32(x) for x in operands)))
    if name in INTEGER32:
        of_integers = INTEGER32[name][1]
        return lambda before, *operands: of_integers(*operands)
    raise Unsupported(instruction.text)


def _dpp_lanes(instruction: Instruction, lane: Array) -> tuple[Array, Array]:
    """Return the source lane of each lane, and whether that source exists."""
    modifiers = instruction.modifiers
    row, place = lane // 16, lane % 16
    always = np.ones(len(lane), bool)
    if "quad_perm" in modifiers:
        return (lane & ~3) + np.array(modifiers["quad_perm"])[lane & 3], always
    if "row_shr" in modifiers:
        return lane - modifiers["row_shr"], place >= modifiers["row_shr"]
    if "row_shl" in modifiers:
        return lane + modifiers["row_shl"], place + modifiers["row_shl"] < 16
    if "row_ror" in modifiers:
        return row * 16 + ((place - modifiers["row_ror"]) & 15), always
    if "row_mirror" in modifiers:
        return row * 16 + 15 - place, always
    if "row_half_mirror" in modifiers:
        return (lane & ~7) + 7 - (lane & 7), always
    if modifiers.get("row_bcast") == 15:
        return row * 16 - 1, row >= 1
    if "row_bcast" in modifiers:
        return np.full(len(lane), 31), lane >= 32
    if "row_share" in modifiers:
        return row * 16 + modifiers["row_share"], always
    if "row_xmask" in modifiers:
        return row * 16 + (place ^ modifiers["row_xmask"]), always
    raise Unsupported(instruction.text)


def _read_first(instruction: Instruction) -> Code:
    put, read = scalar_target(instruction.operands[0]), source(instruction.operands[1])

    def first(w: Wave) -> None:
        lane = (w.exec & -w.exec).bit_length() - 1 if w.exec else 0
        put(w, int(w.spread(read(w))[lane]))

    return first


def _read_lane(instruction: Instruction) -> Code:
    put, read = scalar_target(instruction.operands[0]), source(instruction.operands[1])
    lane = scalar_source(instruction.operands[2])
    return lambda w: put(w, int(read(w)[lane(w) % w.lanes]))


def _write_lane(instruction: Instruction) -> Code:
    target = vector_register(instruction.operands[0])
    read, lane = (scalar_source(text) for text in instruction.operands[1:3])

    def write(w: Wave) -> None:
        w.v[target][lane(w) % w.lanes] = read(w)

    return write


def _count_below(first: int) -> Callable[[Instruction], Code]:
    """Count the set mask bits of the lanes before each lane; bit 0 of the mask stands for lane `first`."""

    def make(instruction: Instruction) -> Code:
        target, a, b = vector_register(instruction.operands[0]), *(source(x) for x in instruction.operands[1:3])

        def count(w: Wave) -> None:
            below = (U64(1) << np.clip(w.lane - first, 0, 32).astype(U64)) - U64(1)
            w.put(target, set_bits(w.spread(a(w)).astype(U64) & below) + b(w))

        return count

    return make


def _swap(size: int) -> Callable[[Instruction], Code]:
    """Swap the odd groups of `size` lanes of one register with the even groups of the other."""

    def make(instruction: Instruction) -> Code:
        a, b = (vector_register(text) for text in instruction.operands)
        even = np.arange(64)[(np.arange(64) // size) % 2 == 0]

        def swap(w: Wave) -> None:
            if not w.full:
                raise Unsupported(instruction.text)
            w.v[a][even + size], w.v[b][even] = w.v[b][even].copy(), w.v[a][even + size].copy()

        return swap

    return make


def _permute_rows(crosswise: int) -> Callable[[Instruction], Code]:
    """Permute lanes within a row of 16, four bits per lane; with `crosswise`, read the other row of the pair."""

    def make(instruction: Instruction) -> Code:
        if instruction.modifiers.get("op_sel", [0])[0] != 1:  # without op_sel[0], inactive lanes are not read
            raise Unsupported(instruction.text)
        target, a = vector_register(instruction.operands[0]), source(instruction.operands[1])
        low, high = (scalar_source(text) for text in instruction.operands[2:4])

        def permute(w: Wave) -> None:
            selectors = low(w) | high(w) << 32
            places = np.array([(selectors >> (4 * place)) & 15 for place in range(16)])
            w.put(target, a(w)[((w.lane >> 4) ^ crosswise) * 16 + places[w.lane & 15]])

        return permute

    return make


_FORMS: dict[str, Callable[[Instruction], Code]] = {
    "readfirstlane_b32": _read_first,
    "readlane_b32": _read_lane,
    "writelane_b32": _write_lane,
    "mbcnt_lo_u32_b32": _count_below(0),
    "mbcnt_hi_u32_b32": _count_below(32),
    "permlane16_swap_b32": _swap(16),
    "permlane32_swap_b32": _swap(32),
    "permlane16_b32": _permute_rows(0),
    "permlanex16_b32": _permute_rows(1),
}
