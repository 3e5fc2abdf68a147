"""Compiles the attention kernels for GPUs that are not here, and reads from the assembly what they need.

    python -m worker.attention.aot [--target gfx942 ...] [--only "decode bf16"]

prints a line for each configuration: registers, spilled registers, local (private) memory, shared memory (LDS), and
matrix instructions. No GPU is needed: Triton brings its compilers along.

A configuration is what a kernel is compiled for. All come from the functions that the launches themselves use, and so
from the table in `targets`. They are the product of the factors below, equal ones once. Numbers that only change
constants in address arithmetic (block size, numbers of heads, a head size within its class) are no factors. What AMD's
kernels could have as further factors (soft cap, window, tall groups) they are told at run time instead, so that the
tests can compile every one.
"""

from __future__ import annotations

import argparse
import itertools
import json
import re
import subprocess
import sys
import time
from collections.abc import Hashable, Iterable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from .decode import decode_constants, decode_tiles
from .decode_kernel import decode_kernel
from .interface import AttentionOptions, KvLayer
from .prefill import portable_constants, prefill_shape
from .prefill_portable import prefill_portable
from .targets import TARGETS, Target, head_class
from .write import write_constants, write_kernel

F32, F16, BF16, I8, FP8 = torch.float32, torch.float16, torch.bfloat16, torch.int8, torch.float8_e4m3fn
# Factors: what the dispatcher passes on.
DTYPES = ((BF16, BF16), (F16, F16), (F32, F32), (BF16, I8), (F16, I8), (BF16, FP8), (F16, FP8))  # model's, pool's
WRITTEN = (*DTYPES[:3], *((model, I8) for model in (BF16, F16, F32)))  # int8 and fp8 are one kernel
PADDED = {64: 56, 128: 80, 256: 192}  # for each class of head sizes, one that is padded
HEAD_SIZES = (*PADDED, *PADDED.values())
GROUPS = (4, 32, 128)  # query heads of one KV head: one tile of rows, a tall one, several
CAPPED = (False, True)
FEW = (False, True)  # rows: see decode.is_few
ROTATED = (1, 2)  # whole heads, or half of each
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
)  # no factors
BLOCK_SIZE, KV_HEADS = 16, 8
DTYPE_NAMES = {F32: "fp32", F16: "fp16", BF16: "bf16", I8: "i8", FP8: "fp8e4nv", torch.int16: "i16", torch.int32: "i32"}
# Until all stores are done: gfx9, gfx11, gfx12.
_WAIT = r"s_waitcnt vmcnt\(0\)|s_waitcnt_vscnt null, 0x0|s_wait_storecnt 0x0"
_FLOATS = ("scaling", "softcap", "scale", "cap", "epsilon")


@dataclass(frozen=True)
class Configuration:
    """One compilation. label: for people. pointers: dtype of each argument that is one, and of a tensor descriptor its
    type in Triton's words. matrix: has matrix products.
    """

    label: str
    kernel: Any
    pointers: dict[str, str]
    constants: dict[str, Any]
    warps: int
    stages: int
    matrix: bool

    def kind(self) -> Hashable:
        """Equal for configurations that differ only in constants of address arithmetic."""
        constants = dict(self.constants)
        head_size = constants.get("HEAD_SIZE", constants.get("HEAD"))
        constants["PADDED"] = head_size is not None and head_size != head_class(head_size)
        shaping = tuple(item for item in sorted(constants.items()) if item[0] not in ADDRESSING)
        return self.kernel.__name__, tuple(sorted(self.pointers.items())), shaping, self.warps, self.stages


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


def configurations(target: Target) -> list[Configuration]:
    """What the dispatcher can choose on `target`."""
    product = itertools.product
    made = [_decode(target, *c) for c in product(DTYPES, HEAD_SIZES, GROUPS, CAPPED, FEW)]
    made += [_prefill(target, *c) for c in product(DTYPES, HEAD_SIZES)]
    made += [_write(target, *c) for c in product(WRITTEN, PADDED.values(), ROTATED)]
    return list({configuration.kind(): configuration for configuration in reversed(made)}.values())[::-1]


def compile_one(configuration: Configuration, target: Target) -> Compiled:
    """Errors: whatever the compiler raises."""
    signature: dict[str, str] = {}
    attributes: dict[tuple[int, ...], list[list[Any]]] = {}
    for index, name in enumerate(configuration.kernel.arg_names):
        if name in configuration.constants:
            signature[name] = "constexpr"
        elif configuration.pointers.get(name, "").startswith("tensordesc"):
            signature[name] = configuration.pointers[name]
        elif name in configuration.pointers:
            signature[name] = "*" + configuration.pointers[name]
            attributes[(index,)] = [["tt.divisibility", 16]]  # as the launcher finds out of real arguments
        else:
            signature[name] = "fp32" if name in _FLOATS else "i32"
            if "stride" in name or name in ("head_size", "n", "k", "hidden", "size"):
                attributes[(index,)] = [["tt.divisibility", 16]]
    source = ASTSource(configuration.kernel, signature, configuration.constants, attributes)
    began = time.perf_counter()
    kernel = triton.compile(
        source,
        target=GPUTarget(target.backend, target.arch, target.warp_size),
        options={"num_warps": configuration.warps, "num_stages": configuration.stages},
    )
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


