"""Parts of a program of `prefill_hopper`: its constants, shared memory, share of the tiles, and copies.

Unreachable slots must never be read, because 0 x NaN is NaN. They can only lie before the first token that any query
sees, or after the row's last token: in the row's first or last *chunk* of CHUNK slots (a block, or the part that one
step takes). The copied box is shifted out of the block by that many slots, and the copy engine fills the outside with
zeros. The chunk's tokens are then shifted (`prefill_hopper._mask` corrects that), and its other places hold zeros. If
chunks are parts of a block, those places hold tokens of the neighbouring chunk instead. The row can reach these,
because a window is longer than a block (`prefill_plan.hopper_problem`), and they are masked. A chunk that the row does
not reach at all is read from beyond the last block: all zeros. A workspace is not shifted: `prefill_copy` writes zeros
there.
"""

# No `from __future__ import annotations`: the annotations of an aggregate are looked at.
import torch
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier
from triton.language.core import _aggregate as aggregate

from kvforge.worker.device.target import head_tiles

from .gluon_names import as_boxes, copy_box
from .interface import AttentionOptions
from .plan_items import FIELDS as ITEM_FIELDS
from .plan_items import PREFILL_TILE, place
from .prefill_plan import hopper_keys

STAGES = 2
FIELDS = gl.constexpr(ITEM_FIELDS)
ROW, FIRST_TOKEN, POSITION, TOKENS, ROW_START, ROW_LENGTH, FIRST_PAGE = (
    gl.constexpr(place(PREFILL_TILE, name))
    for name in ("row", "first_token", "position", "tokens", "row_start", "row_length", "first_page")
)
CHUNK_MAX = 16  # keys that the matrix instructions add at once, in any order
REGISTERS, COPY_REGISTERS = 240, 24  # registers per thread of the computing and copying warps


def constants(
    heads: int, keys_shape: tuple[int, ...] | torch.Size, pack: int, options: AttentionOptions, paged: bool = True
) -> dict[str, int | bool]:
    """Return the compile-time constants of `prefill_hopper`. keys_shape: [blocks, block_size, kv_heads, head_size].

    COLUMNS are those of one copy: 128 bytes, the widest swizzle, or the 64 bytes of the smaller tile.
    """
    _, block_size, kv_heads, head_size = keys_shape
    keys = hopper_keys(head_size)
    head_tile, rest = head_tiles(head_size)
    return {
        "PACKS": heads // pack,
        "PACK": pack,
        "SHARE": heads // pack // kv_heads,
        "BLOCK": block_size,
        "CHUNK": min(block_size, CHUNK_MAX if paged else keys),
        "KEYS": keys,
        "HEAD": head_size,
        "HEAD_TILE": head_tile,
        "REST": rest,
        "COLUMNS": rest or 64,
        "STAGES": STAGES,
        "WINDOW": options.window > 0,
        "SOFTCAP": options.softcap > 0,
        "PAGED": paged,
        "REGISTERS": REGISTERS,
        "COPY_REGISTERS": COPY_REGISTERS,
    }


def box_layout(columns: int) -> gl.NVMMASharedLayout:
    """Return the layout of a copied box in shared memory: swizzled over its columns, for the matrix instructions."""
    return gl.NVMMASharedLayout(swizzle_byte_width=2 * columns, element_bitwidth=16, rank=4)


