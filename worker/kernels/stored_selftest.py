"""Self-test of the products with weights in codes against plain torch, on the serving device; see selftest.py."""

from __future__ import annotations

from collections.abc import Collection, Iterator
from functools import partial

import torch

from kvforge.worker.attention import KvLayer
from kvforge.worker.attention.reference import rotate
from kvforge.worker.device.check import require_right
from kvforge.worker.device.device import WAY_OUT, Device

from .activations import SILU
from .code_tables import CODES, pack, unit_columns
from .expert_loop import ExpertMatrices
from .fused import FusedOperations
from .hopper_codes import KINDS, TOKENS_MAX
from .interface import LayerOperations
from .plain import PlainOperations
from .selftest import TOLERANCE
from .stored import Codes, StoredWeight

TOKENS = (1,)  # the serving weights are tested too, with every kind of tile
EXPERTS = "experts with codes"
GROUPS = {  # by `Codes.kind`: columns of a group; 0: all
    "int8": 0,
    "e4m3": 64,
    "int4": 64,
    "e2m1": 32,
    "nf4": 64,
    "iq4": 32,
    "e2m1 with factors": 0,
    "e2m1 with exponents": 0,
    "int8 with lows": 16,
    "int4 with lows": 32,
}
HEADS, HEAD_SIZE = (2, 1, 1), 64  # of Q, K and V
SIZES = {1: (192, 256), 3: (128, 128)}  # hidden and inner size, by the number of experts


@torch.inference_mode()
def stored_test(kinds: Collection[str], dtype: torch.dtype, device: Device, with_experts: bool) -> None:
    """Test every product with weights of these kinds of codes, also those of experts if `with_experts`.

    Raises:
        KernelError: Names the kernel and the shape.
        GpuError: The device failed.
    """
    operations = FusedOperations(device)
    for kind, group, sizes, tokens in _cases(kinds, operations.target.hopper):
        shape = f"{tokens} tokens, {kind} in groups of {group or 'a row'}, {str(dtype).removeprefix('torch.')}"
        for kernel, compare in _comparisons(operations, kind, group, sizes, tokens, dtype, device.torch_device):
            if with_experts or kernel != EXPERTS:
                require_right(device, kernel, shape, compare, WAY_OUT)


def _cases(kinds: Collection[str], hopper: bool) -> Iterator[tuple[str, int, tuple[int, int], int]]:
    """Yield kinds with columns of a group, hidden and inner size, and tokens.

    On Hopper few tokens of some kinds have kernels of their own, for each of their groups, and more tokens the others.
    """
    hidden, inner = SIZES[1]
    for kind in kinds:
        of_hopper = KINDS.get(kind, ()) if hopper else ()
        for tokens in (*TOKENS, TOKENS_MAX + 1) if of_hopper else TOKENS:
            yield kind, GROUPS[kind], (hidden, inner), tokens
        for group in of_hopper:
            if group != GROUPS[kind]:
                yield kind, group, (2 * group, inner), TOKENS[0]