def _decode(
    target: Target, dtypes: tuple[torch.dtype, torch.dtype], head_size: int, group: int, cap: bool, few: bool
) -> Configuration:
    model, stored = dtypes
    tiles = decode_tiles(head_size, stored, target, few)
    constants = decode_constants(KV_HEADS * group, KV_HEADS, head_size, BLOCK_SIZE, stored, cap, target, few)
    numbers = "i16" if stored in (I8, FP8) else DTYPE_NAMES[stored]
    pointers = _pointers(("query", "output"), DTYPE_NAMES[model]) | _pointers(("keys", "values"), numbers)
    scales = dict.fromkeys(("key_scales", "value_scales"))
    pointers |= _pointers(("partials", "sizes", *(scales if stored in (I8, FP8) else ())), "fp32")
    pointers |= _pointers(("tables", "plan", "counters"), "i32")
    return Configuration(
        f"decode {_dtypes(dtypes)} head {head_size} group {group}{' capped' * cap}{' few rows' * few}",
        decode_kernel,
        pointers,
        constants | ({} if stored in (I8, FP8) else scales),
        tiles.warps,
        tiles.stages,
        _has_matrix(stored, target),
    )


def _prefill(target: Target, dtypes: tuple[torch.dtype, torch.dtype], head_size: int) -> Configuration:
    model, stored = dtypes
    heads = KV_HEADS * GROUPS[0]
    cache = torch.empty((1, BLOCK_SIZE, KV_HEADS, head_size), dtype=stored, device="meta")
    layer = KvLayer(cache, cache)
    # Windows of one token are what `prefill_hopper` does not take.
    shape = prefill_shape(heads, model, layer, AttentionOptions(1.0, window=1), target)
    numbers = "i8" if stored in target.bitwise else DTYPE_NAMES[stored]
    pointers = _pointers(("query", "output"), DTYPE_NAMES[model]) | _pointers(("keys", "values"), numbers)
    scales = "fp32" if stored in (I8, FP8) else DTYPE_NAMES[stored]
    pointers |= _pointers(("key_scales", "value_scales"), scales) | _pointers(("tables", "items"), "i32")
    return Configuration(
        f"prefill {_dtypes(dtypes)} head {head_size}",
        prefill_portable,
        pointers,
        portable_constants(heads, model, layer, shape, target),
        shape.tiles.warps,
        shape.tiles.stages,
        _has_matrix(model, target),
    )


def _write(target: Target, dtypes: tuple[torch.dtype, torch.dtype], head_size: int, rotated: int) -> Configuration:
    model, stored = dtypes
    numbers = "i8" if stored in (I8, FP8) else DTYPE_NAMES[stored]
    scales = "fp32" if stored in (I8, FP8) else "i32"
    pointers = _pointers(("query", "key", "value", "rotated", "cosines", "sines"), DTYPE_NAMES[model])
    pointers |= _pointers(("keys", "values"), numbers) | _pointers(("key_scales", "value_scales"), scales)
    return Configuration(
        f"write {_dtypes(dtypes)} head {head_size}{' half rotated' * (rotated - 1)}",
        write_kernel,
        pointers | {"slots": "i32"},
        write_constants(head_size, head_size // rotated, stored, target),
        target.write.warps,
        1,
        False,
    )


def _has_matrix(dtype: torch.dtype, target: Target) -> bool:
    """Whether products of this dtype are done by matrix instructions: float32 only has them on gfx9."""
    return dtype != F32 or target.name.startswith("gfx9")


def _pointers(names: Iterable[str], dtype: str) -> dict[str, str]:
    return dict.fromkeys(names, dtype)


def _dtypes(dtypes: tuple[torch.dtype, torch.dtype]) -> str:
    return "/".join(dict.fromkeys(DTYPE_NAMES[dtype] for dtype in dtypes))


def _last_line(error: Exception) -> str:
    """A compiler's message ends with what is wrong; before it comes the source."""
    return f"{type(error).__name__}: {(str(error).strip().splitlines() or [''])[-1]}"


def main() -> int:
    parser = argparse.ArgumentParser(description="Compile the attention kernels for GPUs that are not here.")
    names = [name for name, target in TARGETS.items() if target.backend != "cpu"]
    parser.add_argument("--target", nargs="+", choices=names, default=names)
    parser.add_argument("--only", default="", help="labels that contain this text")
    parser.add_argument("--json", action="store_true", help="a line of JSON for each, for programs")
    arguments = parser.parse_args()
    if len(arguments.target) == 1:
        return _compile_all(TARGETS[arguments.target[0]], arguments)
    # A process for each: after gfx950, Triton 3.6 uses some of its instructions for other targets as well.
    options = ["--json"] * arguments.json + ["--only", arguments.only]
    command = [sys.executable, "-m", "worker.attention.aot", *options, "--target"]
    return max(subprocess.run([*command, name], check=False).returncode != 0 for name in arguments.target)


def _compile_all(target: Target, arguments: argparse.Namespace) -> int:
    failures = 0
    for configuration in configurations(target):
        if arguments.only not in configuration.label:
            continue
        try:
            compiled = compile_one(configuration, target)
            print(json.dumps(asdict(compiled)) if arguments.json else compiled.line(), flush=True)
        except Exception as error:  # noqa: BLE001 - the compiler raises what it likes; the others are wanted too
            failures += 1
            print(f"{target.name:8} {configuration.label:52} FAILED: {_last_line(error)}", file=sys.stderr, flush=True)
    return 1 if failures else 0


if __name__ == "__main__":
    sys.exit(main())
