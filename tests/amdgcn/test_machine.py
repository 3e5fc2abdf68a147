"""The interpreter itself: results of instructions, and proof that each of its checks can fail."""

from __future__ import annotations

import struct
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
import torch

from tools.amdgcn.checks import Fault, Findings, Unsupported
from tools.amdgcn.machine import Program, launch

Array = npt.NDArray[Any]
TEXT = """
kernel:
{body}
\ts_endpgm
\t.amdhsa_kernel kernel
\t\t.amdhsa_user_sgpr_kernarg_segment_ptr 1
\t\t.amdhsa_user_sgpr_count 2
\t\t.amdhsa_system_sgpr_workgroup_id_x 1
amdhsa.kernels:
  - .args:
{arguments}
    .kernarg_segment_align: 8
"""
ARGUMENT = "      - .offset: {offset}\n        .size: 8\n        .value_kind: global_buffer"
# s[4:5] is the first argument, s[6:7] the second; v1 is 4 x the lane's number in the workgroup.
START = ["s_load_dwordx4 s[4:7], s[0:1], 0x0", "v_lshlrev_b32_e32 v1, 2, v0"]


def run(
    lines: list[str],
    *arrays: Array,
    arch: str = "gfx942",
    waves: int = 1,
    groups: int = 1,
    lds: int = 0,
    order: str = "up",
    seed: int = 0,
) -> Findings:
    """Run `lines` after START with up to two arrays as arguments."""
    arguments = "\n".join(ARGUMENT.format(offset=8 * place) for place in range(2))
    text = TEXT.format(body="\n".join(f"\t{line}" for line in [*START, *lines]), arguments=arguments)
    addresses = [array.ctypes.data for array in arrays] + [0] * (2 - len(arrays))
    regions = [(array.ctypes.data, array.nbytes) for array in arrays]
    program = Program(text, arch)
    assert not program.unknown
    threads = waves * program.assembly.isa.lanes
    return launch(program, (groups, 1, 1), threads, struct.pack("<2Q", *addresses), regions, lds, order, seed)


def computed(instruction: str, *operands: Array, arch: str = "gfx942") -> Array:
    """Return v10 after `instruction`; the operands ([lanes] of 4 bytes) are in v2, v3 and v4."""
    lanes = 64 if arch.startswith("gfx9") else 32
    given = np.stack([np.resize(each, lanes).view(np.uint32) for each in operands])
    result = np.zeros(lanes, np.uint32)
    loads = [f"global_load_dword v{2 + place}, v1, s[4:5] offset:{4 * lanes * place}" for place in range(len(operands))]
    run(
        [*loads, "v_mov_b32_e32 v10, 0", *instruction.split("\n"), "global_store_dword v1, v10, s[6:7]"],
        given,
        result,
        arch=arch,
    )
    return result


def test_memory_outside_the_arguments_is_refused() -> None:
    numbers = np.arange(64, dtype=np.uint32)
    store = "global_store_dword v1, v0, s[4:5]"
    assert not run([store], numbers).problems()
    for wrong in (f"{store} offset:4", f"{store} offset:-4", "global_load_dword v2, v1, s[4:5] offset:4"):
        with pytest.raises(Fault, match="outside the arguments"):
            run([wrong], numbers)
    with pytest.raises(Fault, match="outside the arguments"):
        run(["s_load_dwordx2 s[8:9], s[4:5], 0xfc"], numbers)
    with pytest.raises(Fault, match="unaligned"):
        run(["global_load_ushort v2, v1, s[4:5] offset:1"], numbers)


def test_a_race_in_lds_is_seen_and_a_barrier_ends_it() -> None:
    write = "ds_write_b32 v1, v0"
    read = ["v_xor_b32_e32 v2, 0x100, v1", "ds_read_b32 v3, v2"]  # reads the other wave's bytes
    for order in ("up", "down"):
        assert any("race in LDS" in each for each in run([write, *read], waves=2, lds=512, order=order).problems())
    together = run([write, "s_barrier", *read], waves=2, lds=512)
    assert not together.problems()
    again = run([write, "s_barrier", *read, "ds_write_b32 v1, v2"], waves=2, lds=512)
    assert any("write after read" in each for each in again.problems())
    both = run(["v_mov_b32_e32 v2, 0", "ds_write_b32 v2, v0"], waves=2, lds=512)
    assert any("write after write" in each for each in both.problems())