def _comparisons(
    operations: LayerOperations,
    kind: str,
    group: int,
    sizes: tuple[int, int],
    tokens: int,
    dtype: torch.dtype,
    device: torch.device,
) -> Iterator[tuple[str, partial[str]]]:
    generator = torch.Generator(device).manual_seed(tokens)

    def random(rows: int, columns: int) -> torch.Tensor:
        numbers = torch.full((rows + 3, columns), float("nan"), dtype=dtype, device=device)
        return numbers[:rows].normal_(generator=generator)

    def weight(n: int, k: int, experts: tuple[int, ...] = ()) -> StoredWeight:
        return StoredWeight(_random_codes(n, k, kind, group, experts, generator), dtype)

    hidden, inner = sizes
    x, up, down = random(tokens, hidden), weight(2 * inner, hidden), weight(hidden, inner)
    bias = random(1, 2 * inner)[0]

    def dense(ops: LayerOperations) -> list[torch.Tensor]:
        gated = ops.gated(x, up)
        found = ops.linear_parts(gated, down)
        total = found[0]
        for part in found[1:]:
            total = total + part
        return [gated, total, ops.linear(x, up, bias)]

    yield "product with codes", partial(_difference, dense, operations, TOLERANCE[dtype])
    wide = weight(sum(HEADS) * HEAD_SIZE, hidden)
    angles = torch.rand((tokens, HEAD_SIZE), generator=generator, device=device) * 6
    cos, sin = angles.cos().to(dtype), angles.sin().to(dtype)
    places = torch.arange(tokens, dtype=torch.int32, device=device)

    def projected(ops: LayerOperations) -> list[torch.Tensor]:
        """Return Q, K and V as they are used and stored without quantisation."""
        shape = (tokens, 1, HEADS[1], HEAD_SIZE)
        cache = KvLayer(*(torch.full(shape, float("nan"), dtype=dtype, device=device) for _ in range(2)))
        found = ops.project(x, wide, None, cos, sin, cache, lambda: places)
        if found is not None:
            return [found, cache.keys[:, 0], cache.values[:, 0]]
        query, key, value = ops.linear(x, wide).view(tokens, -1, HEAD_SIZE).split(HEADS, dim=1)
        return [rotate(query, cos, sin), rotate(key, cos, sin), value]

    yield "projection with codes", partial(_difference, projected, operations, TOLERANCE[dtype])
    (experts, (hidden, inner)) = list(SIZES.items())[1]
    rows = random(tokens, hidden)
    matrices = ExpertMatrices(weight(2 * inner, hidden, (experts,)), None, weight(hidden, inner, (experts,)), None)
    weights, chosen = torch.rand((tokens, experts), generator=generator, device=device).topk(2)

    def mixed(ops: LayerOperations) -> list[torch.Tensor]:
        return [ops.experts(rows, chosen, weights, matrices, SILU)]

    yield EXPERTS, partial(_difference, mixed, operations, TOLERANCE[dtype])


def _random_codes(n: int, k: int, kind: str, group: int, experts: tuple[int, ...], generator: torch.Generator) -> Codes:
    device, (code, _, extra) = generator.device, kind.partition(" with ")

    def whole(most: int, *shape: int) -> torch.Tensor:
        return torch.randint(most, (*experts, *shape), generator=generator, device=device)

    codes = whole(256 if CODES[code] == 2 else 16, n, k).to(torch.uint8)
    if code == "e4m3":
        codes = torch.where(codes & 127 == 127, codes & 128, codes)  # no NaN
    groups = k // group if group else 1
    scales = torch.rand((*experts, groups, n), generator=generator, device=device) * 0.01 + 0.001
    if CODES[code] == 2 or code == "iq4":
        scales *= 0.05
    zeros = whole(16, groups, n).to(torch.uint8) if kind == "int4" else None
    lows = scales * whole(16, groups, n) * -1 if extra == "lows" else None
    factors = None
    if extra == "factors":  # four of e4m3, 0.5 to 7.5
        four = (whole(32, k // unit_columns(code), n, 4) + 0x30).to(torch.uint8)
        factors = four.view(torch.int32).squeeze(-1)
    exponents = None
    if extra == "exponents":  # four of 2 ** -9 to 2 ** -2
        four = (whole(8, -(-k // unit_columns(code) // 2), n, 4) + 118).to(torch.uint8)
        exponents = four.view(torch.int32).squeeze(-1)
    return Codes(code, pack(codes, code, groups), scales, zeros, lows=lows, factors=factors, exponents=exponents)


def _difference(run: object, operations: LayerOperations, tolerance: float) -> str:
    assert callable(run)
    for got, want in zip(run(operations), run(PlainOperations()), strict=True):
        difference = float((got.float() - want.float()).abs().max() / want.float().abs().max().clamp_min(1e-6))
        if not difference <= tolerance:
            return f"it differs from the reference by {difference:.1e} of the largest number"
    return ""
