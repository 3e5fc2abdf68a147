"""Weights that stay in codes: packing, and products by the kernel, compared with the numbers of the codes."""

from __future__ import annotations

from dataclasses import replace
from functools import partial

import gguf
import pytest
import torch

pytest.importorskip("triton")

from kvforge.worker.attention.triton_attention import is_interpreted
from kvforge.worker.device.device import open_device
from kvforge.worker.device.targets import TARGETS, current_target
from kvforge.worker.kernels import stored_linear as module
from kvforge.worker.kernels.activations import SILU, Activation
from kvforge.worker.kernels.code_tables import CODES, SPAN_COLUMNS, narrow_spans, pack, span_of, unit_columns, unpack
from kvforge.worker.kernels.launching import LaunchSettings
from kvforge.worker.kernels.stored import (
    Codes,
    StoredWeight,
    as_int8,
    join_rows,
    quantise_codes,
    stack_experts,
    stored_problem,
    with_exponents,
    without_exponents,
)
from kvforge.worker.kernels.stored_linear import depth_of, parts_of, row_stride, stages_of, stored_linear, tiles_of
from tests.amount import thinned

DEVICE = open_device("auto")
runs_kernels = pytest.mark.skipif(
    not DEVICE.runs_kernels and not is_interpreted(), reason="needs a GPU or the interpreter"
)
on_hopper_or_interpreted = pytest.mark.skipif(
    DEVICE.runs_kernels and not current_target(DEVICE).hopper, reason="a way of Hopper's instructions"
)
DTYPES = (torch.float16, torch.bfloat16) if DEVICE.runs_kernels else (torch.float16,)
Layout = tuple[str, int, str, int]
EXACT = 1e-4 if DEVICE.runs_kernels else 1e-5  # matrix instructions truncate what they add
# code, columns of a group (0: all), what groups have beside scales, rows that share a scale
LAYOUTS = (
    *(("int8", 0, "", 1), ("int8", 128, "", 1), ("e4m3", 0, "", 1), ("e4m3", 128, "", 64)),
    *(("int4", 128, "", 1), ("int4", 64, "zeros", 1), ("int4", 0, "", 1), ("int4", 32, "", 1)),
    *(("e2m1", 32, "", 1), ("e2m1", 64, "", 1), ("e2m1", 0, "factors", 1), ("nf4", 64, "", 1), ("iq4", 32, "", 1)),
    *(("int4", 32, "lows", 1), ("int4", 64, "lows", 1), ("int8", 16, "", 1), ("int8", 16, "lows", 1)),
    *(("int8", 32, "lows", 1), ("int8", 32, "", 1), ("e2m1", 0, "exponents", 1)),
)
IN_FOUR_PARTS = LAYOUTS[7], LAYOUTS[8], LAYOUTS[15]  # int4, e2m1 and int8 with small groups: steps of 64 and 32 columns
each_layout = pytest.mark.parametrize("layout", LAYOUTS, ids=lambda each: "-".join(map(str, each)))


