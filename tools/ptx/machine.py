"""Programs, blocks, and the order in which warps run and copies end."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping
from dataclasses import dataclass

import numpy as np

from tools.amdgcn.checks import Fault, Unsupported
from tools.amdgcn.values import Array

from . import arithmetic, barriers, conversions, lanes, matrix, memory, tensor
from .barriers import Barrier, Descriptor
from .memory import Global, Shared
from .operands import PARAMETERS, source
from .tensor import TensorMemory
from .text import Instruction, Kernel, Register, parse
from .unit import LANES, Code, Unit

GROUP = 4 * LANES  # threads of a group of warps
ORDERS = ("late", "early", "mixed")
# What changes no result here: limits of registers, fences, hints, and the order of kernels.
_NOTHING = {"setmaxnreg", "fence", "griddepcontrol", "membar", "prefetch", "nanosleep", "createpolicy"}
_BUILDERS: dict[str, Callable[[Instruction], Code]] = {
    **dict.fromkeys(("ld", "st", "atom", "red"), memory.build),
    **dict.fromkeys(("bar", "barrier"), barriers.build_threads),
    **dict.fromkeys(("ldmatrix", "stmatrix"), matrix.tiles),
    "mbarrier": barriers.build,
    "cvt": conversions.build,
    "wgmma": matrix.wgmma,
    "mma": matrix.mma,
    "tcgen05": tensor.build,
    "shfl": lanes.shuffle,
    "elect": lanes.elect,
    "vote": lanes.vote,
    "redux": lanes.reduce,
}


class Program:
    """A kernel, translated.

    Attributes:
        kernel: the parsed kernel.
        offsets: of each parameter.
        tables: the module's constants.
        size: of all parameters, in bytes.
        unknown: texts of instructions that are not implemented; executing one raises Unsupported.
    """

    def __init__(self, text: str) -> None:
        self.kernel: Kernel = parse(text)
        self.offsets = {each.name: each.offset for each in self.kernel.parameters}
        self.size = max((each.offset + each.size for each in self.kernel.parameters), default=0)
        self.tables = {name: np.frombuffer(data, np.uint8) for name, data in self.kernel.constants.items()}
        self.unknown: list[str] = []
        self.steps = [self._translated(each) for each in self.kernel.instructions]

    def symbol(self, name: str) -> int:
        """Return the address of a parameter or a table."""
        if name in self.tables:
            return int(self.tables[name].ctypes.data)
        return PARAMETERS + self.offsets[name]

    def _translated(self, i: Instruction) -> Step:
        try:
            guard = None if i.guard is None else source(i.guard, "pred")
            reads = frozenset(_rows(i, written=False))
            if i.name in ("bra", "brx"):
                target = i.operands[-1]
                names = self.kernel.tables[str(target)] if i.name == "brx" else (str(target),)
                targets = np.array([self.kernel.labels[name] for name in names])
                which = source(i.operands[0], "u32") if i.name == "brx" else None
                return Step(i, None, guard, reads, targets=targets, which=which)
            if i.name in ("ret", "exit"):
                return Step(i, None, guard, reads)
            return Step(i, _code(i), guard, reads, writes=frozenset(_rows(i, written=True)))
        except (Unsupported, KeyError, ValueError, StopIteration) as error:
            self.unknown.append(f"{i.text} ({error})")
            return Step(i, _raises(i), None, frozenset())


@dataclass(frozen=True)
class Step:
    """A translated instruction.

    code: what it does; None: it branches or ends. guard: which lanes execute it. reads, writes: rows of the 32-bit
    file. targets: of a branch. which: of several targets.
    """

    instruction: Instruction
    code: Code | None
    guard: Callable[[Unit], Array] | None
    reads: frozenset[int]
    targets: Array | None = None
    which: Callable[[Unit], Array] | None = None
    writes: frozenset[int] = frozenset()


def _raises(i: Instruction) -> Code:
    def fail(u: Unit) -> None:
        raise Unsupported(i.text)

    return fail


def _rows(i: Instruction, written: bool) -> set[int]:
    """Return the 32-bit registers that an instruction reads or writes; of wgmma none: it waits for nothing."""
    if i.name == "wgmma":
        return set()
    stores = i.name in ("st", "stmatrix", "red", "mbarrier") or i.name == "cp"
    found: set[int] = set()
    for place, operand in enumerate(i.operands):
        first = place == 0 and not stores
        for each in operand if isinstance(operand, tuple) else (operand,):
            base = each if isinstance(each, Register) else getattr(each, "base", None)
            if isinstance(base, Register) and base.file == "w" and (first and isinstance(each, Register)) == written:
                found.add(base.index)
    return found


def _code(i: Instruction) -> Code:
    if i.name in _NOTHING:
        return lambda u: None
    if i.name == "cp":
        if i.parts[2] in ("commit_group", "wait_group", "wait_all"):
            return lambda u: None
        return barriers.build_box(i) if i.parts[2] == "bulk" else memory.copy(i)
    if i.name == "cvta":
        return arithmetic.build(Instruction(i.text, ("mov", "u64"), i.operands, i.guard)) or _raises(i)
    build = _BUILDERS.get(i.name)
    code = build(i) if build else arithmetic.build(i)
    if code is None:
        raise Unsupported(i.text)
    return code


class Block:
    """A block of threads that runs.

    Attributes:
        program: its kernel.
        number, grid: its place among the blocks, x, y, z.
        memory, shared, barriers, arguments, descriptors: see `launch`.
        units: its warps, those of the first group together if `together`.
        random: of this block.
    """

    def __init__(
        self, program: Program, number: tuple[int, ...], grid: tuple[int, ...], launched: Launched, size: int
    ) -> None:
        self.program, self.number, self.grid = program, number, grid
        self.memory, self.arguments, self.descriptors = launched.memory, launched.arguments, launched.descriptors
        self.random = np.random.default_rng((launched.seed, *number))
        self.shared, self.barriers = Shared(size, self.random), dict[int, Barrier]()
        self._order, self._jobs, self._met = launched.order, list[Callable[[], None]](), dict[int, int]()
        self.tensor = TensorMemory(self.random)
        threads = program.kernel.threads
        if threads % LANES:
            raise Unsupported(f"{threads} threads")
        # Warps that multiply together run together; a warp with work of its own runs alone.
        together = min(threads, launched.together)
        self.units = [Unit(self, first, min(GROUP, together - first)) for first in range(0, together, GROUP)]
        self.units += [Unit(self, first, LANES) for first in range(together, threads, LANES)]
        self.executed = 0

    def run(self) -> None:
        """Run until all threads have returned.

        Raises:
            Fault: see the package.
        """
        while any(not unit.ended.all() for unit in self.units):
            order = self.random.permutation(len(self.units)) if self._order == "mixed" else range(len(self.units))
            moved = [self._advance(self.units[place]) for place in order]
            if self._jobs and (not any(moved) or self._order == "mixed"):
                place = int(self.random.integers(len(self._jobs))) if self._order == "mixed" else 0
                self._jobs.pop(place)()
            elif not any(moved):
                stuck = [unit for unit in self.units if not unit.ended.all()]
                waiting = {self.program.steps[unit.first_place()].instruction.text for unit in stuck}
                raise Fault(f"warps wait forever: {'; '.join(sorted(waiting))}")
        if self._jobs:
            raise Fault("a block ends while copies are under way")

    def begin(self, job: Callable[[], None]) -> None:
        """Begin a copy or products, which end later."""
        if self._order == "early":
            job()
        else:
            self._jobs.append(job)

    def meet(self, unit: Unit, which: int, threads: int) -> None:
        """Let lanes wait at a barrier of threads until as many are there."""
        self._met[which] = self._met.get(which, 0) + int(unit.mask.sum())
        unit.scatter()
        unit.stopped |= unit.mask
        unit.at[unit.mask] = which
        if self._met[which] > threads:
            raise Fault(f"{self._met[which]} threads at barrier {which}, which counts {threads}")
        if self._met[which] == threads:
            self._met[which] = 0
            for each in self.units:
                each.stopped &= each.at != which

    def _advance(self, unit: Unit) -> bool:
        """Run warps until they wait; return whether they moved."""
        moved = False
        while True:
            if not unit.even and not unit.align():
                return moved
            step = self.program.steps[unit.place]
            if step.guard is not None:
                unit.mask = unit.running & step.guard(unit)
                unit.full = bool(unit.mask.all())
            else:
                unit.mask, unit.full = unit.running, unit.even
            unit.stalled = False
            if unit.waited_for:
                self._check(unit, step)
            if step.code is None:
                self._branch(unit, step)
            else:
                if unit.full or unit.mask.any():
                    try:
                        step.code(unit)
                    except Fault as error:
                        raise Fault(f"{error} [{step.instruction.text}]") from None
                if unit.stalled:
                    return moved
                unit.go_on()
            moved = True
            self.executed += 1

    def _branch(self, unit: Unit, step: Step) -> None:
        if step.targets is None:
            ended = unit.mask.copy()
            unit.go_on()
            unit.scatter()
            unit.ended |= ended
            return
        if unit.full and step.which is None:
            unit.place = int(step.targets[0])
            return
        which = 0 if step.which is None else np.broadcast_to(step.which(unit), unit.mask.shape)[unit.mask]
        unit.go_on()
        if unit.mask.any():
            unit.scatter()
            unit.places[unit.mask] = step.targets[which]

    def _check(self, unit: Unit, step: Step) -> None:
        """Refuse to read sums, or write inputs, of products that nothing has waited for."""
        if step.instruction.name == "wgmma":
            return
        for group in unit.products:
            if group.sums & (step.reads | step.writes):
                raise Fault(f"sums of a product under way are used [{step.instruction.text}]")
            if group.inputs & step.writes:
                raise Fault(f"an input of a product under way is written [{step.instruction.text}]")


@dataclass(frozen=True)
class Launched:
    """Common to all blocks of a launch; see `launch`."""

    memory: Global
    arguments: bytes
    descriptors: Mapping[int, Descriptor]
    order: str
    seed: int
    together: int


def launch(
    program: Program,
    grid: tuple[int, int, int],
    arguments: bytes,
    descriptors: Mapping[int, Descriptor],
    regions: list[tuple[int, int]],
    shared_bytes: int,
    order: str = "late",
    seed: int = 0,
    together: int = GROUP,
) -> int:
    """Run all blocks of a launch and return the number of executed instructions.

    Args:
        program: the kernel.
        grid: blocks in x, y and z.
        arguments: the parameters.
        descriptors: by the offset of their parameter.
        regions: (address, bytes) of each storage that may be accessed.
        shared_bytes: shared memory of a block.
        order: when copies end: one of `ORDERS`. With "mixed" warps run in random order too.
        seed: of the garbage and the random order.
        together: the first threads, which run together in groups of four warps.

    Raises:
        Fault: see the package.
        Unsupported: an instruction is not implemented.
    """
    regions = [*regions, *((table.ctypes.data, table.nbytes) for table in program.tables.values())]
    launched = Launched(Global(regions), arguments, descriptors, order, seed, together)
    executed = 0
    with np.errstate(all="ignore"):
        for z, y, x in itertools.product(*(range(count) for count in reversed(grid))):
            block = Block(program, (x, y, z), grid, launched, shared_bytes)
            block.run()
            executed += block.executed
    return executed
