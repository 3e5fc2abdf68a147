"""Matrix products of `prefill_hopper` and its sums, by the tiles of a head: one, or a second one for its rest."""

# No `from __future__ import annotations`, as in `prefill_hopper_work`.
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import warpgroup_mma, warpgroup_mma_wait

from kvforge.worker.device.target import HEAD_UNIT

UNIT = gl.constexpr(HEAD_UNIT)


@gluon.jit
def multiply_keys(slot, buffers, sizes, WHICH: gl.constexpr):
    """Begin the product of the queries and the keys in `slot`: [64, KEYS] float32."""
    scores = gl.zeros([64, sizes.KEYS], gl.float32, sizes.SCORES)
    k = buffers.k.index(slot).permute((1, 0))
    scores = warpgroup_mma(buffers.q.index(WHICH), k, scores, use_acc=False, is_async=True)
    if sizes.REST:
        k_rest = buffers.k_rest.index(slot).permute((1, 0))
        scores = warpgroup_mma(buffers.q_rest.index(WHICH), k_rest, scores, is_async=True)
    return scores


@gluon.jit
def multiply_values(weights, slot, sums, sums_rest, buffers, sizes):
    """Begin the product of weights [64, KEYS] and the values in `slot`, added to the sums."""
    weights = weights.to(buffers.q.dtype)
    sums = warpgroup_mma(gl.convert_layout(weights, sizes.WEIGHTS), buffers.v.index(slot), sums, is_async=True)
    if sizes.REST:
        operand = gl.convert_layout(weights, sizes.WEIGHTS_REST)
        sums_rest = warpgroup_mma(operand, buffers.v_rest.index(slot), sums_rest, is_async=True)
    return sums, sums_rest


@gluon.jit
def await_sums(sums, sums_rest, sizes):
    """Wait for all products."""
    if sizes.REST:
        return warpgroup_mma_wait(0, deps=(sums, sums_rest))
    else:
        return warpgroup_mma_wait(0, deps=(sums,)), sums_rest


@gluon.jit
def scale_sums(sums, sums_rest, factor, sizes):
    """Multiply each row of the sums. factor: [64], in the layout of a row of scores."""
    sums = sums * gl.convert_layout(factor, gl.SliceLayout(1, sizes.SUMS))[:, None]
    if sizes.REST:
        sums_rest = sums_rest * gl.convert_layout(factor, gl.SliceLayout(1, sizes.SUMS_REST))[:, None]
    return sums, sums_rest


@gluon.jit
def store_sums(
    sums, first_column, token, pack, count, output, strides, sizes, WHICH: gl.constexpr, STORE: gl.constexpr
):
    """Store sums [64, columns] of the group's rows. strides: from token to token, and from head to head."""
    token_stride, head_stride = strides
    row = WHICH * 64 + gl.arange(0, 64, gl.SliceLayout(1, STORE))
    column = first_column + gl.arange(0, sums.shape[1], gl.SliceLayout(0, STORE))
    head = pack * sizes.PACK + row % sizes.PACK
    place = output + (token + row // sizes.PACK).to(gl.int64) * (token_stride * UNIT) + head * (head_stride * UNIT)
    mine = (row // sizes.PACK < count)[:, None] & (column < sizes.HEAD)[None, :]
    numbers = gl.convert_layout(sums.to(output.dtype.element_ty), STORE)
    gl.store(place[:, None] + column[None, :], numbers, mask=mine)
