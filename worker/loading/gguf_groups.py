"""4-bit matrices of a GGUF file, as levels with a scale and a minimum per 32 numbers, without rounding.

Layout of the blocks: ggml-common.h and dequantize_row_q4_0, _q4_1, _q4_K of ggml-quants.c
(https://github.com/ggml-org/llama.cpp).

- Q4_0 and Q4_1, blocks of 32: float16 d (Q4_1: and m), 16 bytes; their lower halves are the first 16 levels, their
  upper halves the others. Values are d (level - 8), or d level + m.
- Q4_K, blocks of 256: float16 d and dmin, 12 bytes with eight scales and eight minima of 6 bits, 128 bytes of levels;
  each 32 bytes hold two groups. Values are d scale level - dmin minimum.
"""

from __future__ import annotations

from typing import Any

import gguf
import numpy as np
import numpy.typing as npt
import torch

from kvforge.models.gguf_header import GgufTensor
from kvforge.worker.kernels.quantised import GROUP, Groups

from .source import Source

Octets = npt.NDArray[np.uint8]
FOUR_BITS = ("Q4_0", "Q4_1", "Q4_K")


class StoredGroups:
    """The matrices of a model that its file stores in 4 bits."""

    def __init__(self, source: Source, module: Any) -> None:
        """Find each Linear of a transformers model in the file. Files of other formats have none."""
        self._found: dict[int, GgufTensor] = {}
        self._source = source
        if source.format != "gguf":
            return
        architecture = source.gguf_header.metadata["general.architecture"]
        numbers = {name: number for number, name in gguf.MODEL_ARCH_NAMES.items()}
        names = gguf.get_tensor_name_map(numbers[architecture], module.config.num_hidden_layers)
        tensors = {tensor.name: tensor for tensor in source.gguf_header.tensors if tensor.type_name in FOUR_BITS}
        attentions = (getattr(layer, "self_attn", None) for layer in module.model.layers)
        self._head_size = int(next(filter(None, attentions)).head_dim)
        for name, part in module.named_modules():
            stored = names.get_name(name)
            if stored is not None and type(part) is torch.nn.Linear and f"{stored}.weight" in tensors:
                self._found[id(part)] = tensors[f"{stored}.weight"]

    def of(self, part: Any) -> Groups | None:
        """Return the groups of a Linear; None if the file stores it otherwise or its numbers are not the weight.

        transformers reorders the rows of some models' tensors, so the result is compared with the weight.
        """
        tensor = self._found.get(id(part))
        if tensor is None:
            return None
        with self._source.path.open("rb") as file:
            file.seek(tensor.start)
            octets = np.frombuffer(file.read(tensor.size), np.uint8).reshape(len(part.weight), -1)
        groups = read_groups(octets, tensor.type_name)
        for order in (torch.arange(len(octets)), self._interleaved(len(octets))):
            ordered = Groups(groups.levels[order], groups.scales[order], groups.lows[order])
            if torch.equal(ordered.widened().to(part.weight.dtype), part.weight):
                return ordered
        return None

    def _interleaved(self, rows: int) -> torch.Tensor:
        """Return the position in the file of each row, [rows], for q and k of a Llama model."""
        order = torch.arange(rows)
        size = self._head_size
        return order if rows % size else order.view(-1, size // 2, 2).transpose(1, 2).flatten()


def read_groups(octets: Octets, type_name: str) -> Groups:
    """Decode quantised rows.

    Args:
        octets: [n, bytes of a row], as stored.
        type_name: One of FOUR_BITS.

    Returns:
        Groups of [n, k].
    """
    scale_bytes = {"Q4_0": 2, "Q4_1": 4, "Q4_K": 16}[type_name]
    group_bytes = 128 if type_name == "Q4_K" else GROUP // 2
    blocks = octets.reshape(len(octets), -1, scale_bytes + group_bytes)
    halves = blocks[..., scale_bytes:].reshape(len(octets), -1, 1, min(group_bytes, GROUP))
    levels = np.concatenate((halves & 15, halves >> 4), axis=2).reshape(len(octets), -1)
    halfs = np.ascontiguousarray(blocks[..., : min(scale_bytes, 4)]).view(np.float16).astype(np.float32)
    if type_name == "Q4_0":
        scales, lows = halfs[..., 0], -8 * halfs[..., 0]
    elif type_name == "Q4_1":
        scales, lows = halfs[..., 0], halfs[..., 1]
    else:
        of_scales, of_lows = _six_bits(blocks[..., 4:16])
        scales = (halfs[..., :1] * of_scales).reshape(len(octets), -1)
        lows = -(halfs[..., 1:] * of_lows).reshape(len(octets), -1)
    return Groups(*(torch.from_numpy(np.ascontiguousarray(each)) for each in (levels, scales, lows)))


def _six_bits(octets: Octets) -> tuple[Octets, Octets]:
    """Unpack [n, blocks, 12] bytes into scales and minima, each [n, blocks, 8].

    The first four of each are the lower 6 bits of four bytes. The others have 4 bits in the last four bytes and 2 bits
    on top of the first eight.
    """
    of_scales, of_lows, last = octets[..., :4], octets[..., 4:8], octets[..., 8:]
    scales = np.concatenate((of_scales & 63, (last & 15) | ((of_scales >> 6) << 4)), axis=-1)
    return scales, np.concatenate((of_lows & 63, (last >> 4) | ((of_lows >> 6) << 4)), axis=-1)
