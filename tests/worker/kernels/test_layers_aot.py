"""Decoder layers launch only configurations that `test_aot` compiles."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from itertools import product
from random import Random
from typing import Any

import pytest
import torch

pytest.importorskip("triton")

from kvforge.worker.attention import KvLayer
from kvforge.worker.attention.states import StateRows, StateTensor
from kvforge.worker.device.device import Device
from kvforge.worker.device.exchange import ATTENTION, LOGITS, PROGRAMS_MAX, RankBuffers
from kvforge.worker.device.targets import TARGETS
from kvforge.worker.kernels import HEAD_SIZE_MAX, HIDDEN_MAX, fused, plain
from kvforge.worker.kernels.activation import apply_activation
from kvforge.worker.kernels.activations import KINDS, SILU, Activation
from kvforge.worker.kernels.exchange import DirectExchange, norm_of_shares, sum_share
from kvforge.worker.kernels.expert_loop import ExpertMatrices
from kvforge.worker.kernels.fused import FusedOperations
from kvforge.worker.kernels.layer_weights import Norm
from kvforge.worker.kernels.project import HEAD_SIZES
from kvforge.worker.kernels.recurrent import (
    CONVOLUTION,
    RECURRENT,
    Convolution,
    DeltaInputs,
    GatedDelta,
    StateOperations,
)
from kvforge.worker.kernels.registry import KERNELS
from kvforge.worker.kernels.selective import SelectiveInputs
from kvforge.worker.kernels.state_space import StateSpace, StateSpaceInputs
from kvforge.worker.kernels.stored import StoredWeight
from tools.aot import latent_layers, recurrent, recurrent_prompts, selective, state_space, stored
from tools.aot.compilation import Configuration
from tools.aot.configurations import configurations_of
from tools.aot.experts import GATES, OSS_GATING, ROUTERS, Layout
from tools.aot.layers import RANKS
from tools.aot.specialise import recorded

KV_DTYPES = (torch.bfloat16, torch.float16, torch.float32)
GATED = ("clamped_swiglu", *KINDS)
EXPERTS = ("router_kernel", "expert_sort", "grouped")
LAYERS = [kernel for kernel in KERNELS if kernel.module.startswith("kvforge.worker.kernels.")]
OF_EXPERTS = [kernel for kernel in LAYERS if kernel.module.endswith(EXPERTS)]
OF_CODES = [kernel for kernel in LAYERS if ".kernels.stored_" in kernel.module]
OF_LATENTS = [kernel for kernel in LAYERS if kernel.module.endswith(("by_head", "latent_inputs", "wide_linear"))]
NORMS = [kernel for kernel in LAYERS if kernel.name in ("gated_norm_kernel", "group_norm_kernel")]  # of prompts too
STEPS = ("state_space_kernel", "selective_kernel")
OF_STATES = NORMS + [kernel for kernel in LAYERS if kernel.module.endswith("recurrent_kernels") or kernel.name in STEPS]
OF_PROMPTS = [kernel for kernel in LAYERS if ".kernels.prompt_" in kernel.module]
# The other targets launch the same kernels as one of these.
COMPILED = ("sm_75", "sm_80", "sm_90", "sm_120", "gfx90a", "gfx942", "gfx1100", "gfx1151", "gfx1201")


@pytest.mark.parametrize("name", COMPILED)
def test_whatever_is_launched_was_compiled(name: str, cpu: Device, monkeypatch: pytest.MonkeyPatch) -> None:
    """Operations of random shapes. Some compiled sums of many parts occur only on GPUs of another size."""
    layers = [kernel for kernel in LAYERS if kernel not in OF_EXPERTS + OF_CODES + OF_LATENTS + OF_STATES + OF_PROMPTS]
    declared = [configuration for kernel in layers for configuration in configurations_of(kernel, TARGETS[name])]
    compiled = {each.kind(): each.label for each in declared}
    both = []
    for steady in (False, True):
        target = replace(TARGETS[name], steady=steady)
        monkeypatch.setattr(fused, "current_target", lambda device, target=target: target)
        both.append(FusedOperations(cpu, overlap=target.chained))
    random = Random(5)
    # torch derives the shapes of these in Python, which took half of the time.
    for module in (fused, plain):
        monkeypatch.setattr(module, "linear", empty_product)
    monkeypatch.setattr(
        torch, "empty_like", lambda x: torch.empty_strided(x.shape, x.stride(), dtype=x.dtype, device=x.device)
    )
    with recorded(TARGETS[name]) as made:
        for _ in range(1000):
            operate(random.choice(both), random)
    launched = {Configuration("", each, False).kind(): each for each in made}
    assert not [str(each) for kind, each in launched.items() if kind not in compiled]
    kernels = {each.specialisation.kernel.__name__ for each in declared}
    assert {each.kernel.__name__ for each in made} == kernels
    assert len(launched) > len(compiled) / 2, "shapes too much alike"


def empty_product(x: torch.Tensor, weight: torch.Tensor, _bias: torch.Tensor | None = None) -> torch.Tensor:
    assert x.shape[-1] == weight.shape[1] and x.dtype == weight.dtype
    return x.new_empty((*x.shape[:-1], len(weight)))


def operate(operations: FusedOperations, random: Random) -> None:
    """Launch every operation once as FusedDecoder does, on the device "meta"."""
    dtype = random.choice((torch.bfloat16, torch.float16, torch.float32))
    hidden = 8 * random.randint(1, random.choice((64, 256, HIDDEN_MAX)) // 8)
    inner = 8 * random.randint(1, random.choice((4000, 9000)))
    if random.random() < 0.5:
        hidden, inner = random.choice((512, 1024, 2048, 4096)), 128 * random.randint(1, 100)
    tokens, head_size = random.choice((1, 5, 16, 17, 100)), 8 * random.randint(1, HEAD_SIZE_MAX // 8)
    heads, kv_heads = 4, 2

    def made(*shape: int) -> torch.Tensor:
        return torch.empty(shape, dtype=dtype, device="meta")

    def bias(size: int) -> torch.Tensor | None:
        return made(size) if random.random() < 0.5 else None

    ids, weight = (
        torch.zeros(tokens + 1, dtype=torch.int64, device="meta")[random.randint(0, 1) :][:tokens],
        made(hidden),
    )
    residual, normed = operations.embed(ids, made(50, hidden), weight, 1e-5)
    operations.rotary(ids, torch.empty(head_size // 2, device="meta"), 1.0, dtype)
    width = (heads + 2 * kv_heads) * head_size
    projected = operations.linear(normed, made(width, hidden), bias(width))
    angles = made(tokens, head_size)
    cached = torch.empty((9, 16, kv_heads, head_size), dtype=random.choice(KV_DTYPES), device="meta")
    cache = KvLayer(cached, cached)
    places = torch.zeros(tokens, dtype=torch.int32, device="meta")
    operations.project(normed, made(width, hidden), bias(width), angles, angles, cache, lambda: places)
    operations.head_norm(projected, made(head_size), made(head_size), heads, kv_heads, 1e-5)
    plain, biased = Norm(weight, 1e-5), Norm(weight, 1e-5, bias=weight, offset=1.0, centred=True, rounds_first=False)
    operations.norm(residual, random.choice((plain, biased)))
    each = Norm(made(head_size), 1e-5, offset=1.0)
    operations.norm_heads(projected, each, each, heads, kv_heads)
    addend = operations.linear_parts(made(tokens, heads * head_size), made(hidden, heads * head_size), bias(hidden))
    operations.add_norm(addend, residual, weight, 1e-5)
    norms = [random.choice((plain, biased, None)) for _ in range(2)]
    operations.combine(addend, residual, norms[0], random.choice((1.0, 0.5)), norms[1])
    gated = operations.gated(normed, made(2 * inner, hidden), bias(2 * inner))
    operations.add_norm(operations.linear_parts(gated, made(hidden, inner), bias(hidden)), residual, weight, 1e-5)
    apply_activation(operations, made(tokens, 2 * inner), Activation(random.choice(GATED)), True)
    apply_activation(operations, made(tokens, inner), Activation(random.choice(GATED[1:])), False)
    operations.activated(normed, made(width, hidden), bias(width), Activation("xielu", negative=1.0))
    operations.linear(normed, made(500, hidden), bias(500), torch.empty((tokens, 500), device="meta"))
    operations.linear(normed, made(1, hidden), bias(1))
    places: Any = _Places(random.choice(RANKS) if dtype == torch.bfloat16 and hidden == 4096 else 2)
    shared = DirectExchange(places, operations)
    if dtype == torch.bfloat16 or hidden == 4096:
        peers = _Places(8 if places.ranks == 8 else 4).peers(ATTENTION, 0)
        sum_share(operations, peers, residual, residual)
        norm_of_shares(operations, peers, residual, weight, 1e-5)
    shared.add_norm(ATTENTION, residual, weight, 1e-5)
    shared.join(LOGITS, torch.empty((tokens, 2 * random.randint(1, 70000)), device="meta"))


@pytest.mark.parametrize("name", COMPILED)
def test_whatever_experts_launch_was_compiled(name: str, cpu: Device, monkeypatch: pytest.MonkeyPatch) -> None:
    """Layers like those that are declared, with other sizes, and any number of tokens."""
    target = replace(TARGETS[name], steady=True)
    declared = [configuration for kernel in OF_EXPERTS for configuration in configurations_of(kernel, target)]
    compiled = {each.kind(): each.label for each in declared}
    monkeypatch.setattr(fused, "current_target", lambda _device: target)
    operations, random = FusedOperations(cpu, overlap=target.chained), Random(5)
    with recorded(target) as made, torch.device("meta"):
        for tokens in (1, 2, 20, 100, 300, 1000, 5000):
            for layout, dtype in layouts(random):
                run_experts(operations, layout, dtype, tokens, random)
    launched = {Configuration("", each, False).kind(): each for each in made}
    assert not [str(each) for kind, each in launched.items() if kind not in compiled]
    assert {each.kernel.__name__ for each in made} == {kernel.name for kernel in OF_EXPERTS}
    assert len(launched) > len(compiled) / 2, "shapes too much alike"


@pytest.mark.parametrize("name", COMPILED)
def test_whatever_latents_launch_was_compiled(name: str, cpu: Device, monkeypatch: pytest.MonkeyPatch) -> None:
    """Layers of the declared models, and routers in float32, with any number of tokens."""
    target = replace(TARGETS[name], steady=True)
    declared = [configuration for kernel in OF_LATENTS for configuration in configurations_of(kernel, target)]
    compiled = {each.kind(): each.label for each in declared}
    monkeypatch.setattr(fused, "current_target", lambda _device: target)
    operations, random = FusedOperations(cpu, overlap=target.chained), Random(5)
    with recorded(target) as made, torch.device("meta"):
        for tokens, dtype, model in product((1, 2, 20, 100, 300), KV_DTYPES, latent_layers.MODELS.values()):
            run_latents(operations, model, dtype, tokens)
            router = torch.empty(random.choice(latent_layers.ROUTERS))
            bias = random.choice((None, torch.empty(len(router))))
            if dtype != torch.float32:
                operations.wide_linear(torch.empty((tokens, router.shape[1]), dtype=dtype), router, bias)
    launched = {Configuration("", each, False).kind(): each for each in made}
    assert not [str(each) for kind, each in launched.items() if kind not in compiled]
    assert {each.kernel.__name__ for each in made} == {each.specialisation.kernel.__name__ for each in declared}
    assert len(launched) > len(compiled) / 2, "shapes too much alike"


def run_latents(
    operations: FusedOperations, model: tuple[int, int, int, int, int], dtype: torch.dtype, tokens: int
) -> None:
    """Launch the operations of a layer around attention over latents, as `latent.attend_latents` does."""
    heads, plain, rotated, latent, value = model
    matrices = torch.empty((heads, plain + value, latent), dtype=dtype)
    queries = torch.empty((tokens, heads, plain + rotated), dtype=dtype)
    absorbed = torch.empty((tokens, heads, latent + rotated), dtype=dtype)
    operations.by_head(queries[..., :plain], matrices[:, :plain], absorbed[..., :latent])
    own, angles = torch.empty((tokens, latent + rotated), dtype=dtype), torch.empty((tokens, rotated), dtype=dtype)
    norm = Norm(torch.empty(latent, dtype=dtype), 1e-6)
    operations.latent_inputs(own, queries[..., plain:], norm, angles, angles, absorbed[..., latent:])
    operations.by_head(torch.empty((tokens, heads, latent), dtype=dtype), matrices[:, plain:].transpose(1, 2))


@pytest.mark.parametrize("of_prompts", [False, True])
@pytest.mark.parametrize("name", COMPILED)
def test_whatever_advances_states_was_compiled(
    name: str, of_prompts: bool, cpu: Device, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Layers of the declared forms, with other numbers of channels and heads, and any number of rows."""
    target = replace(TARGETS[name], steady=True)
    kernels = OF_PROMPTS if of_prompts else OF_STATES
    compiled, norms = (
        {each.kind() for kernel in those for each in configurations_of(kernel, target)} for those in (kernels, NORMS)
    )
    monkeypatch.setattr(fused, "current_target", lambda _device: target)
    operations, random = FusedOperations(cpu, overlap=target.chained), Random(5)
    with recorded(target) as made, torch.device("meta"):
        for rows, pages in product((1, 2, 65), (9, 1 << 16)):
            for dtype, kept in product(KV_DTYPES, KV_DTYPES):
                run_states(operations, rows, pages, dtype, kept, random, of_prompts)
    launched = {Configuration("", each, False).kind(): each for each in made}
    assert not [str(each) for kind, each in launched.items() if kind not in compiled | norms]
    assert compiled <= launched.keys(), "not all of the declared forms"


