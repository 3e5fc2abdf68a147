"""Every kernel configuration compiles for absent GPUs within their limits, and attention launches no other one.

Each kernel fits into a block's shared memory, keeps its numbers in registers, and uses matrix instructions. No GPU is
needed. The compiler runs in a separate process, because kernels are interpreted in this one.
"""

from __future__ import annotations

import ast
import itertools
import json
import subprocess
import sys
from collections import Counter
from dataclasses import replace
from importlib.metadata import version
from pathlib import Path
from random import Random

import pytest
import torch

pytest.importorskip("triton")

from kvforge.worker.attention import (
    AttentionOptions,
    KvLayer,
    decode,
    latent_decode,
    latent_prefill,
    latent_write,
    prefill,
    prefill_copy,
    shared_decode,
    write,
)
from kvforge.worker.attention.plan_items import FIELDS
from kvforge.worker.attention.prefill_plan import prefill_shape
from kvforge.worker.attention.quantised import is_quantised
from kvforge.worker.device.device import Device
from kvforge.worker.device.target import HEAD_CLASSES, Target, TileKey
from kvforge.worker.device.targets import TARGETS, current_target
from kvforge.worker.kernels.registry import KERNELS
from tests.worker.kernels.launches import compiler_environment
from tools.aot import compilation
from tools.aot.attention import DTYPES
from tools.aot.compilation import Compiled, Configuration
from tools.aot.configurations import configurations_of
from tools.aot.results import VERSION, _code, code_of, every, fingerprint, kept, module_code
from tools.aot.specialise import recorded

ROOT = Path(__file__).parents[3]
COMPILED = [name for name, target in TARGETS.items() if target.backend != "cpu"]
ATTENTION = [kernel for kernel in KERNELS if kernel.module.startswith("kvforge.worker.attention.")]
KIB = 1024
SHARED_KIB = {"sm_75": 64, "sm_80": 163, "sm_86": 99, "sm_89": 99, "sm_90": 227, "sm_100": 227, "sm_120": 99}
# Limit of a thread's private memory in bytes. gfx9 has 512 registers and needs none. RDNA has 256: too few for heads
# of more than 128 on gfx11, where matrix instructions take every operand twice, and for float32, which has no matrix
# instructions there.
LOCAL_BYTES_MAX = {"gfx90a": 0, "gfx942": 0, "gfx950": 0, "gfx1100": 96, "gfx1151": 96, "gfx1201": 0}
LOCAL_BYTES_MAX_LARGE = LOCAL_BYTES_MAX | {"gfx1100": 384, "gfx1151": 384, "gfx1201": 96}
LOCAL_BYTES_MAX_LARGE_DECODE = LOCAL_BYTES_MAX | {"gfx1100": 544, "gfx1151": 560, "gfx1201": 128}  # with sinks
LOCAL_BYTES_MAX_FLOAT32 = LOCAL_BYTES_MAX | {"gfx1100": 640, "gfx1151": 640, "gfx1201": 640}
# Every wave takes the queries as one operand of 576 rows, and gfx11 takes it twice.
LOCAL_BYTES_MAX_LATENT = LOCAL_BYTES_MAX | {"gfx1100": 912, "gfx1151": 912, "gfx1201": 160}
# Quantised latents are widened in registers.
LOCAL_BYTES_MAX_LATENT_QUANTISED = {
    "gfx90a": 68,
    "gfx942": 68,
    "gfx950": 176,
    "gfx1100": 952,
    "gfx1151": 952,
    "gfx1201": 236,
}
# Tiles of 64 x 128 beside the sums of two products; gfx11 takes every operand twice.
LOCAL_BYTES_MAX_PROMPTS = LOCAL_BYTES_MAX | {"gfx1100": 496, "gfx1151": 496, "gfx1201": 64}
# Tiles of B and C beside a part of a head's state.
# gfx1151: 616 but for heads of 128 numbers in float16 with states kept in bfloat16 (MiniMax).
LOCAL_BYTES_MAX_SPACES = LOCAL_BYTES_MAX | {"gfx1100": 616, "gfx1151": 636, "gfx1201": 484}
# Lines of 256 numbers are operands of two products, and gfx11 takes every operand twice.
LOCAL_BYTES_MAX_LONG_LINES = LOCAL_BYTES_MAX | {"gfx1100": 704, "gfx1151": 704}
# NVIDIA GPUs have 255: a few numbers spill where heads are large, or a tile was tuned on a device ("": elsewhere).
NVIDIA_LOCAL_BYTES_MAX = {
    "decode": {"sm_90": 248, "": 96},  # the maximum is float32, and 32 query heads of a quantised KV head
    "prefill": {"sm_80": 64, "sm_86": 40, "sm_89": 40, "sm_90": 56, "sm_100": 80, "sm_120": 40, "": 32},
    "hopper": {"": 48},  # the copying warp has few registers
    "latent decode": {
        "sm_90": 128,
        "sm_100": 40,
    },  # the sums of a part and of its group, beside the addresses of 64 tokens
    "latent prefill": {"sm_90": 128},
    "write": {"": 16},
    "rotary": {"": 32},  # digits of pi for cos and sin of large angles
    "sum of 4": {"sm_120": 16},  # 16 numbers of 16,384 a thread
    # The same in float32, with the weights of two norms.
    "norm of the sum": {"sm_80": 64, "sm_90": 48, "sm_100": 72, "sm_120": 48, "": 56},
    "exchange": {"": 40},  # the same in float32, with the flags for the other ranks
    "linear": {"": 16},
    "codes e4m3 by 128": {"sm_80": 8},  # of 32 tokens in parts: 128 registers and 2 more, where it had 134 before
    "codes of experts": {"sm_80": 16, "sm_86": 8, "sm_89": 8},
    "experts": {"sm_86": 8, "sm_89": 8, "sm_120": 8},
    "choice: scan": {"": 8},
    "gated delta of prompts": {"sm_120": 32, "": 16},
    "selective prompts": {"sm_100": 8},
    "state space of prompts": {"sm_80": 184, "sm_86": 104, "sm_89": 104, "sm_90": 48, "sm_120": 144, "": 0},
}
SCALAR_SPILLS_MAX = 320  # into lanes of vector registers: the masks of tiles that are padded and windowed
REGISTERS = {32: 256, 64: 512}


