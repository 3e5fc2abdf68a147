"""Triton driver for an absent Hopper GPU: Triton specialises and compiles kernels for it, and `machine` runs them.

Unset TRITON_INTERPRET: with it, Triton makes kernels plain Python functions and never reaches the driver.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Iterator
from typing import Any

import torch

from tools.amdgcn import driver
from tools.amdgcn.checks import Findings

from .barriers import Descriptor
from .machine import GROUP, Program, launch


class Emulated(driver.Emulated):
    """Context manager that makes Triton launch kernels for Hopper on the interpreter.

    Attributes:
        together: see `machine.launch`.
    """

    def __init__(
        self,
        arch: str = "sm_90",
        order: str = "late",
        seed: int = 0,
        edit: Callable[[str], str] = str,
        together: int = GROUP,
    ) -> None:
        super().__init__(arch, order, seed, edit)
        self.together = together
        self._parsed: dict[str, Program] = {}

    def run(self, metadata: Any, types: list[str], grid: tuple[int, int, int], values: tuple[Any, ...]) -> None:
        """Run one launch; see `tools.amdgcn.driver.Emulated.run`."""
        program = self._parsed.get(metadata.hash)
        if program is None:
            program = self._parsed[metadata.hash] = Program(self.edit(self._compiled[metadata.hash].asm["ptx"]))
        given = [(kind, value) for kind, value in zip(types, values, strict=True) if kind != "constexpr"]
        described = iter(getattr(metadata, "tensordesc_meta", None) or ())
        block, regions, descriptors = lay_out(program, given, described)
        findings = Findings()
        findings.instructions = launch(
            program, grid, block, descriptors, regions, metadata.shared, self.order, self.seed, self.together
        )
        self.launches.append(driver.Launched(metadata.name, grid, metadata.num_warps, findings))


def lay_out(
    program: Program, values: list[tuple[str, Any]], described: Iterator[dict[str, Any]]
) -> tuple[bytes, list[tuple[int, int]], dict[int, Descriptor]]:
    """Lay out the parameters of a launch.

    Args:
        program: the kernel.
        values: (type, value) of each argument.
        described: the compiler's metadata for each tensor descriptor.

    Returns:
        The parameters, (address, bytes) of each storage, and the descriptors by the offset of their parameter.
    """
    block = bytearray(program.size)
    slots = iter(program.kernel.parameters)
    regions: list[tuple[int, int]] = []
    descriptors: dict[int, Descriptor] = {}

    def put(form: str, value: Any) -> None:
        slot = next(slots)
        data = struct.pack(form, value)
        assert len(data) == slot.size, (slot, form)
        block[slot.offset : slot.offset + slot.size] = data

    def reach(tensor: torch.Tensor) -> None:
        storage = tensor.untyped_storage()
        regions.append((storage.data_ptr(), storage.nbytes()))

    for kind, value in values:
        if kind.startswith("tensordesc"):
            meta, slot, tensor = next(described), next(slots), value.base
            assert slot.size == 128, slot
            descriptors[slot.offset] = Descriptor(
                base=tensor.data_ptr(),
                item=tensor.element_size(),
                shape=tuple(value.shape),
                strides=tuple(value.strides),
                box=tuple(meta["block_size"]),
                swizzle=meta["swizzle"],
                nan=value.padding == "nan",
            )
            assert not meta["fp4_padded"] and meta["elem_size"] == tensor.element_size(), meta
            reach(tensor)
            for size in value.shape:
                put("<i", size)
            for stride in value.strides:
                put("<q", stride)
        elif kind.startswith("*"):
            if value is not None:
                reach(value)
            put("<Q", 0 if value is None else value.data_ptr())
        else:
            put(driver.FORMATS[kind], value)
    for slot in slots:  # scratch, which no kernel here uses
        assert slot.size == 8, slot
    return bytes(block), regions, descriptors
