"""Configurations of the kernels of decoder layers, sampling and small copies: see `aot_attention`."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from itertools import product

import torch

from kvforge.worker.attention import KvLayer
from kvforge.worker.device.block_copies import copy_blocks, zero_blocks
from kvforge.worker.device.copies import copy_numbers
from kvforge.worker.device.exchange import RankBuffers
from kvforge.worker.device.target import HEAD_CLASSES, Target
from kvforge.worker.kernels import HIDDEN_MAX, combine, exchange, norm, rotary
from kvforge.worker.kernels.activation import apply_activation
from kvforge.worker.kernels.activations import KINDS as EVERY_KIND
from kvforge.worker.kernels.activations import Activation
from kvforge.worker.kernels.layer_weights import Norm
from kvforge.worker.kernels.linear import MEASURED_TOKENS_MAX, OTHER_PARTS_MAX, choose_tiles, linear_parts
from kvforge.worker.kernels.project import HEAD_SIZES, project
from kvforge.worker.kernels.xielu import apply_xielu
from kvforge.worker.sampling.kernels import PIECE, choose_tokens, feed_tokens
from kvforge.worker.sampling.sampler import COLUMNS, WORD_BITS

from .compilation import BF16, DTYPE_NAMES, F16, F32, FAR_BYTES, Configuration, distinct, launched_on, meta_tensor
from .specialise import recorded

KINDS = tuple(EVERY_KIND)
NARROW = (BF16, F16)
FLOATS = (*NARROW, F32)
# Factors of the dispatcher's choice. Each size occurs with a multiple of 16 and with another number.
TOKENS = (1, 32, 64)
MANY = (2000, 5000)  # tokens that only routers have a kernel for
SIZES = (
    *((6144, 4096), (4096, 14336), (14336, 4096), (128256, 4096)),  # n, k: multiples of every tile, and of none
    *((1008, 1008), (1000, 1008), (1008, 1000), (1000, 1000)),
)
# Inner sizes of one or two steps, for which less is prefetched. (Only Hopper prefetches.)
SHORT = tuple(product((4096, 16384, 1008, 1000, 16392), (64, 120, 128, 256)))
ROUTERS = (
    (128, 4096),
    (128, 512),
    (128, 4160),
    (128, 320),
    (48, 4096),
)  # depths of 128 and 64, with and without prefetch
DIVIDED = ((2048, 4096),)  # sums in parts on a steady Hopper, for these tokens
DIVIDED_TOKENS = (1, 32, 128, 192, 256, 500, 2000)
SINGLE = ((1, 4096), (1, 1008), (1, 1000))  # gates of one number, a constant for Triton
# Uses with other activations than SiLU; in other sizes they are compiled on first use.
ACTIVATED = (*(f"{kind} gated" for kind in (*KINDS[1:], "clamped_swiglu")), *KINDS)
USES = ("whole", "wide", "parts", "gated")  # use of a product: as it is, float32, parts of a sum, or gated
BLOCKS = tuple(1 << exponent for exponent in range(norm.BLOCK_MIN.bit_length() - 1, HIDDEN_MAX.bit_length()))
HIDDEN = BLOCKS
HEADS = tuple(size for head in HEAD_CLASSES for size in (head, head - 8))
GEMMA4_HEAD = 512  # its attention runs in plain torch, its rotation does not
PARTS = (1, 2, 3, OTHER_PARTS_MAX)
RANKS = (2, 4, 8)
FAR = (False, True)  # whether a weight, K and V, or the logits take 2 GiB or more; nothing else can
VOCABS = tuple(size for pieces in (1, 2, 4, 8, 16, 32, 64) for size in (PIECE * pieces, PIECE * pieces - 5))
COPIED = (1, 16, 17)  # numbers


def linear_configurations(target: Target) -> list[Configuration]:
    """Return the configurations of `linear_kernel` that can be launched on `target`."""
    sizes = SIZES + SHORT + ROUTERS if target.hopper else SIZES
    both = _both(target)
    every = (
        *product(both, NARROW, TOKENS, sizes, USES, (False, True), FAR),
        *product(both, NARROW, TOKENS, SINGLE, ("whole",), (False, True), (False,)),
    )
    made = [_product(*each) for each in every]
    many = product(both, NARROW, MANY, ROUTERS, USES[:3], (False, True), (False,))
    made += [_product(*each) for each in many]
    divided = product(both, NARROW, DIVIDED_TOKENS, DIVIDED, ("parts",), (False, True), FAR)
    made += [_product(*each) for each in divided]
    made += [_product(target, BF16, 1, SIZES[0], kind, False, False) for kind in ACTIVATED]
    return distinct(each for each in made if each is not None)


def _both(target: Target) -> tuple[Target, Target]:
    return target, replace(target, steady=True)


def project_configurations(target: Target) -> list[Configuration]:
    """Return the configurations of `project_kernel` on `target`."""
    inner = (4096, 128) if target.hopper else (4096,)  # the second takes one step, so less is prefetched
    made = (
        _project(*each) for each in product(_both(target), NARROW, TOKENS, HEAD_SIZES, (False, True), FAR, FAR, inner)
    )
    return distinct(each for each in made if each is not None)


def embed_configurations(target: Target) -> list[Configuration]:
    """Return the configurations of `embed_norm_kernel` on `target`."""
    return distinct(_embed(target, *each) for each in product(FLOATS, HIDDEN, FAR))


def sum_configurations(target: Target) -> list[Configuration]:
    """Return the configurations of `add_norm_kernel` on `target`."""
    return distinct(_sum(target, *each) for each in _sums(target))


def combine_configurations(target: Target) -> list[Configuration]:
    """Return the configurations of `combine_kernel` on `target`: kinds of norms are not compiled apart."""
    return distinct(_combined(target, *each) for each in _sums(target))


def norm_configurations(target: Target) -> list[Configuration]:
    """Return the configurations of `norm_kernel`: of rows, and of heads as part of all projections."""
    made = [_normed(target, dtype, hidden) for dtype, hidden in product(FLOATS, HIDDEN)]
    made += [_normed(target, dtype, head) for dtype, head in product(FLOATS, HEADS)]
    return distinct(made)


def _sums(target: Target) -> Iterator[tuple[torch.dtype, int, torch.dtype, int]]:
    """Yield dtype, hidden size, dtype of the parts and their number."""
    for dtype, hidden in product(FLOATS, HIDDEN):
        yield dtype, hidden, dtype, 1
    for dtype, hidden, parts in product(NARROW, HIDDEN, PARTS):
        yield dtype, hidden, F32, parts
    for dtype, (hidden, parts) in product(NARROW, _many_parts(target)):
        yield dtype, hidden, F32, parts


def _many_parts(target: Target) -> Iterator[tuple[int, int]]:
    """Yield (hidden size, parts) beyond PARTS: narrow results of long products, which gain by them as measured."""
    for hidden, steps in product(HIDDEN, (64, 128, 256, 512)):
        narrowest = 64 if hidden == norm.BLOCK_MIN else hidden // 2 + 64
        tiles = choose_tiles(1, narrowest, 128 * steps, target, divisible=True, gated=False)
        if tiles is not None and tiles.parts > OTHER_PARTS_MAX:
            yield hidden, tiles.parts


def exchange_configurations(target: Target) -> list[Configuration]:
    """Return the configurations of the exchange kernel: two ranks in every dtype and size, more ranks in one.

    Other numbers of ranks are compiled on first use.
    """
    made = [(dtype, hidden, 2) for dtype, hidden in product(FLOATS, HIDDEN)]
    made += [(BF16, 4096, ranks) for ranks in RANKS[1:]]
    return distinct(_exchanged(target, *each) for each in made)


def share_configurations(target: Target) -> list[Configuration]:
    """Return the configurations of the kernel that sums a rank's share of the tokens."""
    return distinct(_share_summed(target, *each) for each in _SHARES)


