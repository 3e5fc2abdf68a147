"""Configurations of a kernel, and their compilation for a GPU that is not present.

The assembly shows the resources that a kernel needs: registers, spilled registers, local (private) memory, shared
memory (LDS) and matrix instructions. Triton includes its compilers, so no GPU is needed.
A configuration is the compilation that Triton's launcher performs for a launch (see `specialise`).
"""

from __future__ import annotations

import re
import subprocess
import time
from collections.abc import Hashable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import triton
from triton.compiler import ASTSource
from triton.experimental.gluon._runtime import GluonASTSource

from kvforge.worker.device.target import Target
from kvforge.worker.kernels.launching import LaunchSettings

from .specialise import Specialisation, gpu_target

F32, F16, BF16, I8, FP8 = torch.float32, torch.float16, torch.bfloat16, torch.int8, torch.float8_e4m3fn
DTYPE_NAMES = {F32: "fp32", F16: "fp16", BF16: "bf16", I8: "i8", FP8: "fp8e4nv"}
# From this size on, AMD's compiler addresses a storage differently.
FAR_BYTES = 1 << 31
ADDRESSING = (
    "HEADS",
    "KV_HEADS",
    "HEAD_SIZE",
    "BLOCK_SIZE",
    "PACKS",
    "PACK",
    "POOL_BLOCK",
    "HEAD",
    "STEPS",
    "LAST",
    "SHARE",
    "LATENT",
    "ROPE",
    "WIDTH",
)  # constants of address arithmetic, which are not factors
# Waits for all stores on gfx9, gfx11 and gfx12.
_WAIT = r"s_waitcnt vmcnt\(0\)|s_waitcnt_vscnt null, 0x0|s_wait_storecnt(_dscnt)? 0x0"


@dataclass(frozen=True)
class Configuration:
    """One compilation. label: for people. matrix: whether it has matrix products."""

    label: str
    specialisation: Specialisation
    matrix: bool

    def kind(self) -> Hashable:
        """Return a key that ignores constants of address arithmetic."""
        return self.specialisation.key(ADDRESSING), self._is_padded()

    def _is_padded(self) -> bool:
        names = self.specialisation.kernel.arg_names
        constants = {names[place[0]]: value for place, value in self.specialisation.constants.items()}
        if "ROPE" in constants:
            return any(constants[name] != constants[f"{name}_TILE"] for name in ("LATENT", "ROPE"))
        head_size = constants.get("HEAD_SIZE", constants.get("HEAD"))
        tile = constants.get("HEAD_TILE", constants.get("HEAD_PAD", head_size))
        return bool(head_size != tile + constants.get("REST", 0)) if head_size is not None else False


@dataclass(frozen=True)
class Compiled:
    """Resources of a compiled kernel.

    Attributes:
        target: Name of the architecture.
        label: Label of the configuration.
        registers: Vector registers of a thread.
        spills: Vector registers spilled to memory.
        scalar_spills: Scalar registers spilled to vector registers.
        local_bytes: Private memory of a thread.
        unordered: Stores that may still be in flight after the block's barrier before an atomic operation, so that
            another block could count them as done. Only AMD's barriers, which wait for shared memory alone, allow it.
        shared_bytes: Shared memory (LDS) of a block.
        matrix: Matrix instructions.
        wants_matrix: Whether there must be some.
        seconds: Time of the compilation.
    """

    target: str
    label: str
    registers: int
    spills: int
    scalar_spills: int
    local_bytes: int
    unordered: int
    shared_bytes: int
    matrix: int
    wants_matrix: bool
    seconds: float

    def line(self) -> str:
        """Return a line for people."""
        return (
            f"{self.target:8} {self.label:52} registers {self.registers:3}  "
            f"spills {self.spills:3} + {self.scalar_spills:3}  "
            f"local {self.local_bytes:4}  shared {self.shared_bytes:6}  matrix {self.matrix:3}  {self.seconds:.1f} s"
        )


