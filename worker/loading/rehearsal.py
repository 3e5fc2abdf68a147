"""A rehearsal of the load: compares the files' tensors with the configuration before any tensor is read.

transformers loads the names and shapes of the headers through its own conversions onto the meta device. A missing,
unexpected or misshaped tensor is rejected at no cost, even if it is the last one of 28 GB.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from typing import Any

import torch

from kvforge.models.safetensors_header import StoredTensor
from kvforge.protocol.errors import UnsupportedModel
from kvforge.worker.device.device import Device

from .composite import is_removed
from .library_errors import sentence
from .report import LoadReport, mtp_modules, reject_mismatches, reported

TYPES = {
    "BOOL": torch.bool,
    "U8": torch.uint8,
    "I8": torch.int8,
    "I16": torch.int16,
    "I32": torch.int32,
    "I64": torch.int64,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "F32": torch.float32,
    "F64": torch.float64,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E5M2": torch.float8_e5m2,
    "F8_E8M0": getattr(torch, "float8_e8m0fnu", torch.uint8),
}
log = logging.getLogger("worker")


def rehearse(cls: Any, config: Any, stored: Mapping[str, StoredTensor], dtype: torch.dtype, model: str) -> Any:
    """Load names and shapes only.

    Args:
        cls: The transformers class from `composite.model_class`.
        config: Its configuration.
        stored: The files' tensors, by name.
        dtype: Dtype of the weights.
        model: The name for errors.

    Returns:
        The model on the meta device; None if transformers cannot build it without weights. The load itself then finds
        any mismatch.

    Raises:
        UnsupportedModel: The weights do not match the configuration; names the tensors.
    """
    for tensor in stored.values():
        if tensor.type_name not in TYPES:
            raise UnsupportedModel(model, f"its tensor {tensor.name} is stored as {tensor.type_name}: not a known type")
    state = {
        name: torch.empty(tensor.shape, dtype=TYPES[tensor.type_name], device="meta") for name, tensor in stored.items()
    }
    try:
        with reported() as report:
            module = cls.from_pretrained(
                None,
                config=config,
                state_dict=state,
                dtype=dtype,
                attn_implementation="eager",
                device_map={"": "meta"},
                ignore_mismatched_sizes=True,
            )
    except Exception as error:  # noqa: BLE001 - foreign code without weights; the load reports the fault
        log.info("%s: not rehearsed: %s: %s", model, type(error).__name__, sentence(error))
        return None
    drop_removed_parts(report, module)
    reject_mismatches(report, model)
    return module


def drop_removed_parts(report: LoadReport, module: Any) -> None:
    """Remove entries of removed, non-text parts and of multi-token prediction modules from a report."""
    modules = mtp_modules(report.unused)
    report.unused = {name for name in report.unused if not is_removed(module, name) and not name.startswith(modules)}


def check_memory(module: Any, device: Device, model: str) -> None:
    """Reject a model with more bytes of weights than the device has memory.

    Raises:
        UnsupportedModel: The weights cannot fit.
    """
    needed = sum(each.nbytes for each in {id(each): each for each in module.parameters()}.values())
    total = device.total_bytes()
    if needed > total:
        problem = f"its weights take {needed} bytes in this dtype; {device.name} has {total} bytes of memory"
        raise UnsupportedModel(model, f"{problem}: use a smaller or a quantised model, or more ranks")