@aggregate
class Sizes:
    """Compile-time numbers. PAGED: the block table locates tokens; otherwise they follow the row's first page.

    PACK: query heads of a tile; PACKS: packs of the query; SHARE: packs of one KV head.
    """

    PACKS: gl.constexpr
    PACK: gl.constexpr
    SHARE: gl.constexpr
    BLOCK: gl.constexpr
    CHUNK: gl.constexpr
    KEYS: gl.constexpr
    HEAD: gl.constexpr
    HEAD_TILE: gl.constexpr
    REST: gl.constexpr
    REST_TILE: gl.constexpr
    PRODUCTS: gl.constexpr
    COLUMNS: gl.constexpr
    STAGES: gl.constexpr
    WINDOW: gl.constexpr
    SOFTCAP: gl.constexpr
    PAGED: gl.constexpr
    TOKENS: gl.constexpr
    SCORES: gl.constexpr
    SUMS: gl.constexpr
    WEIGHTS: gl.constexpr
    SUMS_REST: gl.constexpr
    WEIGHTS_REST: gl.constexpr

    @gluon.constexpr_function
    def __init__(
        self, PACKS, PACK, SHARE, BLOCK, CHUNK, KEYS, HEAD, HEAD_TILE, REST, COLUMNS, STAGES, WINDOW, SOFTCAP, PAGED
    ):
        self.PACKS, self.PACK, self.SHARE = gl.constexpr(PACKS), gl.constexpr(PACK), gl.constexpr(SHARE)
        self.BLOCK, self.CHUNK, self.KEYS = gl.constexpr(BLOCK), gl.constexpr(CHUNK), gl.constexpr(KEYS)
        self.HEAD, self.HEAD_TILE, self.REST = gl.constexpr(HEAD), gl.constexpr(HEAD_TILE), gl.constexpr(REST)
        self.REST_TILE = gl.constexpr(REST or 8)  # without a rest the sums of these columns stay unused
        self.PRODUCTS = gl.constexpr(2 if REST else 1)  # products of one step with V
        self.COLUMNS = gl.constexpr(COLUMNS)
        self.STAGES = gl.constexpr(STAGES)
        self.WINDOW, self.SOFTCAP = gl.constexpr(WINDOW), gl.constexpr(SOFTCAP)
        self.PAGED = gl.constexpr(PAGED)
        self.TOKENS = gl.constexpr(128 // PACK)
        sums = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, HEAD_TILE, 16])
        sums_rest = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, REST or 8, 16])
        self.SCORES = gl.constexpr(gl.NVMMADistributedLayout([3, 0], [4, 1], [16, KEYS, 16]))
        self.SUMS = gl.constexpr(sums)
        self.WEIGHTS = gl.constexpr(gl.DotOperandLayout(0, sums, 2))
        self.SUMS_REST = gl.constexpr(sums_rest)
        self.WEIGHTS_REST = gl.constexpr(gl.DotOperandLayout(0, sums_rest, 2))


@aggregate
class Buffers:
    """Shared memory, with barriers that signal that a part is filled (ready) or was read (empty).

    q_rest, k_rest, v_rest: the tiles of REST; not used without a rest.
    """

    q: gl.shared_memory_descriptor
    k: gl.shared_memory_descriptor
    v: gl.shared_memory_descriptor
    q_rest: gl.shared_memory_descriptor
    k_rest: gl.shared_memory_descriptor
    v_rest: gl.shared_memory_descriptor
    q_ready: gl.shared_memory_descriptor
    q_empty: gl.shared_memory_descriptor
    k_ready: gl.shared_memory_descriptor
    k_empty: gl.shared_memory_descriptor
    v_ready: gl.shared_memory_descriptor
    v_empty: gl.shared_memory_descriptor
    turns: gl.shared_memory_descriptor

    @gluon.constexpr_function
    def __init__(self, q, k, v, q_rest, k_rest, v_rest, q_ready, q_empty, k_ready, k_empty, v_ready, v_empty, turns):
        self.q, self.k, self.v = q, k, v
        self.q_rest, self.k_rest, self.v_rest = q_rest, k_rest, v_rest
        self.q_ready, self.q_empty = q_ready, q_empty
        self.k_ready, self.k_empty = k_ready, k_empty
        self.v_ready, self.v_empty = v_ready, v_empty
        self.turns = turns