def distinct(made: Iterable[Configuration]) -> list[Configuration]:
    """Return the first configuration of each kind."""
    kinds: dict[Hashable, Configuration] = {}
    for each in made:
        kinds.setdefault(each.kind(), each)
    return list(kinds.values())


def meta_tensor(*shape: int, dtype: torch.dtype) -> torch.Tensor:
    """Return a tensor without memory: only shape, dtype, and the extent of its storage."""
    return torch.empty(shape, dtype=dtype, device="meta")


def launched_on(target: Target) -> LaunchSettings:
    """Return how a worker launches kernels on `target`."""
    return LaunchSettings(target, target.chained)


def compile_one(configuration: Configuration, target: Target) -> Compiled:
    """Compile a configuration.

    Raises:
        Exception: Any error of the compiler.
    """
    wanted = configuration.specialisation
    language = GluonASTSource if wanted.kernel.is_gluon() else ASTSource
    source = language(wanted.kernel, wanted.types, wanted.constants, wanted.attributes)
    began = time.perf_counter()
    kernel = triton.compile(source, target=gpu_target(target), options=wanted.options)
    seconds = time.perf_counter() - began
    usage = _hip_usage(kernel.asm) if target.backend == "hip" else _cuda_usage(kernel.asm)
    assembly = kernel.asm["amdgcn" if target.backend == "hip" else "ptx"]
    matrix = len(re.findall(rf"\b(?:{target.matrix})", assembly)) if target.matrix else 0
    shared = int(kernel.metadata.shared)
    unordered = _unordered_stores(assembly) if target.backend == "hip" else 0
    return Compiled(target.name, configuration.label, *usage, unordered, shared, matrix, configuration.matrix, seconds)


def _hip_usage(asm: dict[str, Any]) -> tuple[int, int, int, int]:
    """Return vector registers with accumulators, vector spills, scalar spills and private bytes, from the metadata."""
    assembly = asm["amdgcn"]

    def number(name: str) -> int:
        found = re.search(rf"^\s*\.{name}:\s*(\d+)", assembly, re.MULTILINE)
        assert found, f"no {name} in the assembly's metadata"
        return int(found[1])

    names = "vgpr_count", "vgpr_spill_count", "sgpr_spill_count", "private_segment_fixed_size"
    registers, spills, scalar_spills, local_bytes = map(number, names)
    return registers, spills, scalar_spills, local_bytes


def _unordered_stores(assembly: str) -> int:
    """Count stores before a barrier before an atomic operation that no instruction waits for in between."""
    lines = [line.strip() for line in assembly.splitlines()]
    found = 0
    for at, line in enumerate(lines):
        if not re.match(r"(global|flat|buffer)_atomic_", line):
            continue
        before = lines[:at]
        barrier = max((i for i, each in enumerate(before) if each.startswith("s_barrier")), default=0)
        waited = max((i for i, each in enumerate(before[:barrier]) if re.match(_WAIT, each)), default=0)
        found += sum(bool(re.match(r"(global|flat|buffer)_store_", each)) for each in before[waited:])
    return found


def _cuda_usage(asm: dict[str, Any]) -> tuple[int, int, int, int]:
    """Return registers, spills (in registers' worth of local memory) and local bytes, from the binary."""
    tool = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / "cuobjdump"
    path = Path(triton.knobs.cache.dir) / f"aot-{id(asm)}.cubin"
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(asm["cubin"])
    try:
        usage = subprocess.run(
            [str(tool), "--dump-resource-usage", str(path)], capture_output=True, text=True, check=True, timeout=60
        ).stdout
    finally:
        path.unlink()
    registers, stack, local = (int(re.findall(rf"\b{name}:(\d+)", usage)[-1]) for name in ("REG", "STACK", "LOCAL"))
    return registers, (stack + local) // 4, 0, stack + local