def test_atomic_additions_of_waves_add_up_and_race_with_other_accesses() -> None:
    count = ["v_and_b32_e32 v2, 28, v1", "v_mov_b32_e32 v3, 1", "ds_add_u32 v2, v3"]  # eight counters
    clear, read = ["v_mov_b32_e32 v4, 0", "ds_write_b32 v1, v4"], ["ds_read_b32 v5, v2", "s_waitcnt lgkmcnt(0)"]
    counted = np.zeros(128, np.uint32)
    for order in ("up", "down"):
        lines = [*clear, "s_barrier", *count, "s_barrier", *read, "global_store_dword v1, v5, s[4:5]"]
        assert not run(lines, counted, waves=2, lds=512, order=order).problems()
        assert (counted == 16).all()
    assert any("atomic after write" in each for each in run([*clear, *count], waves=2, lds=512).problems())
    missing = run([*clear, "s_barrier", *count, *read], waves=2, lds=512)
    assert any("race in LDS" in each for each in missing.problems())
    after = run([*clear, "s_barrier", *count[:1], *read, *count], waves=2, lds=512)
    assert any("atomic after read" in each for each in after.problems())
    assert any("uninitialised" in each for each in run(count, lds=512).problems())


@pytest.mark.parametrize(("arch", "name"), [("gfx942", "v_sub_u32_e64"), ("gfx1100", "v_sub_nc_u32_e64")])
def test_a_clamped_subtraction_ends_at_zero(arch: str, name: str) -> None:
    first, second = np.array([5, 3, 0, 2**32 - 1], np.uint32), np.array([3, 5, 1, 1], np.uint32)
    plain, clamped = (computed(f"{name} v10, v2, v3{tail}", first, second, arch=arch)[:4] for tail in ("", " clamp"))
    assert plain.tolist() == [2, 2**32 - 2, 2**32 - 1, 2**32 - 2]
    assert clamped.tolist() == [2, 0, 0, 2**32 - 2]


def _bfloat16(numbers: Array) -> Array:
    """Return the bits of float64 numbers, rounded to bfloat16."""
    return torch.from_numpy(numbers).to(torch.bfloat16).view(torch.int16).numpy().view(np.uint16)


def test_a_product_of_bfloat16_is_rounded_once_into_the_lower_half() -> None:
    first = np.array([0x3FC1, 0xC049, 0x4100, 0x7F80], np.uint32)
    second = np.array([0x3F83, 0x4051, 0xBF00, 0x3F80], np.uint32)
    exact = np.multiply(*((each << 16).view(np.float32).astype(np.float64) for each in (first, second)))
    product = "v_dot2_bf16_bf16 v10, v2, v3, 0"
    found = computed(f"v_mov_b32_e32 v10, -1\n{product}", first, second, arch="gfx1100")[:4]
    assert (found & 0xFFFF).tolist() == _bfloat16(exact).tolist()
    assert (found >> 16).tolist() == [0xFFFF] * 4
    both = computed(product, first * 0x10001, second * 0x10001, arch="gfx1100")[:4]
    assert (both & 0xFFFF).tolist() == _bfloat16(2 * exact).tolist()


def test_lds_that_nobody_wrote_is_seen_and_so_are_its_bounds() -> None:
    assert any("uninitialised" in each for each in run(["ds_read_b32 v2, v1"], lds=256).problems())
    assert not run(["ds_write_b32 v1, v0", "ds_read_b32 v2, v1"], lds=256).problems()
    with pytest.raises(Fault, match="out of bounds"):
        run(["ds_write_b32 v1, v0"], lds=252)


@pytest.mark.parametrize(
    ("arch", "wait"),
    [
        ("gfx942", "s_waitcnt vmcnt(0)"),
        ("gfx1100", "s_waitcnt_vscnt null, 0x0"),
        ("gfx1201", "s_wait_storecnt 0x0"),
    ],
)
def test_a_store_that_nothing_waits_for_is_seen_at_the_atomic(arch: str, wait: str) -> None:
    numbers, counter = np.zeros(128, np.uint32), np.zeros(1, np.uint32)
    store, barrier = "global_store_dword v1, v0, s[4:5]", "s_barrier"
    add = ["v_mov_b32_e32 v2, 0", "v_mov_b32_e32 v3, 1", "global_atomic_add v2, v3, s[6:7]"]
    assert run([store, barrier, *add], numbers, counter, arch=arch, waves=2).unreleased
    assert run([store, *add], numbers, counter, arch=arch, waves=2).unreleased
    assert not run([store, wait, barrier, *add], numbers, counter, arch=arch, waves=2).problems()
    assert run([store, wait, store, barrier, *add], numbers, counter, arch=arch, waves=2).unreleased
    lanes = 64 if arch == "gfx942" else 32
    assert counter[0] == 4 * 2 * lanes