def random_codes(n: int, k: int, layout: Layout, seed: int = 0, experts: tuple[int, ...] = ()) -> Codes:
    """Return a matrix of every code, with scales that differ."""
    code, group, extra, scaled_rows = layout
    generator = torch.Generator().manual_seed(seed)

    def whole(most: int, *shape: int) -> torch.Tensor:
        return torch.randint(most, (*experts, *shape), generator=generator, dtype=torch.uint8)

    codes = whole(256 if CODES[code] == 2 else 16, n, k)
    if code == "e4m3":
        codes = torch.where(codes & 127 == 127, codes & 128, codes)  # no NaN
    groups = k // group if group else 1
    scales = torch.rand((*experts, groups, -(-n // scaled_rows)), generator=generator) * 0.01 + 0.001
    zeros = whole(16, groups, n) if extra == "zeros" else None
    lows = -torch.rand((*experts, groups, n), generator=generator) * 0.1 if extra == "lows" else None
    factors = None
    if extra == "factors":  # 0 to 448
        factors = whole(127, k // unit_columns(code), n, 4).view(torch.int32).squeeze(-1)
        scales *= 0.01
    exponents = None
    if extra == "exponents":  # powers from 2 ** -20 to 2 ** -5
        four = torch.randint(16, (*experts, -(-k // unit_columns(code) // 2), n, 4), generator=generator) + 107
        exponents = four.to(torch.uint8).view(torch.int32).squeeze(-1)
    words = pack(codes, code, groups)
    found = Codes(code, words, scales, zeros, scaled_rows, lows=lows, factors=factors, exponents=exponents)
    return found.to(DEVICE.torch_device)


def wanted(x: torch.Tensor, codes: Codes) -> torch.Tensor:
    return x.double() @ codes.widened().double().t()


def launched(multiprocessors: int = 3, joins: bool = False) -> LaunchSettings:
    """Return settings of this device. joins: multiply as on Hopper, all numbers of a step at once."""
    target = replace(current_target(DEVICE), multiprocessors=multiprocessors)
    return LaunchSettings(replace(target, hopper=True) if joins else target)


@pytest.mark.parametrize("code", CODES)
@pytest.mark.parametrize(("units", "span"), [(3, 1), (2, 2), (8, 4)])
def test_packing_keeps_every_code(code: str, units: int, span: int) -> None:
    span = min(span, SPAN_COLUMNS // unit_columns(code))
    codes = torch.randint(256 if CODES[code] == 2 else 16, (2, 5, units * unit_columns(code)), dtype=torch.uint8)
    words = pack(codes, code)
    assert words.shape == (2, units // span, 5, 16 * span)
    assert torch.equal(unpack(words, code), codes)
    assert torch.equal(
        narrow_spans(words, 1), torch.cat([pack(each, code) for each in codes.split(unit_columns(code), -1)], 1)
    )
    assert torch.equal(unpack(narrow_spans(words, 1), code), codes)


def test_a_span_is_a_step_of_a_group() -> None:
    assert [span_of("int8", 4096, groups) for groups in (1, 32, 64, 128, 256)] == [4, 4, 2, 1, 1]
    assert [span_of("int4", 4096, groups) for groups in (1, 32, 64, 128)] == [2, 2, 1, 1]
    assert [span_of("e2m1", k, k // 32) for k in (4096, 2880)] == [2, 1]


@runs_kernels
@each_layout
def test_the_bits_do_not_depend_on_spans(layout: Layout) -> None:
    codes, dtype = random_codes(64, 512, layout), DTYPES[-1]
    x = torch.randn(3, 512, dtype=dtype, device=DEVICE.torch_device)
    narrow = replace(codes, words=narrow_spans(codes.words, 1))
    assert torch.equal(narrow.widened(), codes.widened())
    found = [stored_linear(launched(), x, each, None, torch.float32) for each in (codes, narrow)]
    assert torch.equal(*found)
    joined = join_rows([codes, narrow])
    assert joined is not None and torch.equal(joined.widened(), codes.widened().repeat(2, 1))


def test_codes_are_the_numbers_of_their_format() -> None:
    """Against torch's float8, and the table of the OCP specification of MX formats."""
    every = torch.arange(256, dtype=torch.uint8)
    bytes_ = every.view(8, 32)
    found = Codes("e4m3", pack(bytes_, "e4m3"), torch.ones(1, 8)).widened()
    assert torch.equal(found.nan_to_num(500), bytes_.view(torch.float8_e4m3fn).float().nan_to_num(500))
    nibbles = (every % 16).view(4, 64)
    of_four = Codes("e2m1", pack(nibbles, "e2m1"), torch.ones(1, 4)).widened()
    table = [0, 0.5, 1, 1.5, 2, 3, 4, 6]
    assert of_four.flatten()[:16].tolist() == [*table, *(-each for each in table)]
    quantiles = Codes("nf4", pack(nibbles, "nf4"), torch.ones(1, 4)).widened().flatten()[:16]
    # As the article makes them: the middles of equal shares of a normal distribution, 8 above 0 and 7 below it.
    normal, offset = torch.distributions.Normal(0, 1), 0.5 * (1 / 32 + 1 / 30)
    above = normal.icdf(torch.linspace(1 - offset, 0.5, 9)[:-1])
    below = -normal.icdf(torch.linspace(1 - offset, 0.5, 8)[:-1])
    assert torch.allclose(quantiles, torch.cat((below, torch.zeros(1), above.flip(0))) / above[0], atol=1e-4)
    of_iq4 = Codes("iq4", pack(nibbles, "iq4"), torch.ones(1, 4)).widened().flatten()[:16]
    assert of_iq4.tolist() == list(gguf.quants.IQ4_NL.kvalues)
    of_ints = Codes("int4", pack(nibbles, "int4"), torch.ones(1, 4), torch.full((1, 4), 3, dtype=torch.uint8))
    assert of_ints.widened().flatten()[:16].tolist() == list(range(-3, 13))


@pytest.mark.parametrize("code", ["int8", "e4m3", "int4"])
@pytest.mark.parametrize("experts", [(), (3,)])
def test_quantising_keeps_what_the_code_can(code: str, experts: tuple[int, ...]) -> None:
    weight = torch.randn(*experts, 24, 256, generator=torch.Generator().manual_seed(1))
    kept = weight.clone()
    codes = quantise_codes(weight, code)
    assert torch.equal(weight, kept)
    assert codes.shape == weight.shape
    apart = (codes.widened() - weight).abs()
    group = codes.group
    largest = weight.unflatten(-1, (-1, group)).abs().amax(-1, keepdim=True).expand(*weight.shape[:-1], -1, group)
    share = {"int8": 0.5 / 127, "int4": 0.5 / 7, "e4m3": 1 / 16}[code]
    assert bool((apart <= largest.flatten(-2) * share * 1.01).all())


@each_layout
def test_rows_are_joined_and_cut(layout: Layout) -> None:
    parts = [random_codes(n, 256, layout, seed) for seed, n in enumerate((64, 128))]
    joined = join_rows(parts)
    assert joined is not None
    numbers = torch.cat([each.widened() for each in parts])
    assert torch.equal(joined.widened(), numbers)
    assert torch.equal(joined.rows(slice(64, 192)).widened(), numbers[64:])
    uneven = join_rows([random_codes(40, 256, layout, 3), *parts])
    assert uneven is not None and torch.equal(uneven.widened()[40:], numbers)


@each_layout
def test_columns_are_cut_and_rows_ordered(layout: Layout) -> None:
    codes = random_codes(64, 512, layout)
    numbers = codes.widened()
    assert torch.equal(codes.columns(128, 384).widened(), numbers[:, 128:384])
    if codes.group == 512 and codes.exponents is None:  # inside of a span
        unit = unit_columns(codes.code)
        assert torch.equal(codes.columns(unit, 512 - unit).widened(), numbers[:, unit : 512 - unit])
    order = torch.randperm(64, generator=torch.Generator().manual_seed(0))
    assert torch.equal(codes.in_row_order(order).widened(), numbers[order])
    experts = stack_experts([codes, random_codes(64, 512, layout, 1)])
    assert torch.equal(experts.of_expert(0).widened(), numbers)


def test_other_codes_are_not_joined() -> None:
    one, other = random_codes(16, 128, LAYOUTS[0]), random_codes(16, 128, LAYOUTS[2])
    assert join_rows([one, other]) is None
    with_zeros = random_codes(16, 128, ("int4", 64, "zeros", 1))
    plain = random_codes(16, 128, ("int4", 64, "", 1))
    both = join_rows([plain, with_zeros])
    assert both is not None and torch.equal(both.widened(), torch.cat([plain.widened(), with_zeros.widened()]))


def test_shapes_that_no_kernel_takes_are_named() -> None:
    assert stored_problem((64, 48), "int8") == "its 48 columns are not a multiple of 32"
    assert stored_problem((64, 96), "int4", 32) == "its 96 columns are not a multiple of 64"
    assert stored_problem((64, 192), "int4", 128) == "groups of 128 columns do not fit 192"
    assert stored_problem((64, 128), "e2m1", 32) == "" == stored_problem((64, 96), "e4m3")


@runs_kernels
@each_layout
@pytest.mark.parametrize("joins", [False, pytest.param(True, marks=on_hopper_or_interpreted)])
@pytest.mark.parametrize("tokens", [1, 17, 40])
def test_a_product_is_that_of_the_numbers(layout: Layout, tokens: int, joins: bool) -> None:
    n, k = 72, 256
    codes = random_codes(n, k, layout)
    for dtype in DTYPES:
        x = torch.full((tokens + 2, k), float("nan"), dtype=dtype, device=DEVICE.torch_device)
        x[:tokens].normal_()
        bias = torch.randn(n, dtype=dtype, device=DEVICE.torch_device)
        output = torch.full((1, tokens, n), float("nan"), device=DEVICE.torch_device)
        stored_linear(launched(joins=joins), x[:tokens], codes, bias, dtype, output=output)
        right = wanted(x[:tokens], codes) + bias.double()
        # The numbers of nf4 are rounded to 16 bits.
        exact = EXACT if codes.code != "nf4" else 2e-3 if dtype == torch.bfloat16 else 3e-4
        assert float((output[0] - right).abs().max()) <= exact * float(right.abs().max())
        weight = StoredWeight(codes, dtype)
        plain = weight.product(x[:tokens], bias)
        assert float((plain - right).abs().max()) <= (1e-2 if dtype == torch.bfloat16 else 2e-3) * float(
            right.abs().max()
        )


@runs_kernels
@pytest.mark.parametrize(
    "layout", [LAYOUTS[each] for each in (0, 4, 5, 8, 10, 13, -1)], ids=lambda each: f"{each[0]}-{each[2]}"
)
@pytest.mark.parametrize("tokens", [3, 20])
def test_a_gated_product_is_that_of_the_numbers(layout: Layout, tokens: int) -> None:
    n, k, dtype = 40, 256, DTYPES[0]
    codes = random_codes(2 * n, k, layout)
    x = torch.randn(tokens, k, dtype=dtype, device=DEVICE.torch_device)
    gate, up = wanted(x, codes).chunk(2, dim=1)
    found = stored_linear(launched(), x, codes, None, dtype, gated=True)[0]
    right = SILU.gate(gate.to(dtype), up.to(dtype)).double()
    assert float((found - right).abs().max()) <= 4e-3 * float(right.abs().max())
    one = stored_linear(launched(), x, codes, None, dtype, activation=Activation("gelu"))[0]
    right = Activation("gelu").apply(wanted(x, codes).to(dtype)).double()
    assert float((one - right).abs().max()) <= 4e-3 * float(right.abs().max())


# Soak tests: the others have each code, rows with one scale and with several, and each kind of numbers beside scales.
COVERED = [LAYOUTS[each] for each in (1, 2, 4, 6, 9, 14, 17, 18)]


@runs_kernels
@pytest.mark.parametrize(
    "layout",
    [pytest.param(each, marks=[pytest.mark.soak] if each in COVERED else []) for each in LAYOUTS],
    ids=lambda each: "-".join(map(str, each)),
)
def test_a_row_has_the_same_bits_in_any_company(layout: Layout, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also where few tokens leave the parts of the inner dimension to the next operation."""
    if not DEVICE.runs_kernels:  # the interpreter's products have other bits for each shape of a tile
        monkeypatch.setattr(module, "tiles_of", lambda *_: module.StoredTiles(64, 16, 4, 2))
    n, dtype, launch = 64, DTYPES[-1], launched(multiprocessors=132)
    parts = 4 if layout in IN_FOUR_PARTS else 2
    k = depth_of(random_codes(n, 2048, layout), launch.target) * module.PART_STEPS * parts
    codes = random_codes(n, k, layout)
    x = torch.randn(70, k, dtype=dtype, device=DEVICE.torch_device)
    assert parts_of(codes, n, launch.target) == parts
    for divisible in (False, True):
        whole = stored_linear(launch, x, codes, None, torch.float32, divisible=divisible)
        assert len(whole) == 1
        for first, count in ((0, 1), (5, 1), (32, 1), (3, 16), (1, 20))[:: thinned(2)]:
            found = stored_linear(launch, x[first : first + count], codes, None, torch.float32, divisible=divisible)
            assert len(found) == (parts if divisible else 1)
            total = found[0]
            for each in found[1:]:
                total = total + each
            assert torch.equal(total, whole[0, first : first + count])


@runs_kernels
@pytest.mark.parametrize("joins", [False, pytest.param(True, marks=on_hopper_or_interpreted)])
@pytest.mark.parametrize("matrix", ["", "v_wmma"])
@pytest.mark.parametrize("units", [5, 13])
def test_half_a_step_of_exponents_reads_nothing_outside(joins: bool, matrix: str, units: int) -> None:
    """The columns of a word of exponents end behind the weight where its units are odd."""
    n, k, dtype = 72, 64 * units, DTYPES[0]
    codes = random_codes(n, k, ("e2m1", 0, "exponents", 1))
    assert codes.exponents is not None and len(codes.exponents) == (units + 1) // 2
    x = torch.full((3, k + 64), float("nan"), dtype=dtype, device=DEVICE.torch_device)[:, :k].normal_()
    launch = launched(joins=joins)
    if matrix and DEVICE.runs_kernels:
        pytest.skip("a shape of other GPUs")
    launch = LaunchSettings(replace(launch.target, matrix=matrix or launch.target.matrix))
    found = stored_linear(launch, x, codes, None, torch.float32)[0]
    right = wanted(x, codes)
    assert float((found - right).abs().max()) <= EXACT * float(right.abs().max())


@runs_kernels
@on_hopper_or_interpreted
@each_layout
@pytest.mark.parametrize("k", [1024, 2304])
def test_bits_are_the_same_for_any_steps_of_a_turn(layout: Layout, k: int, monkeypatch: pytest.MonkeyPatch) -> None:
    n, dtype = 64, DTYPES[-1]
    codes = random_codes(n, k, layout)
    x = torch.randn(5, k, dtype=dtype, device=DEVICE.torch_device)
    launch, counts = launched(joins=True), []
    choose = module.steps_together
    monkeypatch.setattr(module, "can_sum", lambda *_: False)  # the kernels of `stored_hopper` have turns of their own

    def found(*arguments: object) -> int:
        counts.append(choose(*arguments))  # type: ignore[arg-type]
        return counts[-1]

    monkeypatch.setattr(module, "steps_together", found)
    several = stored_linear(launch, x, codes, None, torch.float32)
    monkeypatch.setattr(module, "steps_together", lambda *_: 1)
    assert torch.equal(several, stored_linear(launch, x, codes, None, torch.float32))
    assert counts[0] > 1


@pytest.mark.parametrize(("units", "steps"), [(5, 3), (13, 8), (45, 24), (9, 6), (12, 6)])
def test_an_empty_step_lets_the_steps_of_mxfp4_share_turns(units: int, steps: int) -> None:
    """45 units, the columns of gpt-oss, are 23 steps, which no smaller number divides."""
    codes, target = random_codes(16, 64 * units, ("e2m1", 0, "exponents", 1)), TARGETS["sm_90"]
    assert module.steps_of(codes, target) == steps
    assert module.last_step(codes, target) == (units + 1) // 2 - 1
    assert module.steps_together(codes, steps, module.tiles_of(1, 16, target), 256, target) > 1
    assert module.steps_of(codes, TARGETS["sm_80"]) == module.last_step(codes, TARGETS["sm_80"]) + 1


def test_a_matrix_of_too_many_words_is_refused() -> None:
    words = torch.empty((1 << 10, 1 << 16, 32), dtype=torch.int16, device="meta")
    with pytest.raises(ValueError, match=r"a matrix of 65536 x 131072 codes has more than 2147483647 words"):
        Codes("int4", words, torch.empty((1, 1 << 16), device="meta"))


def test_the_steps_of_a_turn_fit_its_registers_and_divide_the_steps() -> None:
    target = TARGETS["sm_90"]
    few, many = module.tiles_of(1, 4096, target), module.tiles_of(64, 4096, target)
    together = partial(module.steps_together, target=target)
    q8_0, q4_k, q6_k = (random_codes(16, 4096, each) for each in (LAYOUTS[-2], LAYOUTS[13], LAYOUTS[15]))
    assert together(q8_0, 128, few, 128) == 4 == together(q6_k, 128, few, 128)
    assert together(q8_0, 128, many, 128) == 2 and together(q6_k, 128, many, 128) == 1
    assert together(q4_k, 64, few, 128) == 2 == together(q4_k, 64, few, 256)
    per_row = random_codes(16, 4096, LAYOUTS[0])
    assert together(per_row, 32, few, 128) == 1 and together(per_row, 32, few, 256) == 2
    assert together(random_codes(16, 2880, ("e2m1", 32, "", 1)), 45, few, 128) == 3
    assert module.steps_together(q8_0, 128, few, 128, TARGETS["gfx942"]) == 1


@pytest.mark.parametrize("experts", [(), (2,)])
def test_scales_of_32_bits_become_exponents(experts: tuple[int, ...]) -> None:
    n, k = 6, 192
    codes = random_codes(n, k, ("e2m1", 32, "", 1), experts=experts)
    whole = torch.randint(110, 125, codes.scales.shape, generator=torch.Generator().manual_seed(0))
    scales = torch.exp2(whole.float() - 127).to(codes.scales.device)
    codes = replace(codes, scales=scales)
    found = with_exponents(codes, torch.bfloat16)
    assert found.kind == "e2m1 with exponents" and torch.equal(found.widened(), codes.widened())
    assert sum(each.nbytes for each in found.tensors()) < sum(each.nbytes for each in codes.tensors())
    assert torch.equal(found.widened(torch.float16), with_exponents(codes, torch.float16).widened(torch.float16))
    assert torch.equal(without_exponents(found).scales, scales)
    if not experts:
        wide = as_int8(found)
        assert wide is not None and torch.equal(wide.widened(), codes.widened())


def test_scales_that_are_not_exact_stay() -> None:
    codes = random_codes(2, 64, ("e2m1", 32, "", 1))
    for scale, dtype in ((0.3, torch.bfloat16), (4.0, torch.bfloat16), (4.0, torch.float16), (2.0**-24, torch.float16)):
        other = replace(codes, scales=torch.full_like(codes.scales, scale))
        assert with_exponents(other, dtype) is other
    largest = replace(codes, scales=torch.full_like(codes.scales, 2.0))
    assert with_exponents(largest, torch.bfloat16).exponents is not None
    nothing = with_exponents(replace(codes, scales=torch.full_like(codes.scales, 2.0**-127)), torch.bfloat16)
    assert nothing.exponents is not None and not bool(nothing.widened().any())
    assert with_exponents(largest, torch.float32) is largest


def test_exponents_are_cut_in_pairs_of_units() -> None:
    codes = random_codes(8, 320, ("e2m1", 0, "exponents", 1))
    assert torch.equal(codes.columns(128, 320).widened(), codes.widened()[:, 128:])
    with pytest.raises(ValueError, match="come in steps of 128"):
        codes.columns(64, 320)


@runs_kernels
def test_the_result_shows_a_broken_number() -> None:
    codes = random_codes(64, 256, LAYOUTS[0])
    x = torch.zeros(2, 256, dtype=DTYPES[0], device=DEVICE.torch_device)
    x[1, 255] = float("nan")
    found = stored_linear(launched(), x, codes, None, DTYPES[0])[0]
    assert bool(found[1].isnan().all()) and bool((found[0] == 0).all())


def test_the_depth_follows_from_the_weight() -> None:
    target = TARGETS["sm_90"]
    assert depth_of(random_codes(16, 2048, LAYOUTS[4]), target) == 128
    assert depth_of(random_codes(16, 192, ("e4m3", 0, "", 1)), target) == 64
    assert depth_of(random_codes(16, 96, ("int8", 0, "", 1)), target) == 32
    assert depth_of(random_codes(16, 2880, ("e2m1", 32, "", 1)), target) == 64
    for extra, depth in (("exponents", 128), ("factors", 64)):
        assert depth_of(random_codes(16, 2880, ("e2m1", 0, extra, 1)), target) == depth
        assert depth_of(random_codes(16, 2048, ("e2m1", 0, extra, 1)), target) == 128
        assert depth_of(random_codes(16, 2048, ("e2m1", 0, extra, 1)), TARGETS["gfx1100"]) == 64


def test_two_products_of_one_input_have_one_stage_in_tensor_memory() -> None:
    """tests/ptx runs them: with more stages, the second product reads the next turn's x."""
    for layout in LAYOUTS:
        for target in (each for each in TARGETS.values() if each.backend == "cuda"):
            tiles = tiles_of(1, 64, target)
            stages = 1 if target.name == "sm_100" and layout[2] == "lows" else tiles.stages
            assert stages_of(tiles, random_codes(16, 2048, layout), target) == stages
    assert tiles_of(1, 64, TARGETS["sm_100"]).stages > 1


def test_the_stride_of_a_single_row_is_its_length() -> None:
    """torch may call it 1, which a kernel would be compiled for."""
    assert row_stride(torch.zeros(64).as_strided((1, 64), (1, 1))) == 64
    assert row_stride(torch.zeros((3, 128))[:, :64]) == 128
