"""Programs, workgroups, and the order in which waves run."""

from __future__ import annotations

import ctypes
import struct
from collections.abc import Iterable
from dataclasses import dataclass
from random import Random

import numpy as np

from . import lds, memory, scalar, vector
from .assembly import Assembly, Instruction, parse
from .checks import Fault, Findings, Unsupported
from .lds import Lds
from .memory import Memory
from .operands import vector_register
from .values import M32, U32, Array
from .wave import Code, Wave

Ids = tuple[int, int, int]
# No effect here: waits, hints, and cache operations, since caches are not modelled.
_NOTHING = (
    *("s_nop", "s_waitcnt", "s_waitcnt_vscnt", "s_waitcnt_depctr", "s_setprio", "s_clause", "s_delay_alu", "s_sendmsg"),
    *("s_sleep", "s_inst_prefetch", "s_set_inst_prefetch_distance", "s_dcache_inv", "s_icache_inv", "s_sched_barrier"),
    *("s_setreg_imm32_b32", "v_nop", "buffer_inv", "buffer_wbl2", "buffer_gl0_inv", "buffer_gl1_inv"),
    *("buffer_wbinvl1", "buffer_wbinvl1_vol"),
)
_NOTHING_PREFIXES = ("s_wait_", "global_inv", "global_wb", "s_barrier_signal")
_TURN_MAX = 400  # instructions of a wave's turn in mixed order
_TOGETHER = 3  # concurrent workgroups in mixed order
_TURNS_MAX = 1 << 26  # instructions of a wave; a wave that runs more is in an endless loop


class Program:
    """A kernel's instructions as functions; an instruction in `unknown` raises only when a wave reaches it."""

    def __init__(self, text: str, arch: str) -> None:
        self.assembly: Assembly = parse(text, arch)
        self.unknown: list[str] = []
        self.code: list[Code | None] = [self._build(each) for each in self.assembly.instructions]

    def _build(self, instruction: Instruction) -> Code | None:
        try:
            if instruction.second is not None:
                return _both(self._one(instruction), self._one(instruction.second), instruction)
            return self._one(instruction)
        except (Unsupported, KeyError, IndexError, ValueError) as error:
            message = f"{instruction.text}: {error}"
            self.unknown.append(message)

            def stop(w: Wave) -> None:
                raise Unsupported(message)

            return stop

    def _one(self, instruction: Instruction) -> Code | None:
        """Translate one instruction; None means that it has no effect."""
        name = instruction.name
        if _waits_for_stores(instruction):
            return _waited
        if name in _NOTHING or name.startswith(_NOTHING_PREFIXES):
            return None
        if name == "s_endpgm":
            return _end
        if name in ("s_barrier", "s_barrier_wait"):
            return _barrier
        if name.startswith("s_"):
            return scalar.build(instruction, self.assembly)
        if name.startswith("v_"):
            return vector.build(instruction, self.assembly)
        if name.startswith("ds_"):
            return lds.build(instruction)
        return memory.build(instruction)


def _waits_for_stores(instruction: Instruction) -> bool:
    """Return whether the instruction waits for all stores (gfx9, gfx11, gfx12)."""
    text = instruction.text.replace(" ", "")
    if instruction.name == "s_waitcnt":
        return "vmcnt(0)" in text
    if instruction.name == "s_waitcnt_vscnt":
        return text.endswith(("null,0x0", "null,0"))
    return text in ("s_wait_storecnt0x0", "s_wait_storecnt0")


def _waited(w: Wave) -> None:
    w.stores = 0


def _end(w: Wave) -> int:
    w.done = True
    return w.pc


def _barrier(w: Wave) -> None:
    w.waiting, w.unreleased = True, w.stores


def _both(first: Code | None, second: Code | None, instruction: Instruction) -> Code:
    """Pair two instructions (v_dual_...): both read before either writes."""
    assert first is not None and second is not None and instruction.second is not None
    target = vector_register(instruction.operands[0])

    def run(w: Wave) -> None:
        before = w.v[target].copy()
        first(w)
        result = w.v[target].copy()
        w.v[target] = before
        second(w)
        w.v[target] = result

    return run


