"""Products of the keys and queries of prompt tokens, each number decayed by itself, as a Triton kernel.

With a decay of each number of a key (Kimi delta attention), a product of a query and a key before it is a sum over
numbers that have decayed differently. Decays between two tokens of different blocks of 16 tokens go over the begin of
the later block: they are the product of two factors of at most 1, one of each token, so that neither overflows, and the
sums are matrix products. Within a block, each key's decays are computed for all queries.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from kvforge.worker.device.overlap import launch_options, let_next_start, wait_for_inputs

from .launching import Launching
from .prompt_rows import CHUNK
from .recurrent import SUM_MIN, DeltaInputs, GatedDelta
from .recurrent_kernels import _softplus

BLOCK = 16  # tokens
THREADS = 128  # of a program
SIZE_MIN = 16  # of keys and values, padded to powers of two


@triton.jit
def _of_length_1(heads, least):
    return heads * (1.0 / tl.sqrt(tl.sum(heads * heads, axis=1) + least))[:, None]


@triton.jit
def _key_and_decays(mixed, decay, bias, rate, least, offset, tokens, inside, mixed_stride, decay_stride, along):
    """Return the keys of tokens, and the logarithms of their decays, both [tokens, KEYS], zeros outside."""
    key_at = mixed + offset + tokens[:, None] * mixed_stride + along[None, :]
    key = _of_length_1(tl.load(key_at, mask=inside, other=0.0).to(tl.float32), least)
    decay_at = decay + tokens[:, None] * decay_stride + along[None, :]
    x = tl.load(decay_at, mask=inside, other=0.0).to(tl.float32) + bias[None, :]
    return key, tl.where(inside, rate * _softplus(x), 0.0)


@triton.jit(do_not_specialize=["heads", "groups", "mixed_stride", "decay_stride"])
def channel_pairs_kernel(
    mixed,
    decay,
    rates,
    biases,
    tiles,
    pairs,
    lower,
    heads,
    groups,
    key_size,
    mixed_stride,
    decay_stride,
    query_scale,
    least,
    TOKENS: tl.constexpr,
    BLOCK: tl.constexpr,
    KEYS: tl.constexpr,
    OVERLAP: tl.constexpr,
):
    """Grid: [heads of values, tiles, blocks of BLOCK tokens]. Compute the products of a block and all keys before it.

    pairs: [tiles, heads, TOKENS, TOKENS] in the dtype of operands, of queries and keys; 0 for later keys. lower: of
    the same shape, float32, of keys and earlier ones; undefined for other keys. See `prompt_delta.delta_tiles_kernel`.
    """
    let_next_start(OVERLAP)
    head, tile, block = tl.program_id(0), tl.program_id(1).to(tl.int64), tl.program_id(2)
    operand: tl.constexpr = pairs.dtype.element_ty
    within, along = tl.arange(0, BLOCK), tl.arange(0, KEYS)
    in_key = along < key_size
    rate, bias = tl.load(rates + head), tl.load(biases + head * key_size + along, mask=in_key, other=0.0)
    wait_for_inputs(OVERLAP)
    base, begin, end = tl.load(tiles + 4 * tile + 1), tl.load(tiles + 4 * tile + 2), tl.load(tiles + 4 * tile + 3)
    mixed += base.to(tl.int64) * mixed_stride + (head // groups) * key_size
    decay += base.to(tl.int64) * decay_stride + head * key_size
    keys = (heads // groups) * key_size

    own = block * BLOCK + within
    inside = ((own >= begin) & (own < end))[:, None] & in_key[None, :]
    key, steps = _key_and_decays(mixed, decay, bias, rate, least, keys, own, inside, mixed_stride, decay_stride, along)
    query_at = mixed + own[:, None] * mixed_stride + along[None, :]
    query = _of_length_1(tl.load(query_at, mask=inside, other=0.0).to(tl.float32), least) * query_scale
    passed = tl.cumsum(steps, axis=0)  # logarithms of decays from the block's begin

    place = (tile * heads + head) * TOKENS * TOKENS + own[:, None] * TOKENS + within[None, :]
    found, alike = tl.zeros([BLOCK, BLOCK], tl.float32), tl.zeros([BLOCK, BLOCK], tl.float32)
    for index in tl.range(0, BLOCK):
        chosen = (within == index)[:, None]
        of_key = tl.sum(tl.where(chosen, key, 0.0), axis=0)
        until = tl.sum(tl.where(chosen, passed, 0.0), axis=0)
        decayed = of_key[None, :] * tl.exp(tl.minimum(passed - until[None, :], 0.0))
        column = (within == index)[None, :]
        found = tl.where(column, tl.sum(query * decayed, axis=1)[:, None], found)
        alike = tl.where(column, tl.sum(key * decayed, axis=1)[:, None], alike)
    earlier = within[:, None] >= within[None, :]
    tl.store(pairs + place + block * BLOCK, tl.where(earlier, found, 0.0).to(operand))
    tl.store(lower + place + block * BLOCK, alike)

    since = tl.exp(passed)
    query_since, key_since = (query * since).to(operand), (key * since).to(operand)
    between = tl.zeros([KEYS], tl.float32)  # logarithms of decays from the end of an earlier block to this one's begin
    for back in tl.range(0, block):
        first = (block - 1 - back) * BLOCK
        others = first + within
        inside = ((others >= begin) & (others < end))[:, None] & in_key[None, :]
        other, steps = _key_and_decays(
            mixed, decay, bias, rate, least, keys, others, inside, mixed_stride, decay_stride, along
        )
        total = tl.sum(steps, axis=0)
        left = tl.minimum(total[None, :] - tl.cumsum(steps, axis=0), 0.0)
        decayed = tl.trans((other * tl.exp(between[None, :] + left)).to(operand))
        tl.store(pairs + place + first, tl.dot(query_since, decayed).to(operand))
        tl.store(lower + place + first, tl.dot(key_since, decayed))
        between += total
    for later in tl.range(block + 1, TOKENS // BLOCK):
        tl.store(pairs + place + later * BLOCK, tl.zeros([BLOCK, BLOCK], operand))


def pairs_by_channel(
    launch: Launching,
    inputs: DeltaInputs,
    delta: GatedDelta,
    tiles: torch.Tensor,
    pairs: torch.Tensor,
    lower: torch.Tensor,
) -> None:
    """Compute the products of keys and queries within tiles.

    Args:
        launch: How to launch.
        inputs: The inputs of all tokens of the step.
        delta: The rule, by channel.
        tiles: See `PromptRows`.
        pairs: [tiles or more, value heads, CHUNK, CHUNK], receives the products of queries and keys, in the dtype of
            operands.
        lower: The same in float32, receives those of keys.
    """
    mixed, decay = inputs.mixed, inputs.decay
    channel_pairs_kernel[(delta.value_heads, len(tiles), CHUNK // BLOCK)](
        mixed,
        decay,
        delta.rates,
        delta.biases,
        tiles,
        pairs,
        lower,
        delta.value_heads,
        delta.groups,
        delta.key_size,
        mixed.stride(0),
        decay.stride(0),
        delta.key_size**-0.5,
        SUM_MIN,
        TOKENS=CHUNK,
        BLOCK=BLOCK,
        KEYS=max(SIZE_MIN, triton.next_power_of_2(delta.key_size)),
        num_warps=max(1, THREADS // launch.target.warp_size),
        num_stages=1,
        **launch_options(launch.overlap),
    )
