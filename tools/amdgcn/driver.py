"""Triton driver for an absent GPU: Triton specialises and compiles kernels for it, and `machine` runs them.

Unset TRITON_INTERPRET: with it, Triton makes kernels plain Python functions and never reaches the driver.
"""

from __future__ import annotations

import itertools
import struct
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Self

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.backends.driver import DriverBase
from triton.compiler import CompiledKernel

from kvforge.worker.device.device import Device
from kvforge.worker.device.targets import TARGETS
from tools.aot.specialise import gpu_target

from .assembly import Argument
from .checks import Findings
from .machine import Program, launch

FORMATS = {
    "i1": "<i",
    "i8": "<b",
    "i16": "<h",
    "i32": "<i",
    "i64": "<q",
    "fp32": "<f",
    "fp64": "<d",
    "u1": "<I",
    "u8": "<B",
    "u16": "<H",
    "u32": "<I",
    "u64": "<Q",
}


@dataclass(frozen=True)
class Launched:
    """A finished launch of a kernel."""

    kernel: str
    grid: tuple[int, int, int]
    warps: int
    findings: Findings


class Emulated:
    """Context manager that makes Triton launch kernels on the interpreter.

    Attributes:
        arch: the architecture in LLVM's spelling.
        order: the order of waves and workgroups, see `machine.launch`.
        seed: the seed of a mixed order.
        edit: transforms the assembly before it is parsed, to plant faults.
        launches: every launch so far.
    """

    def __init__(self, arch: str, order: str = "up", seed: int = 0, edit: Callable[[str], str] = str) -> None:
        self.arch, self.order, self.seed, self.edit = arch, order, seed, edit
        self.launches: list[Launched] = []
        self._compiled: dict[str, CompiledKernel] = {}
        self._programs: dict[str, Program] = {}

    def __enter__(self) -> Self:
        self._original = CompiledKernel.__init__
        original, compiled = self._original, self._compiled

        def remember(kernel: Any, *arguments: Any) -> None:
            original(kernel, *arguments)
            compiled[kernel.metadata.hash] = kernel

        CompiledKernel.__init__ = remember
        self._before = triton.runtime.driver._active  # reading the public property would look for a GPU
        triton.runtime.driver.set_active(_Driver(self))
        return self

    def __exit__(self, *_: object) -> None:
        CompiledKernel.__init__ = self._original
        triton.runtime.driver._active = self._before

    def device(self, multiprocessors: int) -> Device:
        """Return a CPU device that reports this GPU architecture and the given number of compute units."""
        arch = self.arch

        class Gpu(Device):
            @property
            def architecture(self) -> tuple[str, int]:
                return arch, multiprocessors

            @property
            def runs_kernels(self) -> bool:
                return True

            @property
            def widens_products(self) -> bool:
                return False

        return Gpu("cpu", torch.device("cpu"), f"emulated {arch}")

    def run(self, metadata: Any, types: list[str], grid: tuple[int, int, int], values: tuple[Any, ...]) -> None:
        """Run one launch on the interpreter and record it in `launches`.

        Args:
            metadata: the metadata of the compiled kernel.
            types: Triton's type of each value.
            grid: workgroups in x, y and z.
            values: the arguments, constants included.
        """
        program = self._programs.get(metadata.hash)
        if program is None:
            assembly = self._compiled[metadata.hash].asm["amdgcn"]
            program = self._programs[metadata.hash] = Program(self.edit(assembly), metadata.target.arch)
        threads = metadata.num_warps * metadata.target.warp_size
        given = [(kind, value) for kind, value in zip(types, values, strict=True) if kind != "constexpr"]
        size = program.assembly.directives.get("kernarg_size", 0)
        block, regions = lay_out(program.assembly.arguments, size, given, grid, threads)
        findings = launch(program, grid, threads, block, regions, metadata.shared, self.order, self.seed)
        self.launches.append(Launched(metadata.name, grid, metadata.num_warps, findings))