def run_states(
    operations: FusedOperations,
    rows: int,
    pages: int,
    dtype: torch.dtype,
    kept: torch.dtype,
    random: Random,
    of_prompts: bool,
) -> None:
    """Launch the steps of layers with a recurrent state, or their prompts. pages: of the pool, each of 48 KiB."""
    form = operations.for_prompts(dtype) if of_prompts else None
    if of_prompts and form is None:
        return
    over: StateOperations = operations if form is None else form(recurrent_prompts.rows_of(rows))
    tokens = rows if form is None else rows * recurrent_prompts.TOKENS

    def states(name: str, shape: tuple[int, ...], own: torch.dtype) -> StateRows:
        memory, tables = torch.empty((pages, 48 << 10), dtype=torch.uint8), torch.empty((rows, 40), dtype=torch.int32)
        lines = torch.empty((shape[1], 2), dtype=torch.int32)
        return StateRows(memory, tables, StateTensor(0, name, shape, own, kept), (), lines)

    for model, (_, taps, gated, silu, biased) in recurrent.CONVOLUTIONS.items():
        if of_prompts and model not in recurrent_prompts.MODELS:
            continue
        if kept not in (dtype, *[each for of, each in recurrent.KEPT if of == dtype]):
            continue
        channels = random.choice((96, 100, 1024, 6144))
        bias = torch.empty(channels, dtype=dtype) if biased else None
        convolution = Convolution(torch.empty((channels, taps), dtype=dtype), bias, gated, silu)
        x = torch.empty((tokens, convolution.inputs), dtype=dtype)
        over.convolve(x, states(CONVOLUTION, (1, channels, taps), dtype), convolution)
    for model, (_, _, key_size, value_size, by_channel) in recurrent.DELTAS.items():
        if of_prompts and model not in recurrent_prompts.MODELS:
            continue
        key_heads, groups = random.choice((1, 16)), random.choice((1, 2, 4))
        rates, weight = torch.empty(key_heads * groups), torch.empty(value_size, dtype=dtype)
        biases = torch.empty(len(rates) * key_size) if by_channel else rates
        delta = GatedDelta(key_heads, key_size, rates, biases, weight, 1e-6, by_channel, by_channel)
        inputs = DeltaInputs(*(torch.empty((tokens, width), dtype=dtype) for width in delta.widths))
        over.advance_delta(inputs, states(RECURRENT, delta.state, torch.float32), delta)
    for heads, head_size, declared, state_size, has_norm in state_space.MODELS.values():
        groups = random.choice((1, 2, 8))
        numbers = torch.empty(heads // declared * groups)
        weight = torch.empty(len(numbers) * head_size, dtype=dtype)
        space = StateSpace(groups, state_size, numbers, numbers, numbers, weight, 1e-6, has_norm)
        widths = (len(weight), sum(space.parts), len(numbers))
        gate, mixed, steps = torch.empty((tokens, sum(widths)), dtype=dtype).split(widths, 1)
        tables = states(RECURRENT, space.state, torch.float32)
        over.advance_state_space(StateSpaceInputs(mixed, gate, steps), tables, space)
    for model, (channels, state_size) in selective.MODELS.items():
        scan = selective.space_of(random.choice((1, 3)) * channels, state_size)
        given = torch.float32 if model in selective.WIDE else dtype
        rank = random.choice((3, 64, 160))
        x, gate = torch.empty((tokens, 2 * scan.channels), dtype=given).chunk(2, 1)
        _, b, c = torch.empty((tokens, rank + 2 * state_size), dtype=given).split([rank, state_size, state_size], 1)
        time_steps, tables = torch.empty_like(gate), states(RECURRENT, scan.state, torch.float32)
        over.advance_selective(SelectiveInputs(torch.empty_like(x), gate, time_steps, b, c), tables, scan)


@pytest.mark.parametrize("name", [name for name in COMPILED if name != "sm_75"])  # T4 multiplies no codes
def test_whatever_multiplies_codes_was_compiled(name: str, cpu: Device, monkeypatch: pytest.MonkeyPatch) -> None:
    """Layers of the declared layouts, with other sizes, and any number of tokens."""
    target = replace(TARGETS[name], steady=True)
    declared = [configuration for kernel in OF_CODES for configuration in configurations_of(kernel, target)]
    compiled = {each.kind(): each.label for each in declared}
    monkeypatch.setattr(fused, "current_target", lambda _device: target)
    operations, random = FusedOperations(cpu, overlap=target.chained), Random(5)
    names = {kernel.name for kernel in OF_CODES if target.hopper or not kernel.hopper}
    with recorded(target) as made:
        for tokens in (1, 2, 20, 100, 300, 1000, 5000):
            for layout in stored.LAYOUTS:
                run_codes(operations, layout, tokens, random)
            for layout in stored.OF_EXPERTS:
                run_experts_of_codes(operations, layout, tokens, random)
    launched = {Configuration("", each, False).kind(): each for each in made if each.kernel.__name__ in names}
    assert not [str(each) for kind, each in launched.items() if kind not in compiled]
    assert {each.kernel.__name__ for each in launched.values()} == names
    assert len(launched) > len(compiled) / 2, "shapes too much alike"


def run_codes(operations: FusedOperations, layout: stored.CodeLayout, tokens: int, random: Random) -> None:
    """Launch the products of a layer's dense weights, and of a head."""
    dtype = random.choice((torch.bfloat16, torch.float16)) if layout in stored.HALF and tokens <= 16 else torch.bfloat16
    hidden, inner = 1024 * random.randint(2, 8), 14336
    x, long = (torch.empty((tokens, k), dtype=dtype, device="meta") for k in (hidden, inner))

    def weight(n: int, k: int) -> StoredWeight:
        return StoredWeight(layout.codes(n, k), dtype)

    operations.linear(x, weight(256 * random.randint(1, 20), hidden))
    operations.gated(x, weight(2 * inner, hidden))
    head_size, kv_heads = (128, 2) if dtype == torch.float16 else (random.choice(HEAD_SIZES), random.choice((1, 2)))
    cache = torch.empty((1, 16, kv_heads, head_size), dtype=dtype, device="meta")
    angles = torch.empty((tokens, head_size), dtype=dtype, device="meta")
    slots = torch.empty(tokens, dtype=torch.int32, device="meta")
    n = (4 + 2 * kv_heads) * head_size
    bias = torch.empty(n, dtype=dtype, device="meta") if random.random() < 0.5 else None
    operations.project(x, weight(n, hidden), bias, angles, angles, KvLayer(cache, cache), lambda: slots)
    operations.linear_parts(long, weight(4096, inner))
    if layout in stored.BIASED and dtype == torch.bfloat16:
        operations.linear(x, weight(4096, hidden), torch.empty(4096, dtype=dtype, device="meta"))
    if layout in stored.WIDE and dtype == torch.bfloat16 and tokens <= 1000:  # fewer than 2 GiB of logits
        operations.linear(x, weight(128256, hidden), None, torch.empty((tokens, 128256), device="meta"))


def run_experts_of_codes(operations: FusedOperations, layout: stored.CodeLayout, tokens: int, random: Random) -> None:
    """Launch the products of a layer's experts."""
    experts, width, is_oss = random.choice((8, 32, 128)), random.choice((2, 4, 8)), layout == stored.MXFP4
    hidden, inner = (2880, 2880) if is_oss else (1024, 128 * random.randint(2, 10))
    up, down = (
        StoredWeight(layout.codes(n, k, (experts,)), torch.bfloat16) for n, k in ((2 * inner, hidden), (hidden, inner))
    )
    x = torch.empty((tokens, hidden), dtype=torch.bfloat16, device="meta")
    biases = [
        torch.empty(each.shape[:2], dtype=torch.bfloat16, device="meta") if is_oss else None for each in (up, down)
    ]
    chosen = torch.empty((tokens, width), dtype=torch.int32, device="meta")
    weights = torch.empty((tokens, width), device="meta")
    matrices = ExpertMatrices(up, biases[0], down, biases[1])
    activation = OSS_GATING.activation if is_oss else SILU
    operations.experts(x, chosen, weights, matrices, activation, is_oss)


def layouts(random: Random) -> Iterator[tuple[Layout, torch.dtype]]:
    for _ in range(3):
        hidden, inner = 256 * random.randint(1, 4), 128 * random.randint(2, 6)  # weights below 2 GiB
        for dtype, shared in product((torch.bfloat16, torch.float16, torch.float32), (False, True)):
            yield Layout(hidden, inner, shared=shared), dtype
        yield Layout(8 * random.randrange(1, 99, 2), 8 * random.randrange(1, 99, 2)), torch.bfloat16
        yield Layout(64 * random.randrange(5, 15, 2), 64 * random.randrange(5, 15, 2), oss=True), torch.bfloat16


def run_experts(operations: FusedOperations, layout: Layout, dtype: torch.dtype, tokens: int, random: Random) -> None:
    """Launch the operations of one layer on the default device."""
    experts, width = random.choice((8, 32, 128, 256)), random.choice((2, 4, 8))
    hidden, inner, activation = layout.hidden, layout.inner, OSS_GATING.activation if layout.oss else SILU
    up, down = (
        torch.empty((experts, 2 * inner, hidden), dtype=dtype),
        torch.empty((experts, hidden, inner), dtype=dtype),
    )
    up_bias, down_bias = None, None
    if layout.oss:
        up = torch.empty((experts, hidden, 2 * inner), dtype=dtype).transpose(1, 2)
        down = torch.empty((experts, inner, hidden), dtype=dtype).transpose(1, 2)
        up_bias, down_bias = torch.empty((experts, 2 * inner), dtype=dtype), torch.empty((experts, hidden), dtype=dtype)
    for name, (router, count, logits_dtype, biased) in ROUTERS.items():
        bias = torch.empty(count) if biased else None
        gated = [torch.empty((rows, GATES[name]), dtype=logits_dtype) for rows in (tokens, 1) if name in GATES]
        operations.route(torch.empty((tokens, count), dtype=logits_dtype), router, bias, None, *gated)
        for parts in () if logits_dtype == torch.float32 else (1, 5) if operations.target.hopper else (1,):
            wide = torch.empty((parts, tokens, count))
            given = gated or [torch.empty((tokens, 8), dtype=logits_dtype)]
            operations.route(wide, router, bias, None, *given)
    shared, width = random.choice(((1, 8), (2, 6))) if layout.shared else (0, width)
    blocks = [
        torch.empty(shape, dtype=dtype) if shared else None
        for shape in ((2 * shared * inner, hidden), (hidden, shared * inner))
    ]
    width += shared
    chosen, weights = torch.empty((tokens, width), dtype=torch.int32), torch.empty((tokens, width))
    x = torch.empty((tokens, hidden), dtype=dtype)
    matrices = ExpertMatrices(up, up_bias, down, down_bias, *blocks)
    operations.experts(x, chosen, weights, matrices, activation, layout.oss)


class _Places:
    """The buffers of an exchange, on the default device."""

    bytes = 0

    def __init__(self, ranks: int) -> None:
        self.ranks = ranks

    def peers(self, which: int, polls_max: int) -> RankBuffers:
        addresses = torch.zeros(self.ranks, dtype=torch.int64)
        return RankBuffers(0, self.ranks, addresses, addresses, torch.zeros(PROGRAMS_MAX, dtype=torch.int32), polls_max)
