"""Interpreter for the PTX that Triton emits: runs kernels for NVIDIA GPUs on a machine without one.

The semantics follow NVIDIA's PTX ISA. Triton's launcher specialises and compiles as on the real machine (`driver`), so
kernels run through their launchers, on torch's CPU tensors. Triton gives PTX to NVIDIA's assembler, and the
assembler's output is not executed.

The model covers what kernels for Hopper need: groups of four warps, warps with work of their own, barriers in shared
memory, boxes that the tensor copy engine (TMA) writes with its swizzles, and products of a group of warps (wgmma).
Copies end as late as possible, as early as possible, or at random, by choice.

The interpreter reports these faults, which a GPU would not:

- memory accesses outside the storages of the arguments, and outside of the shared memory;
- reads of shared memory that nothing has written, a box that is still under way included;
- a box that overwrites what a product under way reads;
- reads of a product's sums, and writes of its inputs, before the wait for it;
- warps that wait forever.

Registers and shared memory start as garbage.

The interpreter cannot find races between warps in general, missing fences, a missing wait for cp.async (its copies end
at once), a missing wait for the kernel before, and
anything about speed. Tensor products are summed in float64. Approximate functions are correctly rounded. An
instruction that no kernel has needed so far raises `Unsupported` with its text; add it to a table.

    text         parser of PTX                          operands     registers and constants
    unit         warps that run together                arithmetic, floats, conversions   of one lane each
    lanes        exchanges between lanes                barriers     barriers, and boxes of the copy engine
    memory       global and shared memory               matrix       wgmma, mma, ldmatrix, stmatrix
    tensor       Blackwell's tensor memory (tcgen05)
    machine      programs, blocks, the order of warps   driver       Triton's driver
    suite        kernels against their references       planted      faults that the suite must see
"""
