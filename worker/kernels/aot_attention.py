"""The configurations of the attention kernels, and compiling one for a GPU that is not here.

From the assembly is read what it needs: registers, spilled registers, local (private) memory, shared memory (LDS), and
matrix instructions. No GPU is needed: Triton brings its compilers along. `worker.kernels.compile` does all of them.

A configuration is what Triton's launcher would compile for a launch (see `specialise`), and all come from launches by
the functions that a worker calls. They are the product of the factors below, equal ones once. Numbers that only change
constants in address arithmetic (block size, numbers of heads, a head size within its class) are no factors. What AMD's
kernels could have as further factors (soft cap, window, tall groups) they are told at run time instead, so that the
tests can compile every one.
"""

from __future__ import annotations

import itertools
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

from worker.attention.decode import DecodeWorkspace, decode_planner, is_few, paged_decode
from worker.attention.interface import AttentionOptions, KvLayer
from worker.attention.plan_items import FIELDS
from worker.attention.prefill import paged_prefill
from worker.attention.prefill_copy import PAGE, copy_rows
from worker.attention.prefill_plan import prefill_shape
from worker.attention.quantised import is_quantised
from worker.attention.write import write_kv
from worker.device.targets import Target, head_class

from .specialise import Specialisation, gpu_target, recorded

F32, F16, BF16, I8, FP8 = torch.float32, torch.float16, torch.bfloat16, torch.int8, torch.float8_e4m3fn
Dtypes = tuple[torch.dtype, torch.dtype]
# Factors: what the dispatcher passes on.
DTYPES = ((BF16, BF16), (F16, F16), (F32, F32), (BF16, I8), (F16, I8), (BF16, FP8), (F16, FP8))  # model's, pool's
WRITTEN = (*DTYPES[:3], *((model, I8) for model in (BF16, F16, F32)))  # int8 and fp8 are one kernel
PADDED = {64: 56, 128: 80, 256: 192}  # for each class of head sizes, one that is padded
HEAD_SIZES = (*PADDED, *PADDED.values())
GROUPS = (4, 32, 128)  # query heads of one KV head: one tile of rows, a tall one, several
CAPPED = (False, True)
FEW = (False, True)  # rows: see decode.is_few
ROTATED = (1, 2)  # whole heads, or half of each
# Whether K and V of a layer take 2 GiB or more. Nothing else that these kernels are given ever does: the rest is of one
# step. (Scales are as large at times, but no kernel is specialised for that.)
FAR = (False, True)
FAR_BYTES = 1 << 31
COPIED = DTYPES[3:]  # to a workspace, for Hopper's kernel
BLOCK_SIZES = (8, 16, 32, 64, 128, None)  # of Hopper's kernel, which copies block by block; None: a workspace
WINDOWED = (False, True)
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
BLOCK_SIZE, KV_HEADS, ROWS_MANY = 16, 8, 1000
DTYPE_NAMES = {F32: "fp32", F16: "fp16", BF16: "bf16", I8: "i8", FP8: "fp8e4nv"}
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


def decode_configurations(target: Target) -> list[Configuration]:
    """What the dispatcher can choose of `decode_kernel` on `target`; the others likewise."""
    return once(_decode(target, *each) for each in itertools.product(DTYPES, HEAD_SIZES, GROUPS, CAPPED, FEW, FAR))


def prefill_configurations(target: Target) -> list[Configuration]:
    return once(_prefill(target, *each) for each in itertools.product(DTYPES, HEAD_SIZES, FAR))


def hopper_configurations(target: Target) -> list[Configuration]:
    if not target.hopper:
        return []
    made = [
        _hopper(target, *each) for each in itertools.product((BF16, F16), HEAD_SIZES, BLOCK_SIZES, WINDOWED, CAPPED)
    ]
    return once(each for each in made if each is not None)


def copy_configurations(target: Target) -> list[Configuration]:
    if not target.hopper:
        return []
    return once(_copy(target, *each) for each in itertools.product(COPIED, HEAD_SIZES))


def write_configurations(target: Target) -> list[Configuration]:
    return once(_write(target, *each) for each in itertools.product(WRITTEN, PADDED.values(), ROTATED, FAR))


def once(made: Iterable[Configuration]) -> list[Configuration]:
    """The first of each kind."""
    kinds: dict[Hashable, Configuration] = {}
    for each in made:
        kinds.setdefault(each.kind(), each)
    return list(kinds.values())


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


def _decode(
    target: Target, dtypes: Dtypes, head_size: int, group: int, cap: bool, few: bool, far: bool
) -> Configuration:
    (model, stored), rows, kv_heads = dtypes, 1 if few else ROWS_MANY, KV_HEADS
    while few and not is_few(rows, kv_heads * group, kv_heads, head_size, stored, target):
        kv_heads //= 2
    layer = _layer(stored, kv_heads, head_size, far)
    options = AttentionOptions(1.0, softcap=50.0 if cap else 0.0)
    query = _numbers(rows, kv_heads * group, head_size, dtype=model)
    planner = decode_planner(rows, kv_heads * group, kv_heads, head_size, stored, options.window, target)
    workspace = DecodeWorkspace.allocate(planner, kv_heads * group, head_size, query.device)
    plan = _numbers(planner.items_max * FIELDS, dtype=torch.int32)
    with recorded(target) as launched:
        tables = _numbers(rows, 8, dtype=torch.int32)
        paged_decode(query, layer, tables, plan, torch.empty_like(query), workspace, options, target)
    label = f"decode {_dtypes(dtypes)} head {head_size} group {group}{' capped' * cap}{' few rows' * few}{' far' * far}"
    return Configuration(label, launched[0], _has_matrix(stored, target))


