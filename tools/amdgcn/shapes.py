"""Suite checks that a worker also runs at its start: attention, layer operations, sampling, copies."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import torch

from kvforge.worker.attention import decode_plan, selftest
from kvforge.worker.attention.interface import AttentionOptions
from kvforge.worker.attention.triton_attention import TritonAttention
from kvforge.worker.kernels import selftest as layers_selftest
from kvforge.worker.kernels import stored_selftest
from kvforge.worker.kernels.expert_sort import sort_by_expert
from kvforge.worker.kernels.fused import FusedOperations
from kvforge.worker.kernels.layer_weights import (
    FeedForward,
    FusedLayer,
    HeadNorms,
    LatentAttention,
    Norm,
    Projection,
)
from kvforge.worker.kernels.positions import RotaryTable
from kvforge.worker.sampling import selftest as sampling_selftest

from .driver import Emulated

Run = Callable[[Emulated], str]
BF16, F16, F32, I8, FP8 = torch.bfloat16, torch.float16, torch.float32, torch.int8, torch.float8_e4m3fn
# Shorter rows than in the worker's self-test: an interpreted instruction costs a thousand times as much.
DECODES = ((0, 0), (0, 1), (1, -1), (3, 2), (12, 5))
PREFILLS = ((0, 0, 3), (1, -1, 2), (2, 3, 40), (0, 0, 20))
FEW_DECODES, FEW_PREFILLS = ((0, 0), (12, 5)), ((0, 0, 3), (1, 3, 18))
STEADY_MIN = 64  # minimum keys of a part, small enough that these short rows are split too
MULTIPROCESSORS, FEW_MULTIPROCESSORS = 64, 4  # many compute units split the rows; few make the batch count as large
KERNELS = ("write", "rotary write", "decode", "decode of many rows", "padded decode", "prefill", "mixed-batch")
# model dtype, pool dtype, query heads, KV heads, head size, options
CASES: tuple[tuple[torch.dtype, torch.dtype, int, int, int, dict[str, Any]], ...] = (
    (BF16, BF16, 8, 2, 64, {}),
    (BF16, I8, 8, 2, 64, {}),
    (BF16, FP8, 8, 2, 64, {}),
    (F16, FP8, 4, 2, 80, {"window": 20}),
    (F32, F32, 4, 2, 64, {}),
    (BF16, BF16, 4, 1, 128, {"softcap": 30.0}),
)
# tokens, dtype, inner size, with a bias, with head norms
LAYERS = ((3, BF16, 384, False, False), (16, F16, 2048, True, True))
# code, columns of a group, tokens, dtype
LOWS = ("int4 with lows", 32, 1, BF16)  # in tensor memory its two products of one x were wrong once
CODES = (
    *(("int4", 64, 3, BF16), ("e4m3", 0, 3, BF16), ("e2m1", 32, 3, BF16), ("int8", 0, 20, F16)),
    *(("int4", 0, 20, F16), ("e4m3", 64, 20, F16)),
    *(
        ("nf4", 64, 1, BF16),
        ("iq4", 32, 1, BF16),
        ("e2m1 with factors", 0, 1, BF16),
        ("e2m1 with exponents", 0, 1, BF16),
    ),
    *(LOWS, ("int8 with lows", 16, 1, F16)),
)
HIDDEN, HEADS, KV_HEADS, HEAD_SIZE, VOCAB = 256, 8, 2, 64, 320
LATENT, PLAIN, VALUE = 96, 48, 40  # of a layer with latents: numbers of one, of a query without rotation, of a value


def attention(quick: bool, whole: bool) -> Iterator[tuple[str, Run]]:
    """Yield the attention checks.

    Args:
        quick: only a selection.
        whole: with `quick`, every kernel instead of two.

    Yields:
        The name of a check and the function that runs it.
    """
    if not quick:
        chosen = [(case, kernel) for case in CASES for kernel in KERNELS]
    elif whole:
        chosen = [(CASES[0], "rotary write"), (CASES[0], "decode"), (CASES[0], "prefill"), (CASES[1], "mixed-batch")]
    else:
        chosen = [(CASES[2], "write"), (CASES[2], "decode")]
    for case, kernel in chosen:
        dtype, kv_dtype, heads, kv_heads, head_size, options = case
        stored = _name(kv_dtype)
        name = f"{kernel} {_name(dtype)}/{stored} heads {heads}/{kv_heads} x {head_size}"
        name += "".join(f" {option} {number:g}" for option, number in options.items())
        rows = (FEW_DECODES, FEW_PREFILLS) if quick else (DECODES, PREFILLS)
        shape = selftest.AttentionShape(heads, kv_heads, head_size, AttentionOptions(head_size**-0.5, **options))
        yield name, partial(_attend, kernel, shape, dtype, kv_dtype, rows)


def _attend(
    kernel: str,
    shape: selftest.AttentionShape,
    dtype: torch.dtype,
    kv_dtype: torch.dtype,
    rows: tuple[Any, Any],
    emulated: Emulated,
) -> str:
    device = emulated.device(FEW_MULTIPROCESSORS if kernel == "decode of many rows" else MULTIPROCESSORS)
    rows_of = patch.multiple(selftest, _DECODES=rows[0], _PREFILLS=rows[1])
    with rows_of, patch.object(decode_plan, "STEADY_MIN", STEADY_MIN):
        found = dict(selftest._checks(TritonAttention(device), device, shape, dtype, kv_dtype, block_size=16))
        return found[kernel]()


def layers(quick: bool, whole: bool) -> Iterator[tuple[str, Run]]:
    """Yield the checks of the layers' fused operations; `quick` and `whole` as in `attention`."""
    wanted = ("embedding norm", "gate", "sum and norm", "projection into the cache") if whole else ("sum and norm",)
    for number, (tokens, dtype, inner, biased, normed) in enumerate(LAYERS[:1] if quick else LAYERS):
        names = [name for name, _ in layers_selftest._runs(_decoder(None, dtype, inner, biased, normed), tokens)]
        for name in names:
            if not quick or name in wanted:
                run = partial(_layer, LAYERS[number], name)
                yield f"{name} {_name(dtype)} {tokens} tokens{' biased' * biased}", run


