"""Self-test of the kernels of a model's layers against plain torch, on the serving device and weights.

As for attention (see `kvforge.worker.attention.selftest`), a compiler may be wrong for one architecture and right for
all others. No result is cached: the test takes milliseconds once the kernels are compiled, which serving needs anyway.
NaN follows every input in memory.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from typing import Any

import torch

from kvforge.worker.attention import KvLayer
from kvforge.worker.attention.reference import rotate
from kvforge.worker.device.check import require_all_right, require_right
from kvforge.worker.device.device import WAY_OUT, Device

from .decoder import FusedDecoder, combine
from .heads import norm_heads
from .interface import LayerOperations
from .latent import expand_values, project_latents
from .plain import PlainOperations
from .quantised import PlainInputQuantiser, choose_input_quantiser, rotation_of

# Largest difference relative to the largest number: both sides round, and sum in another order.
TOLERANCE = {torch.float32: 1e-4, torch.float16: 5e-3, torch.bfloat16: 3e-2}
TOKENS = (1, 20, 50, 100)  # one per kind of tile, and one for torch's product
HOST_TOKENS = (1, 21)  # CPU kernels handle each row separately

_Run = Callable[[LayerOperations], Any]


def self_test(fused: FusedDecoder, device: Device) -> None:
    """Test every operation of the first layer, and the head.

    Raises:
        KernelError: Names the kernel and the shape.
        GpuError: The device failed.
    """
    ops = fused.operations
    if isinstance(ops, PlainOperations) and not ops.kernels:
        return
    dtype = fused.table.dtype
    checks: list[Callable[[], None]] = []
    for tokens in HOST_TOKENS if isinstance(ops, PlainOperations) else TOKENS:
        for kernel, run in _runs(fused, tokens):
            if isinstance(ops, PlainOperations) and kernel not in ops.kernels:
                continue
            shape = f"{tokens} tokens, hidden size {fused.table.shape[1]}, {str(dtype).removeprefix('torch.')}"
            compare = partial(_compare, run, fused.operations, TOLERANCE[dtype])
            checks.append(partial(require_right, device, kernel, shape, compare, WAY_OUT))
    require_all_right(device, checks)


def _runs(fused: FusedDecoder, tokens: int) -> Iterator[tuple[str, _Run]]:
    """Yield the operations by name; both sides run each on the same inputs."""
    layer, table = next(each for each in fused.layers if each.attends), fused.table
    rotary = None if layer.rotary is None else fused.rotary[layer.rotary]
    feed = next(filter(None, (each.dense for each in fused.layers)), None)
    hidden, attended = table.shape[1], layer.output.weight.shape[1]
    inner = hidden if feed is None else feed.down.weight.shape[1]
    generator = torch.Generator(table.device).manual_seed(0)

    def random(width: int, dtype: torch.dtype = table.dtype) -> torch.Tensor:
        numbers = torch.full((tokens + 3, width), float("nan"), dtype=dtype, device=table.device)
        numbers[:tokens].normal_(generator=generator)
        return numbers[:tokens]

    ids = torch.randint(len(table), (tokens,), generator=generator, device=table.device)
    positions = torch.randint(1 << 17, (tokens,), generator=generator, device=table.device)
    x, wide, residual = random(hidden), random(inner), random(hidden)
    heads_out, projected = random(attended), random(len(layer.projected.weight))
    norm, scale = layer.input_norm, layer.residual_scale

    def embedded(ops: LayerOperations) -> Any:
        if norm is None or not norm.is_plain:
            return ops.norm(x, fused.final_norm if norm is None else norm)
        return ops.embed(ids, table, norm.weight, norm.epsilon)

    def summed(ops: LayerOperations) -> Any:
        total = residual.clone()
        addend = wide[None] if feed is None else ops.linear_parts(wide, feed.down.weight, feed.down.bias)
        return combine(ops, addend, total, layer.fed_norm, scale, fused.final_norm), total

    def joined(ops: LayerOperations) -> Any:
        total = residual.clone()
        return combine(ops, x[None], total, layer.attended_norm, scale, layer.inner_norm), total

    def normed_heads(ops: LayerOperations) -> torch.Tensor:
        assert layer.head_norms is not None
        numbers = projected.clone()
        norm_heads(ops, layer, layer.head_norms, numbers)
        return numbers

    def fed(ops: LayerOperations) -> torch.Tensor:
        assert feed is not None
        weight, bias = feed.gate_up.weight, feed.gate_up.bias
        return (ops.gated if feed.is_gated else ops.activated)(x, weight, bias, feed.activation)

    def stored(ops: LayerOperations) -> Any:
        """Return Q, K and V as they are used and stored without quantisation."""
        layer_heads = (layer.heads, layer.kv_heads, layer.kv_heads)
        assert rotary is not None
        cos, sin = PlainOperations().rotary(positions, rotary.frequencies, rotary.scaling, table.dtype)
        shape = (tokens, 1, layer.kv_heads, layer.head_size)
        cache = KvLayer(*(torch.full(shape, float("nan"), dtype=table.dtype, device=table.device) for _ in range(2)))
        places = torch.arange(tokens, dtype=torch.int32, device=table.device)
        weight, bias = layer.projected.weight, layer.projected.bias
        query = ops.project(x, weight, bias, cos, sin, cache, lambda: places)
        if query is not None:
            return query, cache.keys[:, 0], cache.values[:, 0]
        by_head = ops.linear(x, weight, bias).view(tokens, -1, layer.head_size)
        query, key, value = by_head.split(layer_heads, dim=1)
        return rotate(query, cos, sin), rotate(key, cos, sin), value

    def latents(ops: LayerOperations) -> Any:
        """Return the absorbed queries, what is stored, and the values of sums of latents."""
        assert rotary is not None and layer.latent is not None
        angles = PlainOperations().rotary(positions, rotary.frequencies, rotary.scaling, table.dtype)
        query, own = project_latents(ops, layer, layer.latent, x, angles)
        return query, own, expand_values(ops, layer.latent, query[..., : layer.latent.size])

    def logits(ops: LayerOperations) -> torch.Tensor:
        found = torch.full((tokens, len(fused.head.weight)), float("nan"), device=table.device)
        return ops.linear(x, fused.head.weight, fused.head.bias, found)

    yield "embedding norm", embedded
    if isinstance(fused.operations, PlainOperations):  # one kernel for the norms of all families
        yield "norm", lambda ops: ops.norm(x, replace(fused.final_norm, offset=1.0, rounds_first=False))
    if rotary is not None:
        yield "rotary", lambda ops: ops.rotary(positions, rotary.frequencies, rotary.scaling, table.dtype)
    yield "projection", lambda ops: ops.linear(x, layer.projected.weight, layer.projected.bias)
    if layer.latent is not None:
        yield "projections of latents", latents
    elif layer.head_norms is not None:
        yield "head norm", normed_heads
    elif rotary is not None:
        yield "projection into the cache", stored
    gate = next((each.mixture.gate for each in fused.layers if each.mixture is not None), None)
    if gate is not None and gate.weight.dtype != table.dtype:
        yield "router in float32", lambda ops: ops.wide_linear(x, gate.weight, gate.bias)
    yield "output", lambda ops: ops.linear_parts(heads_out, layer.output.weight, layer.output.bias).float().sum(0)
    if feed is not None:
        yield "gate", fed
    yield "sum and norm", summed
    if not layer.is_plain:
        yield "sum and norm of attention", joined
    yield "vocabulary head", logits


@torch.inference_mode()
def quantising_test(device: Device, dtype: torch.dtype) -> None:
    """Test the quantisation of x before an int8 product, and the conversion of its sums.

    Raises:
        KernelError: Names the kernel and the shape.
    """
    for tokens, width in ((1, 576), (5, 36)):
        shape = f"{tokens} tokens of {width} numbers, {str(dtype).removeprefix('torch.')}"
        compare = partial(_compare_quantising, tokens, width, dtype)
        require_right(device, "quantising", shape, compare, WAY_OUT)


def _compare_quantising(tokens: int, width: int, dtype: torch.dtype) -> str:
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(tokens + 1, width, generator=generator).to(dtype)
    x[-1] = float("nan")
    sums, bias, rotation = x.float() * 1000, x[0], rotation_of(width)
    ours, plain = choose_input_quantiser(), PlainInputQuantiser()
    (levels, largest), (want, peaks) = (each.quantise(x, rotation) for each in (ours, plain))
    if int((levels[:-1].int() - want[:-1].int()).abs().max()) > 1:  # rounding may differ by one level
        return "levels differ by more than one"
    got, numbers = (each.make_numbers(sums.clone(), peaks, bias, dtype) for each in (ours, plain))
    for name, one, other in (("largest numbers", largest, peaks), ("numbers", got, numbers)):
        if not (one[-1].isnan().all() and torch.allclose(one[:-1].float(), other[:-1].float(), rtol=TOLERANCE[dtype])):
            return f"{name} differ from the reference"
    return ""


@torch.inference_mode()
def _compare(run: _Run, operations: LayerOperations, tolerance: float) -> str:
    """Return the difference from the reference, or ""."""
    got, want = run(operations), run(PlainOperations())
    pairs = [(got, want)] if isinstance(got, torch.Tensor) else list(zip(got, want, strict=True))
    for ours, plain in pairs:
        difference = float((ours.float() - plain.float()).abs().max() / plain.float().abs().max().clamp_min(1e-6))
        if not difference <= tolerance:
            return f"it differs from the reference by {difference:.1e} of the largest number"
    return ""