@pytest.mark.skipif(version("triton") != VERSION, reason=f"compiled code is kept and bounded for Triton {VERSION}")
@pytest.mark.parametrize("backend", ["cuda", "hip"])
def test_every_configuration_compiles_within_bounds(backend: str, tmp_path: Path) -> None:
    """Attention, layers, sampling and copies. Unchanged kernels are not compiled again: see `compiled`."""
    names = [name for name in COMPILED if TARGETS[name].backend == backend]
    within = _within_amds if backend == "hip" else _within_nvidias
    result = subprocess.run(
        [sys.executable, "-m", "tools.aot.results", "--print", "--target", *names],
        env=compiler_environment(tmp_path),
        capture_output=True,
        text=True,
        timeout=1500,
        check=False,
    )
    assert result.returncode == 0, result.stderr
    told = [json.loads(line) for line in result.stdout.splitlines()]
    compiled = [Compiled(**numbers) for kind, numbers, *_ in told if kind == "all"]
    counts = Counter(each.target for each in compiled)
    assert counts.keys() == set(names) and min(counts.values()) > 200
    for each in compiled:
        assert 0 <= each.shared_bytes <= TARGETS[each.target].shared_bytes, each.line()
        within(each, TARGETS[each.target])
    anew = [line for line in told if line[0] == "anew"]
    assert {name for *_, name, _ in anew} == set(names)
    for _, before, now, name, label in anew:
        assert before == now, f"{name}, {label}: the stored result differs from the compiler's"