def _prefill(target: Target, dtypes: Dtypes, head_size: int, far: bool) -> Configuration:
    model, stored = dtypes
    layer = _layer(stored, KV_HEADS, head_size, far)
    query = _numbers(ROWS_MANY, KV_HEADS * GROUPS[0], head_size, dtype=model)
    tables, items = (_numbers(ROWS_MANY, FIELDS, dtype=torch.int32) for _ in range(2))
    with recorded(target) as launched:
        # Windows of one token are what `prefill_hopper` does not take.
        options = AttentionOptions(1.0, window=1)
        paged_prefill(query, layer, tables, items, torch.empty_like(query), options, target)
    label = f"prefill {_dtypes(dtypes)} head {head_size}{' far' * far}"
    return Configuration(label, launched[0], _has_matrix(model, target))


def _hopper(
    target: Target, dtype: torch.dtype, head_size: int, block_size: int | None, windowed: bool, cap: bool
) -> Configuration | None:
    """None where the portable kernel runs instead. block_size: None for what was copied to a workspace."""
    options = AttentionOptions(1.0, window=1000 if windowed else 0, softcap=50.0 if cap else 0.0)
    copied, stored = block_size is None, I8 if block_size is None else dtype
    layer = _layer(stored, KV_HEADS, head_size, far=False, block_size=block_size or BLOCK_SIZE)
    query = _numbers(ROWS_MANY, KV_HEADS * GROUPS[0], head_size, dtype=dtype)
    if not prefill_shape(query.shape[1], dtype, layer, options, target, copied).hopper:
        return None
    tables, items = (_numbers(ROWS_MANY, FIELDS, dtype=torch.int32) for _ in range(2))
    workspace = _numbers(2, ROWS_MANY, PAGE, KV_HEADS, head_size, dtype=dtype) if copied else None
    with recorded(target) as launched:
        copies = items if copied else None
        paged_prefill(query, layer, tables, items, torch.empty_like(query), options, target, copies, workspace)
    blocks = "copied" if copied else f"blocks of {block_size}"
    label = f"hopper {_dtypes((dtype, dtype))} head {head_size} {blocks}{' windowed' * windowed}{' capped' * cap}"
    return Configuration(label, launched[-1], True)


def _copy(target: Target, dtypes: Dtypes, head_size: int) -> Configuration:
    """Of one page: Triton makes a constant of a 1."""
    (model, stored), pages = dtypes, 1
    layer = _layer(stored, KV_HEADS, head_size, far=False)
    tables, copies = _numbers(pages, pages, dtype=torch.int32), _numbers(pages, FIELDS, dtype=torch.int32)
    workspace = _numbers(2, pages, PAGE, KV_HEADS, head_size, dtype=model)
    with recorded(target) as launched:
        copy_rows(layer, tables, copies, workspace, window=0)
    label = f"copy {_dtypes(dtypes)} head {head_size}"
    return Configuration(label, launched[0], False)


def _write(target: Target, dtypes: Dtypes, head_size: int, rotated: int, far: bool) -> Configuration:
    model, stored = dtypes
    key, layer = _numbers(ROWS_MANY, KV_HEADS, head_size, dtype=model), _layer(stored, KV_HEADS, head_size, far)
    angles = _numbers(ROWS_MANY, head_size // rotated, dtype=model)
    slots = _numbers(ROWS_MANY, dtype=torch.int32)
    with recorded(target) as launched:
        write_kv(key, key, key, angles, angles, layer, slots, target)
    label = f"write {_dtypes(dtypes)} head {head_size}{' half rotated' * (rotated - 1)}{' far' * far}"
    return Configuration(label, launched[0], False)


def _layer(stored: torch.dtype, kv_heads: int, head_size: int, far: bool, block_size: int = BLOCK_SIZE) -> KvLayer:
    """far: K and V take more than 2 GiB each."""
    blocks = 1 + FAR_BYTES // (block_size * kv_heads * head_size * stored.itemsize) if far else 1
    caches = [_numbers(blocks, block_size, kv_heads, head_size, dtype=stored) for _ in range(2)]
    scales = [_numbers(blocks, block_size, kv_heads, dtype=F32) for _ in range(2)] if is_quantised(stored) else []
    return KvLayer(*caches, *scales)


def _numbers(*shape: int, dtype: torch.dtype) -> torch.Tensor:
    """No memory: only shape, dtype, and where a storage begins and ends."""
    return torch.empty(shape, dtype=dtype, device="meta")


def _has_matrix(dtype: torch.dtype, target: Target) -> bool:
    """Whether products of this dtype are done by matrix instructions: float32 only has them on gfx9."""
    return dtype != F32 or target.name.startswith("gfx9")


def _dtypes(dtypes: Dtypes) -> str:
    return "/".join(dict.fromkeys(DTYPE_NAMES[dtype] for dtype in dtypes))