def test_every_order_runs_every_wave() -> None:
    for order, seed in (("up", 0), ("down", 0), ("mixed", 1), ("mixed", 2)):
        counter = np.zeros(1, np.uint32)
        add = ["v_mov_b32_e32 v2, 0", "v_mov_b32_e32 v3, 1", "s_barrier", "global_atomic_add v2, v3, s[4:5]"]
        run(add, counter, waves=3, groups=5, order=order, seed=seed)
        assert counter[0] == 5 * 3 * 64


def test_an_unknown_instruction_says_so_when_it_is_reached() -> None:
    text = TEXT.format(body="\ts_cbranch_scc1 .L\n\tv_invented_b32 v1, v2\n.L:", arguments=ARGUMENT.format(offset=0))
    program = Program(text, "gfx942")
    assert len(program.unknown) == 1 and "v_invented_b32" in program.unknown[0]
    with pytest.raises(Unsupported, match="v_invented_b32"):
        launch(program, (1, 1, 1), 64, bytes(8), [], 0)


def test_a_loop_without_end_is_ended(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tools.amdgcn.machine._TURNS_MAX", 1000)
    with pytest.raises(Fault, match="does not end"):
        run([".L:", "s_branch .L"])


def test_arithmetic_is_rounded_once_and_lanes_that_are_off_keep_theirs() -> None:
    rng = np.random.default_rng(0)
    a, b, c = (_floats(rng, 30) for _ in range(3))
    c[:32] = -(a * b)[:32]  # leaves the rounding error of the product
    exact = (a.astype(np.longdouble) * b + c).astype(np.float32)
    assert np.array_equal(computed("v_fma_f32 v10, v2, v3, v4", a, b, c).view(np.float32), exact)
    masked = computed("s_mov_b64 exec, 0xff\nv_add_f32_e32 v10, v2, v3\ns_mov_b64 exec, -1", a, b)
    assert np.array_equal(masked.view(np.float32), np.where(np.arange(64) < 8, a + b, np.float32(0)))


@pytest.mark.parametrize(
    ("instruction", "want"),
    [
        ("v_mul_hi_u32 v10, v2, v3", lambda a, b: (a.astype(np.uint64) * b) >> np.uint64(32)),
        ("v_ashrrev_i32_e32 v10, 3, v2", lambda a, b: (a.view(np.int32) >> 3).view(np.uint32)),
        ("v_bfe_u32 v10, v2, 5, 7", lambda a, b: a >> 5 & 127),
        ("v_and_or_b32 v10, v2, 15, v3", lambda a, b: a & 15 | b),
        ("v_perm_b32 v10, v2, v3, 0x07060100", lambda a, b: a & 0xFFFF0000 | b & 0xFFFF),
        ("v_alignbit_b32 v10, v2, v3, 8", lambda a, b: a << 24 | b >> 8),
        ("v_mov_b32_dpp v10, v2 row_shr:1 row_mask:0xf bank_mask:0xf bound_ctrl:1", lambda a, b: _shifted_in_rows(a)),
        ("v_readlane_b32 s9, v2, 5\nv_mov_b32_e32 v10, s9", lambda a, b: np.full(64, a[5])),
        ("v_cmp_lt_u32_e32 vcc, v2, v3\nv_cndmask_b32_e32 v10, v2, v3, vcc", np.maximum),
        ("v_add_co_u32_e32 v5, vcc, v2, v3\nv_addc_co_u32_e64 v10, vcc, 0, 0, vcc", lambda a, b: a + b < a),
        ("v_pk_add_u16 v10, v2, v3", lambda a, b: (a.view(np.uint16) + b.view(np.uint16)).view(np.uint32)),
        ("v_pk_sub_i16 v10, v2, v3", lambda a, b: (a.view(np.uint16) - b.view(np.uint16)).view(np.uint32)),
        ("v_cvt_f32_ubyte2_e32 v10, v2", lambda a, b: (a >> 16 & 255).astype(np.float32).view(np.uint32)),
        ("s_bfe_i32 s9, 0x80000001, 0x4001c\nv_mov_b32_e32 v10, s9", lambda a, b: np.full(64, 2**32 - 8)),
    ],
    ids=lambda value: value.split(" ")[0] if isinstance(value, str) else "",
)  # fmt: skip
def test_instructions_compute_what_the_manual_says(instruction: str, want: Any) -> None:
    a, b = np.random.default_rng(1).integers(0, 2**32, (2, 64), dtype=np.uint32)
    assert np.array_equal(computed(instruction, a, b), np.asarray(want(a, b)).astype(np.uint32))


def _floats(rng: np.random.Generator, exponent: int) -> Array:
    return np.ldexp(rng.normal(size=64), rng.integers(-exponent, exponent, 64)).astype(np.float32)


def _shifted_in_rows(a: Array) -> Array:
    rows = np.roll(a.reshape(4, 16), 1, axis=1)
    rows[:, 0] = 0
    return rows.reshape(-1)


def test_division_is_rounded_right() -> None:
    """Runs the sequence that LLVM emits, for numbers of every magnitude."""
    rng = np.random.default_rng(2)
    a, b = (_floats(rng, 60) for _ in range(2))
    lines = (
        "v_div_scale_f32 v5, s[8:9], v3, v3, v2", "v_rcp_f32_e32 v6, v5", "v_div_scale_f32 v7, vcc, v2, v3, v2",
        "v_fma_f32 v8, -v5, v6, 1.0", "v_fmac_f32_e32 v6, v8, v6", "v_mul_f32_e32 v8, v7, v6",
        "v_fma_f32 v9, -v5, v8, v7", "v_fmac_f32_e32 v8, v9, v6", "v_fma_f32 v5, -v5, v8, v7",
        "v_div_fmas_f32 v5, v5, v6, v8", "v_div_fixup_f32 v10, v5, v3, v2",
    )  # fmt: skip
    assert np.array_equal(computed("\n".join(lines), a, b).view(np.float32), a / b)


def test_matrix_instructions_place_their_numbers() -> None:
    """Multiplies [16, 4] x [4, 16] in float32 on gfx9: lane l holds row l % 16 and depth l // 16."""
    rng = np.random.default_rng(3)
    a, b = (rng.integers(-8, 8, 64).astype(np.float32) for _ in range(2))
    product = a.reshape(4, 16).T @ b.reshape(4, 16)
    for register in range(4):
        lines = f"v_mfma_f32_16x16x4_f32 v[20:23], v2, v3, 0\nv_mov_b32_e32 v10, v{20 + register}"
        got = computed(lines, a, b).view(np.float32).reshape(4, 16)
        assert np.array_equal(got, product[register::4])


def test_halves_of_a_wmma_operand_must_be_equal() -> None:
    lines = [f"v_mov_b32_e32 v{20 + place}, 0" for place in range(16)]
    multiply = "v_wmma_f32_16x16x16_f16 v[40:47], v[20:27], v[28:35], v[40:47]"
    assert not run([*lines, multiply], arch="gfx1100").problems()
    with pytest.raises(Fault, match="halves"):
        run([*lines, "v_mov_b32_e32 v21, v0", multiply], arch="gfx1100")


def test_a_buffer_ends_where_its_descriptor_says() -> None:
    """Lanes past the end of the buffer store nothing and load zeros."""
    numbers, result = np.arange(1, 65, dtype=np.uint32), np.full(64, 7, np.uint32)
    lines = [
        *("s_mov_b32 s8, s4", "s_and_b32 s9, s5, 0xffff", "s_movk_i32 s10, 0x80", "s_mov_b32 s11, 0x27000"),
        *("buffer_load_dword v2, v1, s[8:11], 0 offen", "global_store_dword v1, v2, s[6:7]"),
        "buffer_store_dword v0, v1, s[8:11], 0 offen",
    ]
    run(lines, numbers, result)
    assert np.array_equal(result, np.where(np.arange(64) < 32, np.arange(1, 65), 0))
    assert np.array_equal(numbers, np.where(np.arange(64) < 32, np.arange(64), np.arange(1, 65)))


def test_halves_in_scalar_registers_and_beside_sums() -> None:
    halves = np.array([1.5, -2.0], np.float16).view(np.uint32)
    lines = ["s_load_u16 s8, s[4:5], 0x2", "s_wait_kmcnt 0x0", "s_cvt_f32_f16 s9, s8", "v_mov_b32_e32 v10, s9"]
    result = np.zeros(32, np.uint32)
    run([*lines, "global_store_b32 v1, v10, s[6:7]"], halves, result, arch="gfx1201")
    assert (result.view(np.float32) == -2).all()
    narrowed = [*lines, "s_cvt_f16_f32 s8, s9", "v_mov_b32_e32 v10, s8", "global_store_b32 v1, v10, s[6:7]"]
    run(narrowed, halves, result, arch="gfx1201")
    assert (result == halves[0] >> 16).all()
    with pytest.raises(Fault, match="outside the arguments"):
        run(["s_load_u16 s8, s[4:5], 0x4"], halves, result, arch="gfx1201")
    three = np.array([3.0, 7.0], np.float16).view(np.uint32)  # the upper half stays
    found = computed("v_mov_b32_e32 v10, v4\nv_fmac_f16_e32 v10, v2, v3", halves, halves, three, arch="gfx1100")
    assert (found.view(np.float16).reshape(-1, 2) == [3 + 1.5 * 1.5, 7]).all()