@aggregate
class Work:
    """The share of one program: `count` items, each a tile times a pack of heads."""

    items: gl.tensor
    count: gl.tensor
    programs: gl.tensor
    window: gl.tensor

    @gluon.constexpr_function
    def __init__(self, items, count, programs, window):
        self.items, self.count, self.programs, self.window = items, count, programs, window

    @gluon.jit
    def tile(self, index, sizes):
        """Return the pack, and the fields of `plan_items.PREFILL_TILE` for the tile."""
        program = gl.program_id(0)
        turn = gl.where(index % 2 == 0, program, self.programs - 1 - program)
        item = index * self.programs + turn
        at = self.items + (item // sizes.PACKS) * FIELDS
        return (
            item % sizes.PACKS,
            gl.load(at + ROW),
            gl.load(at + FIRST_TOKEN),
            gl.load(at + POSITION),
            gl.load(at + TOKENS),
            gl.load(at + ROW_START),
            gl.load(at + ROW_LENGTH),
            gl.load(at + FIRST_PAGE),
        )

    @gluon.jit
    def steps(self, position, length, sizes):
        """Return the bounds of a tile's keys, in steps of KEYS.

        These are: the first step; the first within every query's window; the first after some query; the end.

        Steps from the second to the third value need no mask.
        """
        end = gl.minimum(position + sizes.TOKENS, length)
        last = (end + sizes.KEYS - 1) // sizes.KEYS
        causal = gl.minimum((position + 1) // sizes.KEYS, last - 1)
        low = causal * 0
        inside = low
        if sizes.WINDOW:
            low = gl.maximum(position - self.window + 1, 0) // sizes.KEYS
            inside = (gl.maximum(end - self.window, 0) + sizes.KEYS - 1) // sizes.KEYS
            inside = gl.maximum(gl.minimum(inside, causal), low)
        return low, inside, causal, last


@gluon.jit
def _copy_step(desc, target, target_rest, ready, step, row, sizes):
    """Copy KEYS keys from step x KEYS on of one KV head to `target` [KEYS, HEAD_TILE] and the rest to `target_rest`.

    A copy takes a chunk and COLUMNS columns.

    row: its block table; its first page if not PAGED; the KV head; the first key that any query of the row sees; the
    row's length; the number of blocks, an index beyond the last block.
    """
    table, page, kv_head, first_key, length, beyond = row
    CHUNKS: gl.constexpr = sizes.KEYS // sizes.CHUNK
    PARTS: gl.constexpr = sizes.HEAD_TILE // sizes.COLUMNS
    view = as_boxes(target, [PARTS * CHUNKS, 1, sizes.CHUNK, 1, sizes.COLUMNS], desc.layout)
    mbarrier.expect(ready, sizes.KEYS * (sizes.HEAD_TILE + sizes.REST) * 2)
    for chunk in gl.static_range(CHUNKS):
        key = step * sizes.KEYS + chunk * sizes.CHUNK
        wanted = key < length
        if sizes.WINDOW:
            wanted = wanted & (key + sizes.CHUNK > first_key)
        if sizes.PAGED:
            block = gl.load(table + key // sizes.BLOCK, mask=wanted, other=beyond)
        else:
            block = gl.where(wanted, page + key // sizes.BLOCK, beyond)
        offset = key % sizes.BLOCK
        if sizes.PAGED:
            offset -= gl.maximum(gl.minimum(key + sizes.CHUNK - length, sizes.CHUNK - 1), 0)
        if sizes.PAGED and sizes.WINDOW:
            offset += gl.maximum(gl.minimum(first_key - key, sizes.CHUNK - 1), 0)
        for part in gl.static_range(PARTS):
            columns = part * sizes.COLUMNS
            copy_box(desc, [block, offset, kv_head, columns], ready, view.index(part * CHUNKS + chunk))
        if sizes.REST:
            rest = as_boxes(target_rest, [CHUNKS, 1, sizes.CHUNK, 1, sizes.COLUMNS], desc.layout)
            copy_box(desc, [block, offset, kv_head, sizes.HEAD_TILE], ready, rest.index(chunk))


@gluon.jit
def copy_tiles(q_desc, k_desc, v_desc, tables, table_stride, beyond, work, buffers, sizes):
    """Run the copying warp. The last keys come first, and K of a step precedes V of the step copied before it.

    (Reading the block table ahead, or copying K and V in two warps, was measured to be no faster.)
    """
    HALF: gl.constexpr = 64 // sizes.PACK  # tokens of one group of warps
    PARTS: gl.constexpr = sizes.HEAD_TILE // sizes.COLUMNS
    done = 0
    for index in range(work.count):
        pack, number, token, position, _, start, length, page = work.tile(index, sizes)
        low, _, _, last = work.steps(position, length, sizes)
        table = tables + number.to(gl.int64) * table_stride
        row = (table, page, pack // sizes.SHARE, start - work.window + 1, length, beyond)
        for half in gl.static_range(2):
            mbarrier.wait(buffers.q_empty.index(half), (index & 1) ^ 1)
            ready = buffers.q_ready.index(half)
            mbarrier.expect(ready, 64 * (sizes.HEAD_TILE + sizes.REST) * 2)
            view = as_boxes(buffers.q.index(half), [PARTS, HALF, 1, sizes.PACK, sizes.COLUMNS], q_desc.layout)
            for part in gl.static_range(PARTS):
                copy_box(q_desc, [token + half * HALF, pack, 0, part * sizes.COLUMNS], ready, view.index(part))
            if sizes.REST:
                rest = as_boxes(buffers.q_rest.index(half), [1, HALF, 1, sizes.PACK, sizes.COLUMNS], q_desc.layout)
                copy_box(q_desc, [token + half * HALF, pack, 0, sizes.HEAD_TILE], ready, rest.index(0))
        for i in range(last - low + 1):
            if i < last - low:
                at = done + i
                slot = at % sizes.STAGES
                mbarrier.wait(buffers.k_empty.index(slot), ((at // sizes.STAGES) & 1) ^ 1)
                _copy_step(
                    k_desc,
                    buffers.k.index(slot),
                    buffers.k_rest.index(slot),
                    buffers.k_ready.index(slot),
                    last - 1 - i,
                    row,
                    sizes,
                )
            if i > 0:
                at = done + i - 1
                slot = at % sizes.STAGES
                mbarrier.wait(buffers.v_empty.index(slot), ((at // sizes.STAGES) & 1) ^ 1)
                _copy_step(
                    v_desc,
                    buffers.v.index(slot),
                    buffers.v_rest.index(slot),
                    buffers.v_ready.index(slot),
                    last - i,
                    row,
                    sizes,
                )
        done += last - low