def _within_amds(compiled: Compiled, target: Target) -> None:
    local_bytes_max = _local_bytes_max(compiled)
    assert compiled.local_bytes <= local_bytes_max, compiled.line()
    assert compiled.spills <= local_bytes_max // 4 + 16, compiled.line()  # a few go to accumulators
    # `decode_kernel` reads the counters of common parts after this kernel, with all of its stores, has ended.
    assert compiled.unordered == 0 or compiled.label.startswith("decode of common parts"), compiled.line()
    assert compiled.scalar_spills <= SCALAR_SPILLS_MAX, compiled.line()
    assert compiled.registers <= REGISTERS[target.warp_size], compiled.line()
    assert (compiled.matrix > 0) == compiled.wants_matrix, compiled.line()


def _within_nvidias(compiled: Compiled, target: Target) -> None:
    kind = next((kind for kind in NVIDIA_LOCAL_BYTES_MAX if compiled.label.startswith(kind)), "")
    bounds = NVIDIA_LOCAL_BYTES_MAX.get(kind, {})
    assert compiled.local_bytes <= bounds.get(target.name, bounds.get("", 0)), compiled.line()
    assert compiled.matrix > 0 or not compiled.wants_matrix or not target.matrix, compiled.line()
    assert compiled.matrix >= 32 or not compiled.label.startswith("hopper"), compiled.line()


def _local_bytes_max(compiled: Compiled) -> int:
    name, label = compiled.target, compiled.label
    if label.startswith(("latent decode", "latent prefill")):
        quantised = " over " in label
        return (LOCAL_BYTES_MAX_LATENT_QUANTISED if quantised else LOCAL_BYTES_MAX_LATENT)[name]
    if label.startswith("gated delta of prompts"):
        return LOCAL_BYTES_MAX_PROMPTS[name]
    if label.startswith("state space of prompts"):
        return (LOCAL_BYTES_MAX_LONG_LINES if "Falcon-H1" in label else LOCAL_BYTES_MAX_SPACES)[name]
    if not label.startswith(("decode", "prefill", "write")):
        return 0
    if "fp32" in label:
        return LOCAL_BYTES_MAX_FLOAT32[name]
    if "head 256" not in label and "head 192" not in label:
        return LOCAL_BYTES_MAX[name]
    return (LOCAL_BYTES_MAX_LARGE_DECODE if label.startswith("decode") else LOCAL_BYTES_MAX_LARGE)[name]


def _row_of(label: str) -> str:
    """Return the row of the table in docs/hardware.md that counts a kernel."""
    if label.startswith(("latent decode", "latent prefill")):
        return "attention over latents" + (" in 8 bits" if " over " in label else "")
    if label.startswith(("gated delta of prompts", "state space of prompts")):
        return "recurrent layers, prompts"
    if label.startswith(("decode", "prefill", "write")):
        is_large = any(each in label for each in ("fp32", "head 256", "head 192"))
        return "attention in float32 or with heads above 128" if is_large else "other attention"
    return "everything else"


def test_the_page_has_the_numbers_of_amds_kernels() -> None:
    """docs/hardware.md: the configurations of each target, and the local memory that a thread needs."""
    text = (ROOT / "docs" / "hardware.md").read_text()
    table = {
        cells[0].strip(): [cell.strip() for cell in cells[1:]]
        for cells in (line.strip("|").split("|") for line in text.splitlines() if line.startswith("| "))
    }
    kept_of = {name: list(kept(TARGETS[name]).values()) for name in COMPILED if TARGETS[name].backend == "hip"}
    (nine,) = {len(results) for name, results in kept_of.items() if name.startswith("gfx9")}
    (others,) = {len(results) for name, results in kept_of.items() if not name.startswith("gfx9")}
    assert f"({nine:,} on gfx9 and {others:,} on the others" in text
    columns = table["local memory, bytes a thread"]
    assert sorted(", ".join(columns).split(", ")) == sorted(kept_of)
    for column, names in enumerate(columns):
        results = [each for name in names.split(", ") for each in kept_of[name]]
        most = Counter[str]()
        for each in results:
            most[_row_of(each.label)] = max(most[_row_of(each.label)], each.local_bytes)
        assert {row: int(table[row][column]) for row in most} == dict(most)


