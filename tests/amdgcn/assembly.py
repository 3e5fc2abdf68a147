"""The text of a kernel in parts: instructions, labels, directives, and where its arguments lie."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Any

NUMBER = re.compile(r"-?(0x)?[0-9a-f]+")
_MODIFIER = re.compile(
    r"(offset|offset0|offset1|op_sel|op_sel_hi|neg_lo|neg_hi|quad_perm|row_shr|row_shl|row_ror|row_bcast|row_mask|row_share"
    r"|row_xmask|bitop3|bank_mask|bound_ctrl|dst_sel|dst_unused|src0_sel|src1_sel|scope|th|mul|div|cbsz|abid|blgp"
    r"|wait_exp|fi):(.+)"
)
_FLAGS = frozenset(("clamp", "glc", "slc", "dlc", "sc0", "sc1", "nt", "offen", "idxen", "gds", "lds", "abs", "scc"))
_FLAGS |= {"row_mirror", "row_half_mirror"}
# Names of gfx12 for what gfx11 has under others.
_GFX12 = (
    (re.compile(r"_num_f"), "_f"),
    (re.compile(r"^s_(add|sub)_co_([iu]32)"), r"s_\1_\2"),
    (re.compile(r"^s_add_co_ci_u32"), "s_addc_u32"),
    (re.compile(r"^s_sub_co_ci_u32"), "s_subb_u32"),
    (re.compile(r"^v_mad_co_"), "v_mad_"),
)


@dataclass(frozen=True)
class Isa:
    """arch: as LLVM names it."""

    arch: str

    @property
    def gfx9(self) -> bool:
        return self.arch.startswith("gfx9")

    @property
    def gfx12(self) -> bool:
        return self.arch.startswith("gfx12")

    @property
    def lanes(self) -> int:
        return 64 if self.gfx9 else 32

    @property
    def mask_bits(self) -> int:
        """Of a register, or a pair, that holds a bit for each lane."""
        return self.lanes


@dataclass(frozen=True)
class Instruction:
    """name: without an encoding's suffix on gfx12, else as written. text: all of it.

    modifiers: numbers, lists of them, words, or True for a flag. second: the other half of a pair (v_dual_...).
    """

    name: str
    operands: tuple[str, ...]
    modifiers: dict[str, Any]
    text: str
    second: Instruction | None = None


@dataclass(frozen=True)
class Argument:
    """Of a kernel. offset, size: bytes, in the block of arguments. kind: see `.value_kind` in LLVM's AMDGPU usage."""

    offset: int
    size: int
    kind: str


@dataclass(frozen=True)
class Assembly:
    """directives: of `.amdhsa_...`, those that are numbers. labels: name -> place in `instructions`."""

    name: str
    isa: Isa
    instructions: tuple[Instruction, ...]
    labels: dict[str, int]
    directives: dict[str, int]
    arguments: tuple[Argument, ...]

    @property
    def scratch_bytes(self) -> int:
        """Of each lane."""
        return self.directives.get("private_segment_fixed_size", 0)


def parse(text: str, arch: str) -> Assembly:
    """text: what Triton calls `amdgcn`, of one kernel."""
    isa = Isa(arch)
    found = re.search(r"\.amdhsa_kernel (\S+)", text)
    assert found, "no kernel"
    directives = re.findall(r"\.amdhsa_(\w+) (\S+)\s*$", text, re.MULTILINE)
    instructions: list[Instruction] = []
    labels: dict[str, int] = {}
    for raw in text[text.index(f"\n{found[1]}:") : text.index(".amdhsa_kernel")].splitlines():
        line = re.sub(r"\s+", " ", raw.split(";")[0].strip())
        label = re.fullmatch(r"([.\w$]+):", line)
        if label:
            labels[label[1]] = len(instructions)
        elif line and not line.startswith((".", "//")):
            instructions.append(instruction(line, isa))
    return Assembly(
        found[1],
        isa,
        tuple(instructions),
        labels,
        {name: int(value, 0) for name, value in directives if NUMBER.fullmatch(value)},
        tuple(_arguments(text)),
    )


def _arguments(text: str) -> list[Argument]:
    metadata = text[text.index("amdhsa.kernels:") :]
    listed = metadata[metadata.index(".args:") : metadata.index(".kernarg_segment_align")]

    def field(entry: str, name: str) -> str:
        found = re.search(rf"\.{name}:\s+(\S+)", entry)
        assert found, (name, entry)
        return found[1]

    entries = re.split(r"\n      - ", listed)[1:]
    return [
        Argument(int(field(each, "offset")), int(field(each, "size")), field(each, "value_kind")) for each in entries
    ]


def instruction(line: str, isa: Isa) -> Instruction:
    """line: one instruction, or two with `::` between them, words one space apart."""
    if " :: " in line:
        first, second = (instruction(part, isa) for part in line.split(" :: "))
        return Instruction(first.name, first.operands, first.modifiers, line, second)
    name, _, rest = line.partition(" ")
    for pattern, usual in _GFX12 if isa.gfx12 else ():
        name = pattern.sub(usual, name)
    operands, modifiers = _split(rest)
    return Instruction(name, tuple(operands), modifiers, line)


def _split(rest: str) -> tuple[list[str], dict[str, Any]]:
    """Operands, and modifiers, which stand behind them without commas."""
    operands: list[str] = []
    modifiers: dict[str, Any] = {}
    for part in _between_commas(rest):
        words = re.split(r" (?=offset)", part) if "swizzle(" in part else part.split(" ")
        kept: list[str] = []
        for word in words:
            found = _MODIFIER.fullmatch(word)
            if found:
                modifiers[found[1]] = _value(found[2])
            elif word in _FLAGS:
                modifiers[word] = True
            elif word:
                kept.append(word)
        if kept:
            operands.append(" ".join(kept))
    return operands, modifiers


def _value(text: str) -> int | list[int] | str:
    if text.startswith("["):
        return [int(number) for number in text[1:-1].split(",")]
    return int(text, 0) if NUMBER.fullmatch(text) else text


def _between_commas(text: str) -> list[str]:
    """Commas within brackets separate nothing."""
    parts, depth, part = [], 0, ""
    for character in text:
        depth += (character in "[(") - (character in ")]")
        if character == "," and depth == 0:
            parts.append(part.strip())
            part = ""
        else:
            part += character
    return [*parts, part.strip()] if part.strip() else parts
