"""Interpreter for the AMDGCN assembly that Triton emits: runs kernels for AMD GPUs on a machine without one.

Supported targets are gfx90a, gfx942 and gfx950 (wave64), gfx1100, gfx1151 and gfx1201 (wave32); the semantics follow
AMD's ISA manuals. The lanes of a wave are the columns of numpy arrays. The interpreter executes the assembly text
that the compiler's own assembler turns into the binary. The metadata in that text lays out the arguments, hidden ones
included, and Triton's launcher specialises and compiles as on the real machine (`driver`). The worker's self-tests
therefore run as they would on the GPU, on torch's CPU tensors.

The interpreter reports these faults, which a GPU would not:

- memory accesses outside the storages of the arguments, and LDS accesses out of bounds;
- reads of uninitialised LDS;
- LDS races: two waves access the same byte between two barriers, and at least one access changes it;
- an atomic operation that signals another workgroup while earlier stores are still outstanding (before or after a
  barrier);
- operands of v_wmma with differing halves.

Registers, LDS and scratch start as garbage. The caller chooses the order of waves and workgroups.

The interpreter cannot find these faults:

- a missing s_waitcnt for a load, because every load completes at once;
- missing cache maintenance between compute units, because caches are not modelled;
- hazards, and anything about speed, because timing is not modelled.

v_exp, v_log, v_rcp and v_rsq of float32 are assumed to be correctly rounded (the manuals promise one unit in the last
place), with subnormals flushed to zero. Matrix instructions sum their products in float64. An instruction that no
kernel has needed so far raises `Unsupported` with its text; add a line for it to a table.

    values      bit patterns, and arithmetic that numpy lacks         tables     functions of the instructions
    assembly    parser of the assembly text                           operands   registers and constants
    wave        registers, EXEC                                       checks     faults and findings
    scalar, vector, wide, compare, lanes, packed, matrix, lds, memory            instructions
    machine     programs, workgroups, the order of waves              driver     Triton's driver
    suite       the worker's self-tests on the interpreter (`make amd`)
"""