def test_a_result_is_kept_for_what_it_was_compiled_from_alone() -> None:
    """Every input of the compiler changes the fingerprint."""
    target = TARGETS["gfx942"]
    configurations = every(target)
    first, second, *_ = configurations
    prints = {fingerprint(each, target) for each in configurations}
    assert len(prints) == len(configurations)
    made = first.specialisation
    changed = (
        replace(made, attributes=made.attributes | {(0,): []}),
        replace(made, options=made.options | {"num_warps": 1}),
        replace(made, constants=second.specialisation.constants | {(99,): 0}),
        replace(made, kernel=write._encode),
    )
    found = {fingerprint(replace(first, specialisation=each), target) for each in (made, *changed)}
    assert len(found) == 5 and fingerprint(first, target) in found
    assert fingerprint(first, TARGETS["gfx90a"]) not in prints
    code = code_of(write.write_kernel)  # its own code, that of transitively called functions, and their constants
    assert (
        all(word in code for word in ("gdc_wait", "def _to_e4m3", "12582912.0")) and "As of `decode_kernel`" not in code
    )


@pytest.mark.skipif(version("triton") != VERSION, reason=f"compiled code is kept for Triton {VERSION}")
@pytest.mark.parametrize("name", ["sm_90", "gfx942"])  # the other targets run the kernels of one of these
def test_the_stored_results_are_current(name: str) -> None:
    """Otherwise the compilation of the others takes minutes in each run."""
    stored = kept(TARGETS[name])
    missing = [each.label for each in every(TARGETS[name]) if fingerprint(each, TARGETS[name]) not in stored]
    assert not missing, f"run `python -m tools.aot.results`: {len(missing)} kernels changed, {missing[0]} first"


def test_documentation_does_not_change_a_fingerprint() -> None:
    documented = (
        '"""Module."""\nclass A:\n    """Class."""\n    x = 1\ndef f():\n    """Function."""\n    return "text"\n'
    )
    assert _code(ast.parse(documented)) == "class A:\n    x = 1\n\ndef f():\n    return 'text'"


GLUON_MODULE = """
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from sample_constants import WIDTH

STEPS = gl.constexpr(2 * WIDTH)

@gluon.jit
def kernel(at):
    gl.store(at, STEPS)
"""