def attention_over_latents(quick: bool) -> Iterator[tuple[str, Run]]:
    """Yield the checks of attention over latents."""
    shape = selftest.AttentionShape(3, 1, 64, AttentionOptions(0.125), latent=48)
    rows = ((0, 0), (3, 2)), ((0, 0, 3), (1, 3, 9))
    for dtype, kv_dtype in ((BF16, BF16),) if quick else ((BF16, BF16), (BF16, FP8), (BF16, I8)):
        for kernel in ("write", "decode", "prefill") if not quick else ("decode",):
            name = f"{kernel} of latents {_name(dtype)}/{_name(kv_dtype)}"
            yield name, partial(_attend, kernel, shape, dtype, kv_dtype, rows)


def hopper(quick: bool) -> Iterator[tuple[str, Run]]:
    """Yield the checks of kernels for Hopper alone."""
    for group, tokens in ((128, 1), (64, 16)) if quick else ((128, 1), (128, 16), (64, 16), (128, 17)):
        for kernel in ("product", "projection", "experts"):
            count = 1 if kernel == "experts" and tokens <= 16 else tokens
            name = f"{kernel} on Hopper with int4 in groups of {group}, {count} tokens"
            # So many steps that each place in shared memory is filled more than twice.
            yield name, partial(_codes, f"{kernel} with codes", "int4", group, count, BF16, 18 * group)
    shape = selftest.AttentionShape(16, 1, 576, AttentionOptions(0.1), latent=512)
    for kernel in ("decode",) if quick else ("decode", "prefill"):
        name = f"{kernel} on Hopper of latents of 512 numbers"
        yield name, partial(_attend, kernel, shape, BF16, BF16, (((0, 0), (3, 2)), ((0, 0, 3), (1, 3, 9))))


