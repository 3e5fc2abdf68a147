"""Matrices of 4 bits in a GGUF file, as levels with a scale and a smallest value for each 32: no number is rounded.

Layout of the blocks: ggml-common.h and dequantize_row_q4_0, _q4_1, _q4_K of ggml-quants.c
(https://github.com/ggml-org/llama.cpp). A block of 32: float16 d (Q4_1: and m), 16 bytes whose lower halves are the
first 16 levels and whose upper ones are the others; d (level - 8), or d level + m. A block of 256 of Q4_K: float16 d
and dmin, 12 bytes with eight scales and eight minima of 6 bits, 128 bytes of levels, each 32 of which hold two groups;
d scale level - dmin minimum.
"""

from __future__ import annotations

from typing import Any

import gguf
import numpy as np
import numpy.typing as npt
import torch

from kvforge.models.gguf_header import GgufTensor
from worker.kernels.quantised import GROUP, Groups

from .source import Source

Octets = npt.NDArray[np.uint8]
FOUR_BITS = ("Q4_0", "Q4_1", "Q4_K")


class StoredGroups:
    """The matrices of a model that its file holds in 4 bits."""

    def __init__(self, source: Source, module: Any) -> None:
        """Notes where each Linear of a transformers model lies; files of other formats hold none."""
        self._found: dict[int, GgufTensor] = {}
        self._source = source
        if source.format != "gguf":
            return
        architecture = source.gguf_header.metadata["general.architecture"]
        numbers = {name: number for number, name in gguf.MODEL_ARCH_NAMES.items()}
        names = gguf.get_tensor_name_map(numbers[architecture], module.config.num_hidden_layers)
        tensors = {tensor.name: tensor for tensor in source.gguf_header.tensors if tensor.type_name in FOUR_BITS}
        self._head_size = int(module.model.layers[0].self_attn.head_dim)
        for name, part in module.named_modules():
            stored = names.get_name(name)
            if stored is not None and type(part) is torch.nn.Linear and f"{stored}.weight" in tensors:
                self._found[id(part)] = tensors[f"{stored}.weight"]

    def of(self, part: Any) -> Groups | None:
        """Of a Linear of the model: None where the file holds it otherwise, or where what is there is not its weight.

        transformers changes the order of rows of some models' tensors: what is returned has been compared.
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
        """[rows]: where each row lies in the file, if it is one of q or k of a Llama model."""
        order = torch.arange(rows)
        size = self._head_size
        return order if rows % size else order.view(-1, size // 2, 2).transpose(1, 2).flatten()


def read_groups(octets: Octets, type_name: str) -> Groups:
    """octets: [n, bytes of a row], as the file has them. type_name: one of FOUR_BITS. Groups of [n, k]."""
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
    """[n, blocks, 12] -> scales and minima, each [n, blocks, 8]: the first four of each lie in the lower 6 bits of four
    bytes, of the others 4 bits in the last four and 2 on top of the first."""
    of_scales, of_lows, last = octets[..., :4], octets[..., 4:8], octets[..., 8:]
    scales = np.concatenate((of_scales & 63, (last & 15) | ((of_scales >> 6) << 4)), axis=-1)
    return scales, np.concatenate((of_lows & 63, (last >> 4) | ((of_lows >> 6) << 4)), axis=-1)