def shares_norm_configurations(target: Target) -> list[Configuration]:
    """Return the configurations of the kernel that reads all ranks' shares."""
    return distinct(_shares_normed(target, *each) for each in _SHARES)


def join_configurations(target: Target) -> list[Configuration]:
    """Return the configurations of the join kernel on `target`."""
    return distinct(_joined(target, *each) for each in product(RANKS, (64128, 1001)))


def head_norm_configurations(target: Target) -> list[Configuration]:
    """Return the configurations of `head_norm_kernel` on `target`."""
    return distinct(_head_norm(target, *each) for each in product(FLOATS, HEADS, (1, 2)))


def rotary_configurations(target: Target) -> list[Configuration]:
    """Return the configurations of `rotary_kernel` on `target`."""
    return distinct(_rotary(target, *each) for each in product(FLOATS, (*HEADS, GEMMA4_HEAD)))


def activation_configurations(target: Target) -> list[Configuration]:
    """Return the configurations of `activation_kernel` on `target`."""
    gated = (*KINDS, "clamped_swiglu")
    every = (*product(FLOATS, (14336, 1000), gated, (True,)), *product(FLOATS, (14336, 1000), KINDS, (False,)))
    return distinct(_activation(target, *each) for each in every)


def xielu_configurations(target: Target) -> list[Configuration]:
    """Return the configurations of `xielu_kernel` on `target`."""
    activation = Activation("xielu", negative=1.0)
    numbers = [meta_tensor(1, 21504, dtype=dtype) for dtype in FLOATS]
    made = [(DTYPE_NAMES[x.dtype], partial(apply_xielu, launched_on(target), x, activation)) for x in numbers]
    return distinct(_configuration(target, f"xielu {name}", launch) for name, launch in made)


