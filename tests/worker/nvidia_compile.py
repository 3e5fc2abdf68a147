"""Compiles for NVIDIA GPUs that are not here. In a process of its own: `python -m tests.worker.nvidia_compile sm_86`.

Two depths. *Lowered*: up to the intermediate language in which shared memory is given out, which says how much of it a
block takes, and finds what the compiler refuses; a quarter of the cost. *Compiled*: to the binary by ptxas, which tells
registers and spills. What only changes a mask or the kind of a number of 16 bits takes the same shared memory, so of
such configurations one is lowered; and of the compiled ones each target has a few, other ones than the targets beside
it that have the same tiles. `python -m worker.attention.aot` and `python -m worker.kernels.aot` compile every one.
"""

from __future__ import annotations

import json
import sys
import time
from dataclasses import asdict

from triton._C.libtriton import ir, nvidia, passes
from triton.compiler import ASTSource, make_backend

from worker.attention.aot import PADDED, Configuration, compile_one, configurations
from worker.attention.specialise import gpu_target
from worker.attention.targets import TARGETS, Target
from worker.kernels.aot import layer_configurations


def lowered_shared_bytes(configuration: Configuration, target: Target) -> int:
    """Shared memory of a block. Errors: whatever the compiler raises."""
    wanted = configuration.specialisation
    backend = make_backend(gpu_target(target))
    options = backend.parse_options(wanted.options)
    context = ir.context()
    ir.load_dialects(context)
    backend.load_dialects(context)
    source = ASTSource(wanted.kernel, wanted.types, wanted.constants, wanted.attributes)
    codegen, modules = backend.get_codegen_implementation(options), backend.get_module_map()
    module = source.make_ir(gpu_target(target), options, codegen, modules, context)
    stages, metadata = {}, dict(wanted.options)
    backend.add_stages(stages, options, source.language)
    for stage in ("ttir", "ttgir"):
        module = stages[stage](module, metadata)
    manager = ir.pass_manager(context)
    passes.ttgpuir.add_combine_tensor_select_and_if(manager)
    passes.ttgpuir.add_allocate_warp_groups(manager)
    passes.convert.add_scf_to_cf(manager)
    passes.gluon.add_inliner(manager)
    nvidia.passes.ttgpuir.add_allocate_shared_memory_nv(manager, target.arch, 87)
    manager.run(module, "shared memory")
    return int(module.get_int_attr("ttg.shared"))


# Whose shared memory is what another one's with the same tiles is, as nothing before the binary differs: but for what
# only the newer one has instructions for.
SAME_SHARED = {"sm_80": "sm_86", "sm_89": "sm_86"}


def to_lower(target: Target, made: list[Configuration]) -> list[Configuration]:
    """Of configurations that take the same shared memory, one: heads that fill their tiles, one dtype of 16 bits."""
    other = "fp16" if target.matrix else "bf16"
    masked = tuple(f"head {size}" for size in PADDED.values())
    like = TARGETS.get(SAME_SHARED.get(target.name, ""), target)
    return [
        each
        for each in made
        if each.label.startswith(("decode", "prefill"))
        and f" {other}" not in each.label
        and " capped" not in each.label
        and "group 32" not in each.label
        and not any(f"{name} " in f"{each.label} " for name in masked)
        and (like is target or ("fp8" in each.label and like.packed != target.packed))
    ]


def to_compile(target: Target, made: list[Configuration]) -> list[Configuration]:
    """One of each kernel and kind of number, in turn by target."""
    turn = list(TARGETS).index(target.name)
    narrow = "bf16" if target.matrix else "fp16"
    kinds = [f"{kernel} {number} head" for kernel in ("decode", "prefill") for number in (narrow, f"{narrow}/fp8e4nv")]
    kinds += [f"decode {narrow}/i8" if turn % 2 else f"prefill {narrow}/i8", f"write {narrow}/i8"]
    kinds += ["decode fp32" if turn % 2 else "prefill fp32", f"linear {narrow}", f"project {narrow}", "sum of 2 fp32"]
    kinds += [f"copy {narrow}/i8", f"copy {narrow}/fp8e4nv"]
    chosen = []
    for number, kind in enumerate(kinds):
        if those := [each for each in made if each.label.startswith(kind)]:
            chosen.append(those[(5 * turn + 3 * number) % len(those)])
    return chosen


def main() -> None:
    """A line of JSON for each."""
    for name in sys.argv[1:]:
        target = TARGETS[name]
        made = configurations(target)
        if not target.hopper:  # whose layers are all compiled in `test_layers_aot`
            made += layer_configurations(target)
        for configuration in to_lower(target, made):
            began = time.process_time()
            found = {"target": name, "label": configuration.label, "depth": "lowered"}
            found["shared_bytes"] = lowered_shared_bytes(configuration, target)
            print(json.dumps(found | {"seconds": time.process_time() - began}), flush=True)
        for configuration in to_compile(target, made):
            began = time.process_time()
            found = {"depth": "compiled"} | asdict(compile_one(configuration, target))
            print(json.dumps(found | {"seconds": time.process_time() - began}), flush=True)


if __name__ == "__main__":
    main()
