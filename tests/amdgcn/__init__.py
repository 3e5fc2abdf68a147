"""An interpreter of the AMDGCN assembly that Triton makes: kernels for AMD's GPUs, executed where there is none.

gfx90a, gfx942 and gfx950 (waves of 64 lanes), gfx1100 and gfx1201 (32), written from AMD's ISA manuals. A wave's lanes
are the columns of numpy arrays. What is executed is the text from which the compiler's own assembler makes the binary;
arguments are laid out by the metadata in that text, hidden ones included; Triton's launcher specialises and compiles as
on the real machine (`driver`). So the worker's self-tests run as they would there, on torch's CPU tensors.

What it sees that a GPU would not tell: memory touched outside the storages of the arguments; LDS touched out of
bounds; LDS read before it is written; bytes of LDS that two waves touch between two barriers, one of them changing
them; stores that nothing has waited for when an atomic operation, after a barrier or not, tells another workgroup that
they are done; operands of v_wmma whose halves differ. Registers, LDS and scratch begin as garbage. Waves and workgroups
run in any order that is asked for.

What it does not see: any other s_waitcnt (everything is done at once), so whether LLVM waits long enough for what it
loads; caches, so whether compute units see each other's stores; timing, so nothing about speed; hazards. v_exp, v_log,
v_rcp and v_rsq of float32 are taken to be rounded right (the manuals promise one unit in the last place), subnormals
flushed; a matrix instruction's products are summed in float64. An instruction that the kernels have not needed so far
is an `Unsupported` that quotes it: give it a line in a table.

    values      numbers as bits, and arithmetic that numpy lacks      tables     what instructions compute
    assembly    the text in parts                                     operands   registers and constants
    wave        registers, EXEC                                       checks     what is found wrong
    scalar, vector, wide, compare, lanes, packed, matrix, lds, memory            instructions
    machine     programs, workgroups, the order of waves              driver     Triton's driver
    suite       the worker's own tests, on it (`make amd`)
"""