def latents(quick: bool) -> Iterator[tuple[str, Run]]:
    """Yield the checks of a layer's operations around attention over latents."""
    for tokens, dtype in ((3, BF16),) if quick else ((3, BF16), (20, F16), (3, F32)):
        yield f"projections of latents {_name(dtype)} {tokens} tokens", partial(_latents, tokens, dtype)


def _latents(tokens: int, dtype: torch.dtype, emulated: Emulated) -> str:
    decoder = _decoder(FusedOperations(emulated.device(304)), dtype, 384, biased=False, normed=False)
    generator = torch.Generator().manual_seed(2)

    def random(*shape: int) -> torch.Tensor:
        return (torch.randn(shape, generator=generator) / math.sqrt(shape[-1])).to(dtype)

    heads, rotated, table = 3, HEAD_SIZE - PLAIN, decoder.rotary[0]
    parts = random(heads, PLAIN + VALUE, LATENT)
    keys, values = parts[:, :PLAIN], parts[:, PLAIN:]
    norm = Norm(random(LATENT), 1e-6)
    latent = LatentAttention(None, None, norm, keys, values.transpose(1, 2), parts.flatten(0, 1), rotated)
    projected = Projection(random(heads * HEAD_SIZE + LATENT + rotated, HIDDEN), None)
    layer = replace(decoder.layers[0], heads=heads, projected=projected, latent=latent)
    decoder.layers = (layer,)
    decoder.rotary = (replace(table, frequencies=table.frequencies[: rotated // 2]),)
    run = dict(layers_selftest._runs(decoder, tokens))["projections of latents"]
    return layers_selftest._compare(run, decoder.operations, layers_selftest.TOLERANCE[dtype])


def _layer(case: tuple[int, torch.dtype, int, bool, bool], name: str, emulated: Emulated) -> str:
    tokens, dtype, inner, biased, normed = case
    decoder = _decoder(FusedOperations(emulated.device(304)), dtype, inner, biased, normed)
    run = dict(layers_selftest._runs(decoder, tokens))[name]
    return layers_selftest._compare(run, decoder.operations, layers_selftest.TOLERANCE[dtype])


def codes(quick: bool, whole: bool) -> Iterator[tuple[str, Run]]:
    """Yield the checks of products with weights in codes; `quick` and `whole` as in `attention`."""
    chosen = CODES if not quick else (*CODES[:3], LOWS) if whole else CODES[2:3]
    for code, group, tokens, dtype in chosen:
        for kernel in ("product", "projection", "experts") if not quick else ("product",):
            count = (
                1 if kernel == "experts" else min(tokens, 16) if kernel == "projection" else tokens
            )  # a single token's experts need no sort
            name = f"{kernel} with codes {code}{f' in groups of {group}' * (group > 0)} {_name(dtype)} {count} tokens"
            yield name, partial(_codes, f"{kernel} with codes", code, group, count, dtype, 128)


def sorts(quick: bool) -> Iterator[tuple[str, Run]]:
    """Yield the checks of pairs of tokens and experts, sorted by expert."""
    for tokens, width, experts in ((5, 2, 6),) if quick else ((5, 2, 6), (40, 4, 33), (140, 4, 16)):
        yield f"sort of {tokens * width} pairs of {experts} experts", partial(_sort, tokens, width, experts)


def _sort(tokens: int, width: int, experts: int, emulated: Emulated) -> str:
    generator = torch.Generator().manual_seed(tokens)
    chosen = torch.rand(tokens, experts, generator=generator).topk(width).indices.int()
    flat, size = chosen.flatten().long(), 16
    found = sort_by_expert(FusedOperations(emulated.device(304)), chosen, experts, size)
    counts = flat.bincount(minlength=experts).tolist()
    ends = torch.tensor(counts).cumsum(0).tolist()
    wanted = [
        [expert, begin, min(begin + size, end), 0]
        for expert, (count, end) in enumerate(zip(counts, ends, strict=True))
        for begin in range(end - count, end, size)
    ]
    blocks = found.blocks.tolist()
    named = [block[:3] for block in blocks[: len(wanted)]], [block[0] for block in blocks[len(wanted) :]]
    right = named == ([block[:3] for block in wanted], [-1] * (len(blocks) - len(wanted)))
    ordered = torch.equal(found.order.long(), flat.sort(stable=True).indices)
    return "" if right and ordered else "differs from the reference"


def _codes(kernel: str, code: str, group: int, tokens: int, dtype: torch.dtype, hidden: int, emulated: Emulated) -> str:
    device = emulated.device(304)
    sizes, operations, few = (hidden, 128), FusedOperations(device), max(64, group)
    with patch.object(stored_selftest, "SIZES", {1: sizes, 3: (few, few)}):
        found = dict(stored_selftest._comparisons(operations, code, group, sizes, tokens, dtype, device.torch_device))
        return found[kernel]()


def _decoder(operations: Any, dtype: torch.dtype, inner: int, biased: bool, normed: bool) -> Any:
    """Return the parts of a FusedDecoder that the layers' self-test reads, with random weights."""
    generator = torch.Generator().manual_seed(1)

    def random(*shape: int, scale: float = 1.0) -> torch.Tensor:
        return (torch.randn(shape, generator=generator) * scale).to(dtype)

    def projection(n: int, k: int) -> Projection:
        return Projection(random(n, k, scale=k**-0.5), random(n) if biased else None)

    def norm(size: int) -> Norm:
        return Norm(random(size), 1e-5)

    layer = FusedLayer(
        options=AttentionOptions(HEAD_SIZE**-0.5),
        rotary=0,
        heads=HEADS,
        kv_heads=KV_HEADS,
        head_size=HEAD_SIZE,
        input_norm=norm(HIDDEN),
        inner_norm=norm(HIDDEN),
        projected=projection((HEADS + 2 * KV_HEADS) * HEAD_SIZE, HIDDEN),
        output=projection(HIDDEN, HEADS * HEAD_SIZE),
        feed=FeedForward(projection(2 * inner, HIDDEN), projection(HIDDEN, inner)),
        head_norms=HeadNorms(norm(HEAD_SIZE), norm(HEAD_SIZE)) if normed else None,
    )
    return SimpleNamespace(
        operations=operations,
        table=random(VOCAB, HIDDEN),
        layers=(layer,),
        head=SimpleNamespace(weight=random(VOCAB, HIDDEN, scale=HIDDEN**-0.5), bias=None),
        rotary=(RotaryTable(1.0 / 500000.0 ** (torch.arange(0, HEAD_SIZE, 2).float() / HEAD_SIZE), 1.0),),
        final_norm=norm(HIDDEN),
    )


def sampling(quick: bool) -> Iterator[tuple[str, Run]]:
    """Yield the checks of sampling, token feeding and copies."""
    for vocab in (97,) if quick else (5, 97, 4097, 9000):
        yield f"sampling, vocabulary {vocab}", partial(_sample, vocab, False)
        yield f"sampling by masks, vocabulary {vocab}", partial(_sample, vocab, True)
    yield "token feeding", lambda emulated: sampling_selftest._feeding(emulated.device(MULTIPROCESSORS), 97)
    for count in (1025,) if quick else (1, 1023, 1025, 5000):
        yield f"copy of {count}", partial(_copy, count)


def _sample(vocab: int, masked: bool, emulated: Emulated) -> str:
    with torch.inference_mode():
        return sampling_selftest._choosing(emulated.device(MULTIPROCESSORS), vocab, masked)


def _copy(count: int, emulated: Emulated) -> str:
    return sampling_selftest._copying(emulated.device(MULTIPROCESSORS), count)()


def _name(dtype: torch.dtype) -> str:
    return {BF16: "bf16", F16: "fp16", F32: "fp32", I8: "int8", FP8: "fp8"}[dtype]
