"""CPU kernel of bfloat16 products in the tiles of Intel's AMX: each row is summed in one order, whatever the others.

An instruction multiplies up to 16 rows of x by 16 rows of a weight over 32 numbers of the inner dimension, and adds to
float32 sums. A result takes these steps from the first number to the last in one sum, then the bias, and is rounded
once. Which rows share a tile, and how many it has, changes none of that. oneDNN's own kernels for AMX choose their
steps by the number of rows (benchmarks/NOTES.md, "An Intel Xeon with AMX").

Only a CPU with AMX can compile the kernel, and only a process that may use tiles can run it: see
`kernels.amx.amx_problem`.
"""

from __future__ import annotations

from typing import Any

from llvmlite import ir
from numba import types
from numba.core import cgutils
from numba.extending import intrinsic

from kvforge.worker.cpu.kernel import cpu_kernel, part
from kvforge.worker.cpu.rows import load
from kvforge.worker.cpu.vector import (
    BFLOAT16,
    LANES,
    add,
    loading,
    next_ticket,
    reading_integers,
    storing,
    write_integer,
)

DEPTH = 32  # numbers of the inner dimension that an instruction multiplies
WIDE = 64  # rows of a weight in a tile of oneDNN's layout
ROWS = 16  # rows of a register
BLOCK = 2 * ROWS  # rows of x that are multiplied together
LINE = 64  # bytes of a row of a register
PAIR_BYTES = 4 * WIDE  # between two numbers of a weight's inner dimension and the next two
STEP_BYTES = 2 * DEPTH * WIDE  # that an instruction's depth of a tile takes
SUM_BYTES = ROWS * LINE
_i8, _i64 = ir.IntType(8), ir.IntType(64)
read_11 = reading_integers(11)
load_bfloat16, store_bfloat16 = loading(LANES, BFLOAT16), storing(LANES, BFLOAT16)


def _instruction(name: str, numbers: int = 0, registers: tuple[int, ...] = ()) -> Any:
    """Make the procedure that executes one of AMX's instructions.

    Args:
        name: Its name in LLVM.
        numbers: Arguments of the procedure: none, an address, or an address and the bytes between rows.
        registers: The tile registers, which are part of the instruction.
    """

    def typed(*given):
        def generate(context, builder, _signature, arguments):
            operands = [ir.Constant(_i8, register) for register in registers]
            if numbers:
                operands += [builder.inttoptr(arguments[0], _i8.as_pointer()), *arguments[1:]]
            kind = ir.FunctionType(ir.VoidType(), [each.type for each in operands])
            builder.call(cgutils.get_or_insert_function(builder.module, kind, f"llvm.x86.{name}"), operands)
            return context.get_dummy_value()

        return types.void(*given), generate

    if numbers == 0:
        return intrinsic(lambda _: typed())
    if numbers == 1:
        return intrinsic(lambda _, address: typed(address))
    return intrinsic(lambda _, address, stride: typed(address, stride))


configure, release = _instruction("ldtilecfg", 1), _instruction("tilerelease")
# Registers 0 to 3 have sums, 4 and 5 rows of x, 6 and 7 a weight.
zero_0, zero_1, zero_2, zero_3 = (_instruction("tilezero", 0, (register,)) for register in range(4))
store_0, store_1, store_2, store_3 = (_instruction("tilestored64", 2, (register,)) for register in range(4))
load_4, load_5, load_6, load_7 = (_instruction("tileloadd64", 2, (register,)) for register in range(4, 8))
add_46_to_0, add_47_to_1, add_46_to_2, add_47_to_3, add_56_to_2, add_57_to_3 = (
    _instruction("tdpbf16ps", 0, registers)
    for registers in ((0, 4, 6), (1, 4, 7), (2, 4, 6), (3, 4, 7), (2, 5, 6), (3, 5, 7))
)


@intrinsic
def own_memory(_):
    """Return the address of the calling function's own memory: four registers of sums, and one LINE."""

    def generate(_context, builder, _signature, _arguments):
        with builder.goto_entry_block():
            memory = builder.alloca(ir.ArrayType(_i8, 4 * SUM_BYTES + LINE))
        memory.align = LINE
        return builder.ptrtoint(memory, _i64)

    return types.int64(), generate


@part
def shape(line, rows):
    """Configure the registers for `rows` rows of x, at most BLOCK. line: LINE bytes of memory, which it overwrites."""
    above, below = min(rows, ROWS), rows - ROWS if rows > ROWS else rows  # few rows: all sums are of the first 16
    write_integer(line, 1)  # the only palette
    for at in range(8, LINE, 8):
        write_integer(line + at, 0)
    for at in range(16, 32, 8):  # the bytes of a row, 16 bits of each register
        write_integer(line + at, LINE | LINE << 16 | LINE << 32 | LINE << 48)
    first, second = above | above << 8, below << 16 | below << 24  # the rows, 8 bits of each register
    write_integer(line + 48, first | second | above << 32 | below << 40 | ROWS << 48 | ROWS << 56)
    configure(line)