def scan_configurations(target: Target) -> list[Configuration]:
    """Return the configurations of `scan_kernel`, for vocabularies up to 262,144."""
    return distinct((*_choices(target, "scan", 0), *_choices(target, "scan", 0, masked=True)))


def merge_configurations(target: Target) -> list[Configuration]:
    """Return the configurations of `merge_kernel` on `target`."""
    return distinct(_choices(target, "merge", 1))


def feed_configurations(target: Target) -> list[Configuration]:
    """Return the configurations of `feed_kernel` on `target`."""
    packed, last_token = meta_tensor(4, 1, dtype=torch.int32), meta_tensor(1, dtype=torch.int64)
    return [_configuration(target, "choice: feed", lambda: feed_tokens(packed, last_token))]


def copy_configurations(target: Target) -> list[Configuration]:
    """Return the configurations of the copy kernel on `target`."""
    copied = [meta_tensor(count, dtype=torch.int32) for count in COPIED]
    return distinct(_configuration(target, f"copy {len(each)}", partial(copy_numbers, each, each)) for each in copied)


def block_configurations(target: Target) -> list[Configuration]:
    """Return the configurations of the kernel that copies blocks of a pool on `target`."""
    made = []
    for rows, words, into_pool in product((1, 2), (1000, 1 << 18), (False, True)):
        table, blocks = meta_tensor(3, 64, dtype=torch.int64), meta_tensor(rows, dtype=torch.int64)
        buffer, sums = meta_tensor(rows, words, dtype=torch.int64), meta_tensor(rows, 64, dtype=torch.int64)
        copied = partial(copy_blocks, table, blocks, buffer, sums, 3, into_pool=into_pool)
        made.append(_configuration(target, f"blocks {'into' if into_pool else 'out of'} a pool", copied))
    zeroed = partial(zero_blocks, table, blocks, meta_tensor(1000, dtype=torch.int64))
    made.append(_configuration(target, "zeroed blocks of a pool", zeroed))
    return distinct(made)


def _choices(target: Target, name: str, place: int, masked: bool = False) -> Iterator[Configuration]:
    """Yield the configurations of one launched kernel. place: its index among the launches."""
    for vocab, far in product(VOCABS, FAR):
        with recorded(target) as launched:
            _choose(vocab, far, target.chained, masked)
        yield Configuration(f"choice: {name} {vocab}{' far' * far}{' masked' * masked}", launched[place], False)