@dataclass
class Workgroup:
    """Waves that share LDS and barriers.

    `masks` caches `Wave.mask` results; all workgroups of a launch share it.
    """

    program: Program
    memory: Memory
    findings: Findings
    masks: dict[int, Array]
    lds: Lds
    waves: list[Wave]

    @classmethod
    def start(
        cls,
        program: Program,
        place: Memory,
        findings: Findings,
        masks: dict[int, Array],
        ids: Ids,
        threads: int,
        lds_bytes: int,
        arguments: int,
    ) -> Workgroup:
        """Create a workgroup with initialised waves.

        Args:
            program: the kernel.
            place: the memory it may access.
            findings: the launch's findings.
            masks: the shared cache of lane masks.
            ids: the workgroup's number in x, y and z.
            threads: threads of the workgroup.
            lds_bytes: size of its LDS.
            arguments: the address of the argument block.

        Returns:
            The workgroup, at its first instruction.
        """
        group = cls(program, place, findings, masks, Lds(lds_bytes, findings), [])
        lanes = program.assembly.isa.lanes
        for number in range(threads // lanes):
            wave = Wave(group, number, lanes, program.assembly.scratch_bytes)
            _initialise(wave, program.assembly, ids, arguments)
            group.waves.append(wave)
        return group

    def ready(self) -> list[Wave]:
        """Return the waves that can run: not ended and not waiting at a barrier."""
        return [wave for wave in self.waves if not wave.done and not wave.waiting]

    def is_done(self) -> bool:
        """Return whether all waves have ended."""
        return all(wave.done for wave in self.waves)

    def pass_barrier(self) -> None:
        """Release the barrier; every wave that has not ended has reached it."""
        self.lds.barrier()
        for wave in self.waves:
            wave.waiting = False


def _initialise(wave: Wave, assembly: Assembly, ids: Ids, arguments: int) -> None:
    """Set the initial registers; see "Initial Kernel Execution State" in LLVM's AMDGPU usage guide."""
    flags, at = assembly.directives, 0
    for name, registers in (
        ("private_segment_buffer", 4),
        ("dispatch_ptr", 2),
        ("queue_ptr", 2),
        ("kernarg_segment_ptr", 2),
        ("dispatch_id", 2),
        ("flat_scratch_init", 2),
        ("private_segment_size", 1),
    ):
        if flags.get(f"user_sgpr_{name}"):
            if name == "kernarg_segment_ptr":
                wave.s[at], wave.s[at + 1] = arguments & M32, arguments >> 32
            at += registers
    count, offset = (flags.get(f"user_sgpr_kernarg_preload_{name}", 0) for name in ("length", "offset"))
    if count:
        preloaded = ctypes.string_at(arguments + 4 * offset, 4 * count)
        wave.s[at : at + count] = struct.unpack(f"<{count}I", preloaded)
    at = flags["user_sgpr_count"]
    if assembly.isa.gfx12:
        wave.s[117], wave.s[115] = ids[0], ids[1] | ids[2] << 16
    else:
        for axis, number in zip("xyz", ids, strict=True):
            if flags.get(f"system_sgpr_workgroup_id_{axis}"):
                wave.s[at] = number
                at += 1
    wave.v[0] = np.arange(wave.number * wave.lanes, (wave.number + 1) * wave.lanes, dtype=U32)


def launch(
    program: Program,
    grid: Ids,
    threads: int,
    arguments: bytes,
    regions: Iterable[tuple[int, int]],
    lds_bytes: int,
    order: str = "up",
    seed: int = 0,
) -> Findings:
    """Run a kernel to its end.

    Args:
        program: the kernel.
        grid: workgroups in x, y and z.
        threads: threads of a workgroup.
        arguments: the argument block.
        regions: (address, bytes) of the memory that the arguments give access to.
        lds_bytes: LDS of a workgroup.
        order: order of waves and workgroups: `up`, `down`, or `mixed`, which switches after random numbers of
            instructions.
        seed: the seed of the mixed order.

    Returns:
        The findings of the launch.

    Raises:
        Fault: the kernel accessed memory out of bounds or did not end.
        Unsupported: a wave reached an instruction that is not implemented.
    """
    buffer = ctypes.create_string_buffer(len(arguments) + 64)
    at = (ctypes.addressof(buffer) + 63) & ~63
    ctypes.memmove(at, arguments, len(arguments))
    place, findings, masks = Memory([*regions, (at, len(arguments))]), Findings(), dict[int, Array]()
    waiting = [(x, y, z) for z in range(grid[2]) for y in range(grid[1]) for x in range(grid[0])]
    random, mixed = Random(seed), order == "mixed"
    if order == "down":
        waiting.reverse()
    if mixed:
        random.shuffle(waiting)
    live: list[Workgroup] = []
    with np.errstate(all="ignore"):
        while waiting or live:
            while waiting and len(live) < (_TOGETHER if mixed else 1):
                ids = waiting.pop(0)
                live.append(Workgroup.start(program, place, findings, masks, ids, threads, lds_bytes, at))
            group = random.choice(live) if mixed else live[0]
            ready = group.ready()
            if ready:
                wave = random.choice(ready) if mixed else ready[-1 if order == "down" else 0]
                _advance(wave, random.randint(1, _TURN_MAX) if mixed else _TURNS_MAX)
            elif group.is_done():
                live.remove(group)
            else:
                group.pass_barrier()
    return findings


def _advance(wave: Wave, instructions: int) -> None:
    """Run the wave for so many instructions, or until it waits or ends."""
    code, done = wave.group.program.code, 0
    try:
        while done < instructions and not wave.done and not wave.waiting:
            each = code[wave.pc]
            done += 1
            following = None if each is None else each(wave)
            wave.pc = wave.pc + 1 if following is None else following
    except (Fault, Unsupported) as error:
        name = wave.group.program.assembly.name
        raise type(error)(f"{name}, instruction {wave.pc}, {wave.text()}: {error}") from None
    wave.group.findings.instructions += done
    if done == _TURNS_MAX:
        raise Fault(f"{wave.group.program.assembly.name} does not end: a wave ran {done} instructions")
