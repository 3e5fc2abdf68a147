"""A configuration of a kernel, and compiling it for a GPU that is not here.

From the assembly is read what it needs: registers, spilled registers, local (private) memory, shared memory (LDS), and
matrix instructions. No GPU is needed: Triton brings its compilers along. `worker.kernels.compile` does all of them.

A configuration is what Triton's launcher would compile for a launch (see `specialise`).
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

from worker.device.target import Target, head_class

from .specialise import Specialisation, gpu_target

F32, F16, BF16, I8, FP8 = torch.float32, torch.float16, torch.bfloat16, torch.int8, torch.float8_e4m3fn
DTYPE_NAMES = {F32: "fp32", F16: "fp16", BF16: "bf16", I8: "i8", FP8: "fp8e4nv"}
# A storage of so many bytes is addressed otherwise by the compiler for AMD's GPUs.
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
    "SHARE",
)  # no factors
# Until all stores are done: gfx9, gfx11, gfx12.
_WAIT = r"s_waitcnt vmcnt\(0\)|s_waitcnt_vscnt null, 0x0|s_wait_storecnt 0x0"


@dataclass(frozen=True)
class Configuration:
    """One compilation. label: for people. matrix: has matrix products."""

    label: str
    specialisation: Specialisation
    matrix: bool

    def kind(self) -> Hashable:
        """Equal for configurations that differ only in constants of address arithmetic."""
        return self.specialisation.key(ADDRESSING), self._is_padded()

    def _is_padded(self) -> bool:
        names = self.specialisation.kernel.arg_names
        constants = {names[place[0]]: value for place, value in self.specialisation.constants.items()}
        head_size = constants.get("HEAD_SIZE", constants.get("HEAD"))
        return head_size is not None and head_size != head_class(head_size)


@dataclass(frozen=True)
class Compiled:
    """What the compiler made. registers: vector registers of a thread. spills: vector registers that did not fit, and
    went to memory; scalar_spills: scalar ones, which go to vector registers.

    unordered: stores that may still be under way when the block's barrier before an atomic operation lets its thread
    pass: another block could count them as done. Looked for on AMD's GPUs, whose barriers wait for shared memory alone.
    local_bytes: private memory of a thread. shared_bytes: shared memory (LDS) of a block. matrix: matrix instructions;
    wants_matrix: whether there must be some.
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
        return (
            f"{self.target:8} {self.label:52} registers {self.registers:3}  "
            f"spills {self.spills:3} + {self.scalar_spills:3}  "
            f"local {self.local_bytes:4}  shared {self.shared_bytes:6}  matrix {self.matrix:3}  {self.seconds:.1f} s"
        )


def once(made: Iterable[Configuration]) -> list[Configuration]:
    """The first of each kind."""
    kinds: dict[Hashable, Configuration] = {}
    for each in made:
        kinds.setdefault(each.kind(), each)
    return list(kinds.values())


def numbers(*shape: int, dtype: torch.dtype) -> torch.Tensor:
    """No memory: only shape, dtype, and where a storage begins and ends."""
    return torch.empty(shape, dtype=dtype, device="meta")


def compile_one(configuration: Configuration, target: Target) -> Compiled:
    """Errors: whatever the compiler raises."""
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
    """Vector registers, accumulators included; spilled vector and scalar ones; private bytes. From the metadata."""
    assembly = asm["amdgcn"]

    def number(name: str) -> int:
        found = re.search(rf"^\s*\.{name}:\s*(\d+)", assembly, re.MULTILINE)
        assert found, f"no {name} in the assembly's metadata"
        return int(found[1])

    names = "vgpr_count", "vgpr_spill_count", "sgpr_spill_count", "private_segment_fixed_size"
    registers, spills, scalar_spills, local_bytes = map(number, names)
    return registers, spills, scalar_spills, local_bytes


def _unordered_stores(assembly: str) -> int:
    """Stores before a barrier before an atomic operation that nothing between them and the barrier waits for."""
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
    """Registers, spilled registers (in whole ones of local memory) and local bytes, from the binary."""
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