def lay_out(
    arguments: tuple[Argument, ...],
    size: int,
    values: list[tuple[str, Any]],
    grid: tuple[int, int, int],
    threads: int,
) -> tuple[bytes, list[tuple[int, int]]]:
    """Lay out the argument block of a launch.

    Args:
        arguments: the slots from the kernel's metadata.
        size: the least size of the block in bytes.
        values: (type, value) of each argument.
        grid: workgroups in x, y and z.
        threads: threads of a workgroup.

    Returns:
        The block, and (address, bytes) of each storage that its pointers refer to.
    """
    block = bytearray(max([size, *(each.offset + each.size for each in arguments)]))
    regions: list[tuple[int, int]] = []
    slots = iter([each for each in arguments if not each.kind.startswith("hidden")])
    for kind, value in values:
        slot = next(slots)
        if kind.startswith("*"):
            assert slot.size == 8 and slot.kind == "global_buffer", (kind, slot)
            if value is None:
                continue
            storage = value.untyped_storage()
            regions.append((storage.data_ptr(), storage.nbytes()))
            block[slot.offset : slot.offset + 8] = struct.pack("<Q", value.data_ptr())
        else:
            data = struct.pack(FORMATS[kind], value)
            assert slot.kind == "by_value" and len(data) == slot.size, (kind, slot)
            block[slot.offset : slot.offset + slot.size] = data
    for slot in slots:  # scratch pointers: no kernel here uses them
        assert slot.kind == "global_buffer", slot
    hidden = {f"hidden_block_count_{axis}": count for axis, count in zip("xyz", grid, strict=True)}
    hidden |= {
        "hidden_group_size_x": threads,
        "hidden_group_size_y": 1,
        "hidden_group_size_z": 1,
        "hidden_grid_dims": 3,
    }
    for each in arguments:  # hidden arguments, which the HIP runtime fills in
        if each.kind in hidden:
            block[each.offset : each.offset + each.size] = hidden[each.kind].to_bytes(each.size, "little")
    return bytes(block), regions


class _Launcher:
    """The launcher object that Triton creates for each compiled kernel."""

    def __init__(self, emulated: Emulated, source: Any, metadata: Any) -> None:
        self._emulated, self._types, self._metadata = emulated, list(source.signature.values()), metadata

    def __call__(self, x: int, y: int, z: int, *rest: Any) -> None:
        self._emulated.run(self._metadata, self._types, (x, y, z), rest[6:])


class _Utils:
    def load_binary(self, name: str, kernel: bytes, shared: int, device: int) -> tuple[int, int, int, int, int]:
        return 1, 1, 0, 0, 1024  # module, function, registers, spills, threads per block

    def __init__(self, shared_bytes: int) -> None:
        self._shared_bytes = shared_bytes

    def get_device_properties(self, device: int) -> dict[str, int]:
        return {"max_shared_mem": self._shared_bytes, "multiprocessor_count": 1, "warpSize": 64}


# Triton caches kernels with their launcher per device, so each driver needs its own number
_devices = itertools.count()


class _Driver(DriverBase):  # type: ignore[misc]  # Triton has no types
    def __init__(self, emulated: Emulated) -> None:
        super().__init__()
        target = TARGETS[emulated.arch]
        self._target: GPUTarget = gpu_target(target)
        self._device = next(_devices)
        self.utils = _Utils(target.shared_bytes)
        self.launcher_cls = lambda source, metadata: _Launcher(emulated, source, metadata)

    @classmethod
    def is_active(cls) -> bool:
        return True

    def map_python_to_cpp_type(self, kind: str) -> str:
        return kind

    def get_current_target(self) -> GPUTarget:
        return self._target

    def get_active_torch_device(self) -> torch.device:
        return torch.device("cpu")

    def get_benchmarker(self) -> Any:
        raise NotImplementedError

    def get_current_device(self) -> int:
        return self._device

    def set_current_device(self, device: int) -> None:
        pass

    def get_current_stream(self, device: int = 0) -> int:
        return 0

    def get_device_interface(self) -> Any:
        return torch.cpu