def _choose(vocab: int, far: bool, overlap: bool, masked: bool) -> None:
    rows = 1 + FAR_BYTES // (4 * vocab) if far else 1
    slots, packed = meta_tensor(rows, dtype=torch.int64), meta_tensor(3 * rows, dtype=torch.int32)
    values = meta_tensor(rows, len(COLUMNS), dtype=torch.float64)
    masks = meta_tensor(rows, -(-vocab // WORD_BITS), dtype=torch.int32) if masked else None
    choose_tokens(
        meta_tensor(rows, vocab, dtype=F32), slots, slots, values, slots, slots, slots, packed, overlap, masks
    )


def _product(
    target: Target, dtype: torch.dtype, tokens: int, sizes: tuple[int, int], use: str, biased: bool, far: bool
) -> Configuration | None:
    (n, k), gated = sizes, "gated" in use
    activation = Activation(use.removesuffix(" gated")) if use in ACTIVATED else None
    tiles = choose_tiles(tokens, n, k, target, divisible=use == "parts", gated=gated)
    if tiles is None:
        return None
    x, weight = meta_tensor(tokens, k, dtype=dtype), _weight(2 * n if gated else n, k, dtype, far)
    bias = meta_tensor(len(weight), dtype=dtype) if biased else None
    added_later = use == "parts" and (tiles.parts > 1 or tokens <= MEASURED_TOKENS_MAX)
    result = F32 if use == "wide" or added_later else dtype
    return _configuration(
        target,
        f"linear {DTYPE_NAMES[dtype]} {tokens} x {k} x {n} {use}{' biased' * biased}{' far' * far}",
        lambda: linear_parts(launched_on(target), x, weight, bias, tiles, result, activation=activation, gated=gated),
        matrix=True,
    )


def _project(
    target: Target, dtype: torch.dtype, tokens: int, head_size: int, biased: bool, far: bool, far_cache: bool, k: int
) -> Configuration | None:
    heads, kv_heads = 4, 1
    tiles = choose_tiles(tokens, 6 * head_size, k, target, divisible=False, gated=False)
    if tiles is None:
        return None
    x, weight = meta_tensor(tokens, k, dtype=dtype), _weight((heads + 2 * kv_heads) * head_size, k, dtype, far)
    bias = meta_tensor(len(weight), dtype=dtype) if biased else None
    angles, slots = meta_tensor(tokens, head_size, dtype=dtype), meta_tensor(tokens, dtype=torch.int32)
    cache = _weight(16, kv_heads * head_size, dtype, far_cache).view(1, 16, kv_heads, head_size)
    layer = KvLayer(cache, cache)
    return _configuration(
        target,
        f"project {DTYPE_NAMES[dtype]} {tokens} x {k}, heads of {head_size}"
        f"{' biased' * biased}{' far' * far}{' to far' * far_cache}",
        lambda: project(launched_on(target), x, weight, bias, angles, angles, layer, slots, tiles),
        matrix=True,
    )


def _embed(target: Target, dtype: torch.dtype, hidden: int, far: bool) -> Configuration:
    tokens, table, weight = (
        meta_tensor(1, dtype=torch.int64),
        _weight(2, hidden, dtype, far),
        meta_tensor(hidden, dtype=dtype),
    )
    return _configuration(
        target,
        f"embed, norm {DTYPE_NAMES[dtype]} {hidden}{' far' * far}",
        lambda: norm.embed_norm(launched_on(target), tokens, table, weight, 1e-5),
    )


def _sum(target: Target, dtype: torch.dtype, hidden: int, added: torch.dtype, parts: int) -> Configuration:
    addend = meta_tensor(parts, 1, hidden, dtype=added)
    residual, weight = meta_tensor(1, hidden, dtype=dtype), meta_tensor(hidden, dtype=dtype)
    return _configuration(
        target,
        f"sum of {parts} {DTYPE_NAMES[added]}, norm {DTYPE_NAMES[dtype]} {hidden}",
        lambda: norm.add_norm(launched_on(target), addend, residual, weight, 1e-5),
    )


def _combined(target: Target, dtype: torch.dtype, hidden: int, added: torch.dtype, parts: int) -> Configuration:
    addend = meta_tensor(parts, 1, hidden, dtype=added)
    residual, norm_ = meta_tensor(1, hidden, dtype=dtype), Norm(meta_tensor(hidden, dtype=dtype), 1e-5)
    return _configuration(
        target,
        f"norm of the sum of {parts} {DTYPE_NAMES[added]}, norm {DTYPE_NAMES[dtype]} {hidden}",
        lambda: combine.combined(launched_on(target), addend, residual, norm_, 1.0, norm_),
    )


def _normed(target: Target, dtype: torch.dtype, size: int) -> Configuration:
    x, weight = meta_tensor(1, size, dtype=dtype), Norm(meta_tensor(size, dtype=dtype), 1e-5)
    return _configuration(
        target,
        f"norm {DTYPE_NAMES[dtype]} {size}",
        lambda: combine.normed(launched_on(target), x, weight),
    )


def _peers(ranks: int) -> RankBuffers:
    addresses, flags = meta_tensor(ranks, dtype=torch.int64), meta_tensor(ranks, dtype=torch.int64)
    return RankBuffers(0, ranks, addresses, flags, meta_tensor(1, dtype=torch.int32))


def _exchanged(target: Target, dtype: torch.dtype, hidden: int, ranks: int) -> Configuration:
    residual, weight = meta_tensor(1, hidden, dtype=dtype), meta_tensor(hidden, dtype=dtype)
    return _configuration(
        target,
        f"exchange of {ranks} ranks, norm {DTYPE_NAMES[dtype]} {hidden}",
        lambda: exchange.add_norm_of_ranks(launched_on(target), _peers(ranks), residual, weight, 1e-5),
    )


# Four ranks in every size of bfloat16 and in every dtype, more ranks in one.
_SHARES = (
    *((BF16, hidden, 4) for hidden in HIDDEN),
    *((dtype, 4096, 4) for dtype in FLOATS if dtype != BF16),
    *((BF16, 4096, ranks) for ranks in RANKS[1:] if ranks != 4),
)


def _share_summed(target: Target, dtype: torch.dtype, hidden: int, ranks: int) -> Configuration:
    residual = meta_tensor(1, hidden, dtype=dtype)
    return _configuration(
        target,
        f"share of {ranks} ranks {DTYPE_NAMES[dtype]} {hidden}",
        lambda: exchange.sum_share(launched_on(target), _peers(ranks), residual, residual),
    )


def _shares_normed(target: Target, dtype: torch.dtype, hidden: int, ranks: int) -> Configuration:
    residual, weight = meta_tensor(1, hidden, dtype=dtype), meta_tensor(hidden, dtype=dtype)
    return _configuration(
        target,
        f"shares of {ranks} ranks, norm {DTYPE_NAMES[dtype]} {hidden}",
        lambda: exchange.norm_of_shares(launched_on(target), _peers(ranks), residual, weight, 1e-5),
    )


def _joined(target: Target, ranks: int, share: int) -> Configuration:
    output = meta_tensor(1, ranks * share, dtype=F32)
    label = f"join of {ranks} ranks {share}"
    return _configuration(target, label, lambda: exchange.join_of_ranks(launched_on(target), _peers(ranks), output))


def _head_norm(target: Target, dtype: torch.dtype, head: int, heads: int) -> Configuration:
    kv_heads = 1
    projected, weight = meta_tensor(1, (heads + 2 * kv_heads) * head, dtype=dtype), meta_tensor(head, dtype=dtype)
    return _configuration(
        target,
        f"head norm {DTYPE_NAMES[dtype]} {heads} + {kv_heads} x {head}",
        lambda: norm.head_norm(launched_on(target), projected, weight, weight, heads, kv_heads, 1e-5),
    )


def _rotary(target: Target, dtype: torch.dtype, head: int) -> Configuration:
    positions, frequencies = meta_tensor(1, dtype=torch.int64), meta_tensor(head // 2, dtype=F32)
    return _configuration(
        target,
        f"rotary {DTYPE_NAMES[dtype]} {head}",
        lambda: rotary.rotary(launched_on(target), positions, frequencies, 1.0, dtype),
    )


def _activation(target: Target, dtype: torch.dtype, size: int, kind: str, gated: bool) -> Configuration:
    x = meta_tensor(1, 2 * size if gated else size, dtype=dtype)
    label = f"{kind} {DTYPE_NAMES[dtype]} {size}{' gated' * gated}"
    launch = partial(apply_activation, launched_on(target), x, Activation(kind), gated)
    return _configuration(target, label, launch)


def _configuration(target: Target, label: str, launch: Callable[[], object], matrix: bool = False) -> Configuration:
    with recorded(target) as launched:
        launch()
    assert len(launched) == 1, label
    return Configuration(label, launched[0], matrix)


def _weight(rows: int, columns: int, dtype: torch.dtype, far: bool) -> torch.Tensor:
    """Return [rows, columns]. far: part of a storage of 2 GiB or more."""
    size = max(rows * columns, FAR_BYTES // dtype.itemsize if far else 0)
    return meta_tensor(size, dtype=dtype)[: rows * columns].view(rows, columns)