def test_a_gluon_modules_docstrings_imports_and_place_do_not_matter(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr(sys, "dont_write_bytecode", True)
    package = tmp_path / "sample_package"
    package.mkdir()
    (tmp_path / "sample_constants.py").write_text("WIDTH = 8\n")
    (package / "other_constants.py").write_text("WIDTH = 16\n")
    respelt = GLUON_MODULE.replace("from sample_constants import WIDTH", "from sample_constants import (WIDTH,)")
    documented = respelt.replace("def kernel(at):", 'def kernel(at):\n    """Store a number."""')
    variants = {
        "sample_kernel": GLUON_MODULE,
        "sample_package.moved": f'"""Documented."""\n{documented}',
        "sample_package.wider": GLUON_MODULE.replace("sample_constants", "sample_package.other_constants"),
        "sample_package.longer": GLUON_MODULE.replace("2 *", "3 *"),
    }
    for name, text in variants.items():
        (tmp_path / f"{name.replace('.', '/')}.py").write_text(text)
    first, moved, *changed = map(module_code, variants)
    assert first == moved
    assert len({first, *changed}) == 3


@pytest.mark.parametrize(
    "wait", ["s_waitcnt vmcnt(0)", "s_waitcnt_vscnt null, 0x0", "s_wait_storecnt 0x0", "s_wait_storecnt_dscnt 0x0"]
)
def test_stores_that_nothing_waits_for_are_found(wait: str) -> None:
    store, barrier, add = (
        "\tglobal_store_dword v[1:2], v3, off",
        "\ts_barrier",
        "\tglobal_atomic_add v1, v1, v2, s[4:5] sc0",
    )
    assert compilation._unordered_stores("\n".join([store, f"\t{wait}", barrier, add, store])) == 0
    assert compilation._unordered_stores("\n".join([store, f"\t{wait}", store, barrier, add])) == 1
    assert compilation._unordered_stores("\n".join([store, store, barrier, f"\t{wait}", add])) == 2
    assert compilation._unordered_stores("\n".join([store, barrier])) == 0


# The other targets launch the same kernels as one of these.
@pytest.mark.parametrize("name", [name for name in COMPILED if name not in ("sm_89", "sm_100", "gfx942", "gfx950")])
def test_whatever_is_launched_was_compiled(name: str) -> None:
    """Launches of random shapes, specialised by Triton's launcher, cover every compiled configuration (on Hopper
    most)."""
    target = TARGETS[name]
    with recorded(target) as made:
        for kind, count in ((launch, 2000), (launch_shared, 2000), (launch_latents, 800)):
            random = Random(7)
            for _ in range(count):
                kind(target, random)
        for _ in range(2000 if target.hopper else 0):
            launch_on_hopper(target, random)
    declared = (configuration for kernel in ATTENTION for configuration in configurations_of(kernel, target))
    compiled = {configuration.kind(): configuration.label for configuration in declared}
    launched = {Configuration("", each, False).kind(): each for each in made}
    assert not [str(each) for kind, each in launched.items() if kind not in compiled]
    unused = {label for kind, label in compiled.items() if kind not in launched}
    assert not unused or (target.hopper and len(unused) < len(compiled) / 3)


def _head_size(random: Random) -> int:
    return random.choice((56, 64, 80, 96, 120, 128, 192, 256, 8 * random.randint(1, 32)))


def launch(target: Target, random: Random) -> None:
    """Launch a write and an attention of every kind as TritonAttention does, for a supported model."""
    model, stored = random.choice(DTYPES)
    head_size, kv_heads = _head_size(random), random.choice((1, 2, 8, 10))
    heads = kv_heads * random.choice((1, 2, 3, 4, 7, 8, 12, 16, 32, 71))
    rows, block_size = random.choice((1, 3, 64, 500)), random.choice((8, 16, 32, 128))
    options = AttentionOptions(0.1, window=random.choice((0, 1, 16, 1000)), softcap=random.choice((0.0, 50.0)))
    blocks = random.choice((9, 2**31 // (block_size * kv_heads * head_size * stored.itemsize) + random.choice((0, 1))))
    with torch.device("meta"):
        cache = torch.empty((max(1, blocks), block_size, kv_heads, head_size), dtype=stored)
        scales = torch.empty(cache.shape[:3]) if is_quantised(stored) else None
        layer = KvLayer(cache, cache, scales, scales)
        options = replace(options, sinks=random.choice((None, torch.empty(heads + 1)[1:])))
        packed = torch.empty((rows, heads + 2 * kv_heads, head_size), dtype=model)
        query = random.choice((packed[:, :heads], packed[:, :heads].clone()))
        output = torch.empty((rows, heads, head_size), dtype=model)
        key_dtype = random.choice((model, torch.float32) if scales is not None else (model,))
        key = packed[:, heads : heads + kv_heads].to(key_dtype)
        table = torch.empty((rows + 1, random.choice((1, 7, 8, 16))), dtype=torch.int32)
        items = torch.empty((rows, 8), dtype=torch.int32)
    planner = decode.decode_planner(rows, heads, kv_heads, head_size, stored, options.window, target)
    workspace = decode.DecodeWorkspace.allocate(planner, heads, head_size, torch.device("meta"))
    decode.paged_decode(query, layer, table[random.randint(0, 1) :], items.view(-1), output, workspace, options, target)
    prefill.paged_prefill(query, layer, table, items, output, options, target)
    rotated = random.choice((None, head_size, head_size // 2))
    angles = None if rotated is None else torch.empty((rows, rotated), dtype=key.dtype, device="meta")
    whole_query = query.to(key.dtype) if random.random() < 0.5 else None
    slots = torch.empty(rows + 1, dtype=torch.int32, device="meta")[random.randint(0, 1) :]
    write.write_kv(whole_query, key, key, angles, angles, layer, slots, target)


def launch_shared(target: Target, random: Random) -> None:
    """Launch a decode of common parts of every kind, as TritonAttention does, for a supported model."""
    model, stored = random.choice(DTYPES)
    head_size, kv_heads, rows = _head_size(random), random.choice((1, 2, 8, 10)), random.choice((1, 3, 64, 500))
    heads, block_size = kv_heads * random.choice((1, 2, 3, 4, 7, 8, 12, 16)), random.choice((8, 16, 32, 128))
    steady = replace(target, steady=True)
    planner = shared_decode.shared_planner(rows, heads, kv_heads, head_size, stored, 0, steady)
    if planner is None:
        return
    blocks = random.choice((9, 2**31 // (block_size * kv_heads * head_size * stored.itemsize) + random.choice((0, 1))))
    options = AttentionOptions(0.1, softcap=random.choice((0.0, 50.0)))
    with torch.device("meta"):
        cache = torch.empty((max(1, blocks), block_size, kv_heads, head_size), dtype=stored)
        scales = torch.empty(cache.shape[:3]) if is_quantised(stored) else None
        options = replace(options, sinks=random.choice((None, torch.empty(heads + 1)[1:])))
        packed = torch.empty((rows, heads + 2 * kv_heads, head_size), dtype=model)
        query = random.choice((packed[:, :heads], packed[:, :heads].clone()))
        tables = torch.empty((rows + 1, random.choice((1, 7, 8, 16))), dtype=torch.int32)[random.randint(0, 1) :]
        plan = torch.empty(8 * rows, dtype=torch.int32)
    workspace = decode.DecodeWorkspace.allocate(planner.decode, heads, head_size, torch.device("meta"))
    layer = KvLayer(cache, cache, scales, scales)
    shared_decode.shared_decode(query, layer, tables, plan, workspace, options, steady)


def launch_latents(target: Target, random: Random) -> None:
    """Launch attention over latents of every kind, as TritonAttention does, for a supported model.

    Quantised latents have one shape: other ones are compiled when a worker starts.
    """
    dtype = stored = random.choice((torch.bfloat16, torch.float16, torch.float32))
    latent, rope = random.choice((512, 256, 8 * random.randint(1, 64))), random.choice((64, 32, 8))
    heads, rows, block_size = (
        random.choice((1, 16, 20, 64, 128)),
        random.choice((1, 3, 64, 500)),
        random.choice((8, 16)),
    )
    quantised = random.random() < 0.2
    if quantised:
        dtype, stored = torch.bfloat16, random.choice((torch.int8, torch.float8_e4m3fn))
        latent, rope, heads = 512, 64, 16
    if latent_decode.latent_problem(latent, rope, stored, target):
        return
    large = 2**31 // (block_size * (latent + rope) * stored.itemsize) + random.choice((0, 1))
    blocks = 9 if quantised else random.choice((9, large))
    planner = latent_decode.latent_planner(rows, heads, latent, dtype, target)
    workspace = latent_decode.LatentWorkspace.allocate(planner, heads, latent, torch.device("meta"))
    with torch.device("meta"):
        cache = torch.empty((blocks, block_size, 1, latent + rope), dtype=stored)
        scales = torch.empty(cache.shape[:3]) if quantised else None
        query = torch.empty((rows, heads, latent + rope), dtype=dtype)
        output = torch.empty((rows, heads, latent), dtype=dtype)
        table = torch.empty((rows + 1, random.choice((1, 7, 8, 16))), dtype=torch.int32)[random.randint(0, 1) :]
        plan, items = torch.empty(planner.size, dtype=torch.int32), torch.empty((rows, FIELDS), dtype=torch.int32)
    latent_decode.latent_decode(query, cache, table, planner, plan, output, workspace, 0.1, target, scales)
    latent_prefill.latent_prefill(query, cache, table, items, output, 0.1, target, scales)
    width = latent + rope
    numbers = torch.empty((rows, width + random.choice((0, 8))), dtype=dtype, device="meta")[:, :width]
    slots = torch.empty(rows + 1, dtype=torch.int32, device="meta")[random.randint(0, 1) :]
    latent_write.write_latents(numbers, cache, slots, target, scales)


def launch_on_hopper(target: Target, random: Random) -> None:
    """Launch a prompt of a 16-bit model, with K and V in place, or quantised and copied to a workspace first."""
    model = random.choice((torch.bfloat16, torch.float16))
    stored = random.choice((model, torch.int8, torch.float8_e4m3fn))
    kv_heads, head_size = random.choice((1, 2, 8)), _head_size(random)
    heads, rows = kv_heads * random.choice((1, 2, 3, 4, 8, 12, 71)), random.choice((1, 3, 500))
    options = AttentionOptions(0.1, window=random.choice((0, 48, 1000)), softcap=random.choice((0.0, 50.0)))
    with torch.device("meta"):
        cache = torch.empty(
            (random.choice((1, 9)), random.choice((8, 16, 32, 64, 128)), kv_heads, head_size), dtype=stored
        )
        scales = torch.empty(cache.shape[:3]) if is_quantised(stored) else None
        layer = KvLayer(cache, cache, scales, scales)
        options = replace(options, sinks=random.choice((None, torch.empty(heads))))
        query = torch.empty((rows, heads + 2 * kv_heads, head_size), dtype=model)[:, :heads]
        output = torch.empty((rows, heads, head_size), dtype=model)
        table = torch.empty((rows + 1, random.choice((1, 7, 8, 16))), dtype=torch.int32)
        items, copies, workspace = torch.empty((rows, FIELDS), dtype=torch.int32), None, None
    if is_quantised(stored) and prefill_shape(heads, model, layer, options, target, copied=True).hopper:
        pages = random.choice((1, 2, 16, prefill_copy.PAGES_MAX))
        copies = torch.empty((random.randint(1, pages), FIELDS), dtype=torch.int32, device="meta")
        workspace = prefill_copy.workspace_for(pages, layer, model)
    prefill.paged_prefill(query, layer, table, items, output, options, target, copies, workspace)


@pytest.mark.parametrize("name", ["sm_75", "sm_90", "gfx942"])  # the other targets run the kernels of one of these
def test_every_declared_kernel_has_its_configurations(name: str) -> None:
    target = TARGETS[name]
    for kernel in KERNELS:
        runs = target.hopper or not kernel.hopper
        # Without matrix instructions torch computes the products and attention over latents, transformers' modules the
        # prompts of recurrent layers, and weights in codes are refused. Experts run by their kernels everywhere.
        needs_matrix = kernel.name in ("linear_kernel", "project_kernel", "by_head_kernel")
        needs_matrix |= any(part in kernel.module for part in (".kernels.stored", ".kernels.prompt_"))
        if needs_matrix or ".attention.latent_" in kernel.module:
            runs = runs and bool(target.matrix)
        made = configurations_of(kernel, target)
        assert bool(made) == runs, f"{kernel.module}.{kernel.name} for {name}"
        assert {each.specialisation.kernel.fn for each in made} <= {kernel.function.fn}


def test_every_target_has_the_limit_of_its_chip() -> None:
    assert {
        name: target.shared_bytes // KIB for name, target in TARGETS.items() if target.backend == "cuda"
    } == SHARED_KIB


def test_tables_are_complete(cpu: Device) -> None:
    for target in TARGETS.values():
        for key in itertools.product(HEAD_CLASSES, (1, 2, 4)):
            assert TileKey(*key) in target.decode
            assert TileKey(*key) in target.prefill
    assert current_target(cpu).backend == "cpu"
