"""Keeps the quantised matrices of a GGUF file as codes, in place of the numbers that transformers made of them.

transformers dequantises a file, reorders the rows of some models' tensors and joins those of experts. Each matrix is
read once more as codes and compared with the result: what is not exactly the same numbers stays as it is.
"""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np
import torch

from kvforge.models.gguf_header import GgufTensor
from kvforge.protocol.errors import UnsupportedModel
from kvforge.worker.kernels.experts import is_experts
from kvforge.worker.kernels.stored import (
    Codes,
    StoredWeight,
    as_int8,
    join_alike,
    join_rows,
    stack_experts,
    stored_problem,
)

from .coded_parts import CodedLinear, hold_experts
from .gguf_codes import READERS, codes_of_rows
from .source import Source

DECODED_BYTES = 1 << 24  # of a file that are decoded at a time
NOT_QUANTISED = frozenset({"F64", "F32", "F16", "BF16"})
UP, DOWN = "gate_up_proj", "down_proj"
log = logging.getLogger("worker")


@torch.no_grad()
def keep_levels(
    module: Any, source: Source, names: Mapping[str, str], dtype: torch.dtype, device: torch.device
) -> None:
    """Replace the projections and experts of a model that are quantised in its file.

    Args:
        module: The transformers model, with the file's numbers.
        source: The file.
        names: Name in the file -> name in the model, of experts without their last part.
        dtype: Dtype of the model.
        device: Where codes go.

    Raises:
        UnsupportedModel: Names a tensor with impossible numbers.
    """
    reader = _Reader(source, dtype, device)
    tensors = {tensor.name: tensor for tensor in source.gguf_header.tensors}
    kept, experts = Counter[str](), dict[str, dict[str, GgufTensor]]()
    for stored, wanted in names.items():
        path, _, last = wanted.rpartition(".")
        tensor = tensors.get(stored) or tensors.get(f"{stored}.weight")
        if tensor is None or tensor.type_name in NOT_QUANTISED:
            continue
        if last in (UP, DOWN):
            experts.setdefault(path, {})[stored.rpartition(".")[2]] = tensor
        elif last == "weight" and type(part := module.get_submodule(path)) is torch.nn.Linear:
            if part.weight is module.get_input_embeddings().weight:  # it is looked up, too
                continue
            codes = reader.equal_to(tensor, part.weight, _orders(module, len(part.weight)))
            if codes is not None:
                made = CodedLinear(StoredWeight(codes, dtype), slice(None), None)
                made._parameters["bias"] = part._parameters.get("bias")
                parent, _, name = path.rpartition(".")
                setattr(module.get_submodule(parent), name, made)
            kept[tensor.type_name if codes is not None else ""] += 1
    for path, found in experts.items():
        kept["experts" if reader.hold(module.get_submodule(path), found) else ""] += 1
    others = f", {kept.pop('')} as {str(dtype).removeprefix('torch.')}" if kept[""] else ""
    log.info("%s: kept as stored: %s%s", source.name, ", ".join(f"{n} {kind}" for kind, n in kept.items()), others)


def _orders(module: Any, rows: int) -> Iterator[torch.Tensor | None]:
    """Yield the orders that the rows of a file may have: its own, and that of q and k of a Llama model."""
    yield None
    config = module.config.get_text_config(decoder=True)
    size = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    if not rows % size:
        yield torch.arange(rows).view(-1, size // 2, 2).transpose(1, 2).flatten()


class _Reader:
    """Reads the codes of a file's tensors and compares them with numbers."""

    def __init__(self, source: Source, dtype: torch.dtype, device: torch.device) -> None:
        self._source, self._dtype, self._device = source, dtype, device

    def equal_to(self, tensor: GgufTensor, weight: torch.Tensor, orders: Iterator[torch.Tensor | None]) -> Codes | None:
        """Return the codes [n, k] of a tensor, with their rows in the order that has a weight's numbers; or None."""
        codes = self._kept(tensor, len(weight), weight.shape[1])
        if codes is None:
            return None
        wanted = weight.to(self._device)
        numbers = codes.widened(self._dtype)
        for order in orders:
            if torch.equal(numbers if order is None else numbers[order.to(self._device)], wanted):
                return codes if order is None else codes.in_row_order(order)
        log.info("%s stays in %s: it is not the model's numbers", tensor.name, self._dtype)
        return None

    def hold(self, part: Any, tensors: Mapping[str, GgufTensor]) -> bool:
        """Let experts compute with the codes of their tensors; False: something about them is different."""
        gate, up, down = (tensors.get(f"ffn_{each}_exps") for each in ("gate", "up", "down"))
        if gate is None or up is None or down is None or not is_experts(part) or part.has_bias or part.is_transposed:
            return False
        first, second = self._experts((gate, up), part.gate_up_proj), self._experts((down,), part.down_proj)
        if first is None or second is None:
            return False
        hold_experts(part, first, second, self._dtype)
        return True

    def _experts(self, tensors: tuple[GgufTensor, ...], wanted: torch.Tensor) -> Codes | None:
        """Return the codes [experts, n, k] of tensors that are joined by rows for each expert; None: others."""
        rows = wanted.shape[1] // len(tensors)
        parts = [self._kept(each, len(wanted) * rows, wanted.shape[2]) for each in tensors]
        found = []
        for index, numbers in enumerate(wanted):
            mine = [each.rows(slice(index * rows, (index + 1) * rows)) for each in parts if each is not None]
            joined = join_alike(mine) if len(mine) == len(tensors) else None
            if joined is None or not torch.equal(joined.widened(self._dtype), numbers.to(self._device)):
                return None
            found.append(joined)
        return stack_experts(found)

    def _kept(self, tensor: GgufTensor, n: int, k: int) -> Codes | None:
        """Return the codes [n, k] of a tensor that kernels multiply, in 8 bits if need be; None: they multiply none."""
        if tensor.type_name not in READERS:
            log.info("%s stays in %s: no kernel multiplies %s", tensor.name, self._dtype, tensor.type_name)
            return None
        if int(np.prod(tensor.shape)) != n * k or tensor.shape[-1] != k:
            return None
        codes = self._read(tensor, n)
        problem = stored_problem((n, k), codes.code, codes.group)
        if problem and (wide := as_int8(codes)) is not None:
            codes, problem = wide, stored_problem((n, k), wide.code, wide.group)
        if problem:
            log.info("%s stays in %s: %s", tensor.name, self._dtype, problem)
            return None
        return codes

    def _read(self, tensor: GgufTensor, n: int) -> Codes:
        step = max(1, DECODED_BYTES * n // tensor.size)
        parts = []
        with self._source.path.open("rb") as file:
            file.seek(tensor.start)
            for first in range(0, n, step):
                rows = min(step, n - first)
                octets = np.frombuffer(bytearray(file.read(tensor.size // n * rows)), np.uint8).reshape(rows, -1)
                try:
                    parts.append(codes_of_rows(torch.from_numpy(octets).to(self._device), tensor.type_name))
                except ValueError as error:
                    raise UnsupportedModel(self._source.name, f"its tensor {tensor.name} {error}") from error
        joined = join_rows(parts)
        assert joined is not None, "rows of one type"
        return joined
