"""Prompt tokens of layers with latents, for attention over keys and values that are expanded from the latents first.

For a key and a head, attention in the absorbed form multiplies 512 + 64 and 512 numbers where the expanded form
multiplies 128 + 64 and 128 (DeepSeek-V2, arXiv 2405.04434, section 2.1). The absorbed form reads each latent once, and
is best for one new token; the expanded form computes less where many new tokens of a row read the same latents.

Prompt tokens before position EXPANDED_TOKENS_MAX take the expanded form, whatever else is in the step, and all others
the absorbed one: the form follows from a token's kind and position alone, so its bits do not depend on how a prompt was
divided into steps. The bound keeps the workspace small.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch

from .batch import IntArray, PagedBatch
from .expanded_space import tokens_max
from .interface import KvLayer
from .quantised import as_bytes, dequantise


@dataclass(frozen=True)
class PromptGroup:
    """Rows with few enough tokens so far to fit into the workspace together.

    Attributes:
        batch: The rows, as a step of their own over the workspace.
        tokens: [batch.tokens] int64 on the device, their new tokens in the flat batch; None: all tokens, in order.
        slots: [tokens so far] int64 on the device, the slots of the latents in the pool. Each row begins in a new
            block; what is left of its last block repeats the row's last token.
    """

    batch: PagedBatch
    tokens: torch.Tensor | None
    slots: torch.Tensor


@dataclass(frozen=True)
class PromptParts:
    """A step of a layer with latents, divided by form.

    Attributes:
        groups: The parts in the expanded form.
        rest: The part in the absorbed form, as a step of its own; None: there is none.
        rest_tokens: [rest.tokens] int64 on the device, its tokens in the flat batch; None without `rest`.
    """

    groups: tuple[PromptGroup, ...]
    rest: PagedBatch | None
    rest_tokens: torch.Tensor | None


def prompt_parts(batch: PagedBatch) -> PromptParts | None:
    """Divide a step; None if it has no tokens for the expanded form. The result is kept with the batch."""
    key = "prompt parts"
    if key not in batch.plans:
        batch.plans[key] = None if batch.is_static or batch.generated.all() else _divided(batch)
    found: PromptParts | None = batch.plans[key]
    return found


def latents_of(layer: KvLayer, slots: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Return the latents and rotary keys of slots [n] int64: [n, latent + rotary key] in `dtype`."""
    found = as_bytes(layer.keys).flatten(0, 2).index_select(0, slots)
    if layer.key_scales is None:
        return found.to(dtype)
    return dequantise(found.view(layer.keys.dtype), layer.key_scales.flatten().index_select(0, slots)).to(dtype)


def _divided(batch: PagedBatch) -> PromptParts | None:
    starts, lengths, size = batch.starts, batch.lengths, batch.block_size
    ends = np.where(batch.generated, starts, np.minimum(lengths, tokens_max(size)))
    (rows,) = np.nonzero(ends > starts)
    if not len(rows):
        return None
    groups: list[PromptGroup] = []
    taken: list[int] = []
    blocks, room = -(-ends // size), tokens_max(size) // size
    for row in [*rows.tolist(), None]:
        if row is None or sum(int(blocks[each]) for each in taken) + int(blocks[row]) > room:
            if taken:
                groups.append(_group(batch, np.array(taken), ends))
            taken = []
        if row is not None:
            taken.append(row)
    others = np.maximum(ends, starts)
    (left,) = np.nonzero(lengths > others)
    if not len(left):
        return PromptParts(tuple(groups), None, None)
    tokens = _tokens(batch, left, others[left], lengths[left])
    counts = lengths[left] - others[left]
    rest = _build(batch, batch.tables[left], others[left], counts, batch.generated[left])
    return PromptParts(tuple(groups), rest, batch.device.upload(tokens))


def _group(batch: PagedBatch, rows: IntArray, ends: IntArray) -> PromptGroup:
    size = batch.block_size
    starts, ends = batch.starts[rows], ends[rows]
    blocks = -(-ends // size)
    first = np.cumsum(blocks) - blocks
    width = int(blocks.max())
    columns = np.arange(width)
    tables = np.where(columns < blocks[:, None], first[:, None] + columns, first[:, None])
    tokens = _tokens(batch, rows, starts, ends)
    own = np.repeat(np.arange(len(rows)), blocks * size)
    positions = np.minimum(np.arange(len(own)) - first[own] * size, ends[own] - 1)
    slots = batch.tables[rows[own], positions // size] * size + positions % size
    all_in_order = len(tokens) == batch.tokens and np.array_equal(tokens, np.arange(batch.tokens))
    part = _build(batch, tables, starts, ends - starts, np.zeros(len(rows), np.bool_))
    return PromptGroup(part, None if all_in_order else batch.device.upload(tokens), batch.device.upload(slots))


def _tokens(batch: PagedBatch, rows: IntArray, starts: IntArray, ends: IntArray) -> IntArray:
    """Return the tokens of rows from position starts[i] to ends[i], as indices in the flat batch."""
    parts = zip((batch.query_starts[rows] - batch.starts[rows]).tolist(), starts.tolist(), ends.tolist(), strict=True)
    return np.concatenate([np.arange(offset + start, offset + end) for offset, start, end in parts])


def _build(
    batch: PagedBatch, tables: IntArray, starts: IntArray, counts: IntArray, generated: npt.NDArray[np.bool_]
) -> PagedBatch:
    tables32, starts32, counts32 = (each.astype(np.int32) for each in (tables, starts, counts))
    return PagedBatch.build(tables32, starts32, counts32, batch.block_size, batch.device, generated)
