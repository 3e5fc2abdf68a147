"""Parser of a kernel's assembly text: instructions, labels, directives, and the layout of its arguments."""

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
# gfx12 spellings -> gfx11 spellings of the same instructions.
_GFX12 = (
    (re.compile(r"_num_f"), "_f"),
    (re.compile(r"^s_(add|sub)_co_([iu]32)"), r"s_\1_\2"),
    (re.compile(r"^s_add_co_ci_u32"), "s_addc_u32"),
    (re.compile(r"^s_sub_co_ci_u32"), "s_subb_u32"),
    (re.compile(r"^v_mad_co_"), "v_mad_"),
)


@dataclass(frozen=True)
class Isa:
    """An instruction set, named by LLVM's architecture (`gfx942`)."""

    arch: str

    @property
    def gfx9(self) -> bool:
        """Return whether the target is of the gfx9 family (wave64)."""
        return self.arch.startswith("gfx9")

    @property
    def gfx12(self) -> bool:
        """Return whether the target is of the gfx12 family."""
        return self.arch.startswith("gfx12")

    @property
    def lanes(self) -> int:
        """Return the lanes of a wave."""
        return 64 if self.gfx9 else 32

    @property
    def mask_bits(self) -> int:
        """Return the bits of a lane mask: the width of the register, or pair of registers, that holds it."""
        return self.lanes


@dataclass(frozen=True)
class Instruction:
    """One parsed instruction.

    Attributes:
        name: the mnemonic as written; on gfx12, translated to its gfx11 spelling.
        operands: the text of each operand.
        modifiers: numbers, lists of numbers, words, or True for a flag.
        text: the whole line.
        second: the second instruction of a pair (v_dual_...), or None.
    """

    name: str
    operands: tuple[str, ...]
    modifiers: dict[str, Any]
    text: str
    second: Instruction | None = None


@dataclass(frozen=True)
class Argument:
    """An argument of a kernel.

    Attributes:
        offset: bytes from the start of the argument block.
        size: bytes.
        kind: the `.value_kind` of LLVM's AMDGPU usage guide.
    """

    offset: int
    size: int
    kind: str


@dataclass(frozen=True)
class Assembly:
    """A parsed kernel.

    Attributes:
        name: the kernel's name.
        isa: its instruction set.
        instructions: in program order.
        labels: name -> index in `instructions`.
        directives: the numeric `.amdhsa_...` directives.
        arguments: in the order of the metadata.
    """

    name: str
    isa: Isa
    instructions: tuple[Instruction, ...]
    labels: dict[str, int]
    directives: dict[str, int]
    arguments: tuple[Argument, ...]

    @property
    def scratch_bytes(self) -> int:
        """Return the bytes of scratch memory per lane."""
        return self.directives.get("private_segment_fixed_size", 0)


def parse(text: str, arch: str) -> Assembly:
    """Parse the assembly of one kernel.

    Args:
        text: the assembly, Triton's `amdgcn` stage.
        arch: the architecture in LLVM's spelling.

    Returns:
        The parsed kernel.
    """
    isa = Isa(arch)
    found = re.search(r"\.amdhsa_kernel (\S+)", text)
    assert found, "no .amdhsa_kernel directive in the assembly"
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
    """Parse one instruction, or a pair joined by `::`.

    Args:
        line: the text, words one space apart.
        isa: the instruction set.

    Returns:
        The parsed instruction; for a pair, the first one, with the other as its `second`.
    """
    if " :: " in line:
        first, second = (instruction(part, isa) for part in line.split(" :: "))
        return Instruction(first.name, first.operands, first.modifiers, line, second)
    name, _, rest = line.partition(" ")
    for pattern, usual in _GFX12 if isa.gfx12 else ():
        name = pattern.sub(usual, name)
    operands, modifiers = _split(rest)
    return Instruction(name, tuple(operands), modifiers, line)


def _split(rest: str) -> tuple[list[str], dict[str, Any]]:
    """Split into operands and modifiers (modifiers follow the operands without commas)."""
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
    """Split at commas outside brackets."""
    parts, depth, part = [], 0, ""
    for character in text:
        depth += (character in "[(") - (character in ")]")
        if character == "," and depth == 0:
            parts.append(part.strip())
            part = ""
        else:
            part += character
    return [*parts, part.strip()] if part.strip() else parts
