"""Layers that keep a window: which layers do, and their rows in a step.

The coordinator gives a sequence pages for the blocks that a step writes or sees, and takes them back once no later
token can see them. A step names them by `WindowTables`. Attention reads a row of such layers as a row of its own: its
positions are lowered by a multiple of every kernel's tile of keys, so that its table begins with its window. Masks
compare positions, and plans cut keys at multiples of a tile, so the bits are those of the whole row.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt

from .geometry import KvGeometry, LayerShape

log = logging.getLogger("worker")
Int32Array = npt.NDArray[np.int32]
IntArray = npt.NDArray[np.int64]
ALIGNMENT = 512  # keys: a multiple of every kernel's tile, and of the spans in which sums start anew


@dataclass(frozen=True)
class WindowTables:
    """The pages of the window layers of a step's rows.

    Attributes:
        first: [rows] int64, index of the block in the first column.
        pages: [rows, blocks, pages of a block] int32, pool-local ids. Those of blocks that a row neither writes nor
            sees are undefined.
    """

    first: IntArray
    pages: Int32Array

    def pick(self, rows: npt.NDArray[np.integer] | npt.NDArray[np.bool_]) -> WindowTables:
        """Return the tables of the rows that an index or a mask selects."""
        return WindowTables(self.first[rows], self.pages[rows])


@dataclass(frozen=True)
class WindowLimits:
    """The coordinator's limits of windows.

    Attributes:
        ahead: Tokens that the steps in flight may take a sequence beyond its acknowledged ones.
        blocks_max: Most blocks of a sequence.
        columns_max: Most pages of a sequence beside its block table: its recurrent state and its ring.
    """

    ahead: int
    blocks_max: int
    columns_max: int

    def ring_blocks(self, window: int, block_size: int) -> int:
        """Return the blocks of a sequence's ring of window pages: those that the steps in flight see, and two more."""
        return min(-(-(window + self.ahead) // block_size) + 2, self.blocks_max)


def seen_blocks(
    starts: npt.NDArray[np.integer], ends: npt.NDArray[np.integer], window: int, block_size: int
) -> tuple[IntArray, IntArray]:
    """Return the first and the last block that each row writes or sees, [rows] each.

    Args:
        starts: [rows], position of each row's first new token.
        ends: [rows], position behind its last new token.
        window: Tokens of the window.
        block_size: Tokens per block.
    """
    first = np.maximum(starts.astype(np.int64) - window + 1, 0) // block_size
    return first, (ends.astype(np.int64) - 1) // block_size


def ring_columns(
    starts: npt.NDArray[np.integer], ends: npt.NDArray[np.integer], window: int, block_size: int, ring: int
) -> tuple[IntArray, IntArray]:
    """Return the first block of each row's table, [rows], and the places in the ring of its blocks, [rows, n]."""
    first, last = seen_blocks(starts, ends, window, block_size)
    count = min(max(1, int((last - first).max(initial=0)) + 1), ring)
    return first, (first[:, None] + np.arange(count)) % ring


def base_of(starts: npt.NDArray[np.integer], window: int, block_size: int) -> IntArray:
    """Return how far the positions of each row are lowered, [rows] tokens. starts: [rows]."""
    step = math.lcm(block_size, ALIGNMENT)
    return np.asarray(np.maximum(starts.astype(np.int64) - window + 1, 0) // step * step)


def lowered_width(window: int, block_size: int) -> int:
    """Return the most blocks of a lowered row with one new token."""
    return (math.lcm(block_size, ALIGNMENT) + window - 2) // block_size + 1


def lowered_tables(
    tables: WindowTables,
    starts: IntArray,
    ends: IntArray,
    base: IntArray,
    window: int,
    block_size: int,
    entries: int = 1,
) -> Int32Array:
    """Return the block tables of lowered rows.

    Args:
        tables: The rows' pages.
        starts: [rows], position of each row's first new token.
        ends: [rows], position behind its last new token.
        base: [rows], from `base_of`.
        window: Tokens of the window.
        block_size: Tokens per block.
        entries: Entries of a layer's tensors from one page to the next.

    Returns:
        [pages of a block, rows, width] int32, entries. Blocks that the row neither writes nor sees are 0.
    """
    first, last = seen_blocks(starts, ends, window, block_size)
    rows, count, pages = tables.pages.shape
    blocks = (base // block_size)[:, None] + np.arange(int((last - base // block_size).max()) + 1)
    wanted = (blocks >= first[:, None]) & (blocks <= last[:, None])
    places = np.where(wanted, blocks + (np.arange(rows) * count - tables.first)[:, None], rows * count)
    flat = np.zeros((pages, rows * count + 1), np.int32)  # with a 0 for blocks that are not wanted
    np.multiply(tables.pages.reshape(-1, pages).T, np.int32(entries), out=flat[:, :-1])
    return flat.take(places, axis=1)


def keeping_windows(
    shapes: Sequence[LayerShape], windows: Sequence[int], context_tokens: int
) -> tuple[tuple[LayerShape, ...], str]:
    """Decide which layers keep a window.

    Args:
        shapes: KV shape of each layer.
        windows: Tokens that each layer's attention sees; 0: all.
        context_tokens: Positions to serve.

    Returns:
        The shapes with their windows, and "", or the shapes as they are and the reason.
    """
    found = tuple(replace(each, window=window) for each, window in zip(shapes, windows, strict=True))
    sizes = {window for window in windows if window}
    if not sizes:
        return tuple(shapes), "no layer has a window"
    if len(sizes) > 1:
        return tuple(shapes), f"the layers have windows of {', '.join(map(str, sorted(sizes)))} tokens"
    if all(windows):
        return tuple(shapes), "no layer attends to all tokens"
    alike = {replace(each, shared_with=None) for each in shapes}
    if len(alike) > 1:
        return tuple(shapes), "the layers differ in the shape of K and V"
    for each in found:
        if each.shared_with is not None and found[each.shared_with].window != each.window:
            return tuple(shapes), "layers with and without a window share K and V"
    (window,), own = sizes, [each for each in found if each.shared_with is None]
    whole = sum(not each.window for each in own)
    if not whole or whole == len(own):
        return tuple(shapes), "no layer with a window has K and V of its own"
    kept = -(-(len(own) - whole) // whole) * whole  # pages are filled up
    if kept * window + whole * context_tokens >= len(own) * context_tokens:
        return tuple(shapes), f"a window of {window} saves nothing in a context of {context_tokens} tokens"
    return found, ""


def choose_geometry(
    geometry: KvGeometry, windows: Sequence[int], limits: WindowLimits | None, context: int
) -> KvGeometry:
    """Return the geometry in which layers keep a window, if that saves memory and the coordinator can place them.

    Args:
        geometry: The geometry in which all layers keep all tokens.
        windows: Tokens that each layer's attention sees; 0: all.
        limits: The coordinator's limits; None: it knows no windows.
        context: Positions to serve.
    """
    if limits is None or not any(windows):
        return geometry
    size = geometry.block_size
    shapes, reason = keeping_windows(geometry.layers, windows, min(context, limits.blocks_max * size))
    found = replace(geometry, layers=shapes)
    needed = found.state_blocks + limits.ring_blocks(found.window, size) * found.window_pages
    if not reason and needed > limits.columns_max:
        reason = f"a sequence needs {needed} pages beside its table, limits.state_blocks_max is {limits.columns_max}"
        found = geometry
    if reason:
        log.info("layers with a window keep the KV of all tokens: %s", reason)
    return found