@part
def begin():
    """Set all sums to 0."""
    zero_0()
    zero_1()
    zero_2()
    zero_3()


@part
def end(sums):
    """Store all sums, [4, 16, 16] float32."""
    store_0(sums, LINE)
    store_1(sums + SUM_BYTES, LINE)
    store_2(sums + 2 * SUM_BYTES, LINE)
    store_3(sums + 3 * SUM_BYTES, LINE)


@part
def few_rows(x, x_bytes, weight, steps, sums):
    """Multiply up to 16 rows of x by the 64 rows of a tile. sums: [4, 16, 16] float32, the tile's rows in order."""
    begin()
    for _ in range(steps):
        load_4(x, x_bytes)
        load_6(weight, PAIR_BYTES)
        add_46_to_0()
        load_7(weight + LINE, PAIR_BYTES)
        add_47_to_1()
        load_6(weight + 2 * LINE, PAIR_BYTES)
        add_46_to_2()
        load_7(weight + 3 * LINE, PAIR_BYTES)
        add_47_to_3()
        x += 2 * DEPTH
        weight += STEP_BYTES
    end(sums)


@part
def many_rows(x, x_bytes, weight, steps, sums):
    """Multiply 17 to 32 rows of x by 32 rows of a tile. sums: [2, 2, 16, 16] float32, rows of x first."""
    begin()
    below = x + ROWS * x_bytes
    for _ in range(steps):
        load_4(x, x_bytes)
        load_6(weight, PAIR_BYTES)
        add_46_to_0()
        load_7(weight + LINE, PAIR_BYTES)
        add_47_to_1()
        load_5(below, x_bytes)
        add_56_to_2()
        add_57_to_3()
        x += 2 * DEPTH
        below += 2 * DEPTH
        weight += STEP_BYTES
    end(sums)


@part
def put(sums, rows, bias, target, target_bytes):
    """Write sums [rows, 16] float32, plus the bias (0: none), to target [rows, 16] bfloat16."""
    for row in range(rows):
        found = load(sums + LINE * row)
        if bias:
            found = add(found, load_bfloat16(bias))
        store_bfloat16(target + target_bytes * row, found)


@part
def some_rows(x, x_bytes, rows, weight, steps, bias, target, target_bytes, sums):
    """Multiply x [rows], for which the registers are configured, by a tile; target: [rows, 64] bfloat16."""
    if rows <= ROWS:
        few_rows(x, x_bytes, weight, steps, sums)
        for quarter in range(4):
            at = 2 * LANES * quarter
            put(sums + SUM_BYTES * quarter, rows, bias + at if bias else 0, target + at, target_bytes)
        return
    for half in range(2):
        many_rows(x, x_bytes, weight + 2 * LINE * half, steps, sums)
        for quarter in range(2):
            at = 2 * LANES * (2 * half + quarter)
            own, into = bias + at if bias else 0, target + at
            put(sums + SUM_BYTES * quarter, ROWS, own, into, target_bytes)
            put(sums + SUM_BYTES * (2 + quarter), rows - ROWS, own, into + ROWS * target_bytes, target_bytes)


@cpu_kernel("x rows weight bias target target_bytes steps tiles part_rows")
def multiply_amx(arguments):
    """Write x [rows, 32 steps] times tiles [tiles, steps, 16, 64, 2], plus bias, to target [rows, 64 tiles], bfloat16.

    bias has the length of the tiles. A ticket is a tile and a part of the rows, of `part_rows` rows, a multiple of
    BLOCK; the tickets of one part are consecutive.
    """
    _, _, x, rows, weight, bias, target, target_bytes, steps, tiles, part_rows = read_11(arguments)
    sums, x_bytes, configured = own_memory(), 2 * DEPTH * steps, 0
    while True:
        ticket = next_ticket(arguments)
        first = ticket // tiles * part_rows
        if first >= rows:
            break
        tile = ticket % tiles
        into, numbers = target + 2 * WIDE * tile, weight + STEP_BYTES * steps * tile
        own = bias + 2 * WIDE * tile if bias else 0
        last = min(first + part_rows, rows)
        for row in range(first, last, BLOCK):
            count = min(BLOCK, last - row)
            if count != configured:
                shape(sums + 4 * SUM_BYTES, count)
                configured = count
            to = into + target_bytes * row
            some_rows(x + x_bytes * row, x_bytes, count, numbers, steps, own, to, target_bytes, sums)
    release()
