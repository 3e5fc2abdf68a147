"""Compares the loaded model with its files: no tensor missing, unused or misshaped, and no NaN.

transformers invents tensors that it does not find and ignores those that it does not know. It lists them in a report,
which is read here, without those that the model's class declares ignorable. Further checks cover faults that the report
cannot show.
"""

from __future__ import annotations

import contextlib
import re
from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from transformers import modeling_utils

from kvforge.models.safetensors_header import StoredTensor
from kvforge.protocol.errors import UnsupportedModel

from .composite import is_removed
from .formats import is_read

NAMES_MAX = 4
# The tensor that every multi-token prediction module has, by its published names (see `mtp`).
MTP = re.compile(r"((.*\.)?layers\.\d+\.)eh_proj\.weight|((.*\.)?mtp_layers\.)\d+\.input_proj\.weight")
PLAIN = frozenset({"F64", "F32", "F16", "BF16"})
EXPERT = re.compile(r"(?P<experts>.*\.experts)\.(?P<number>\d+)\.")


@dataclass
class LoadReport:
    """Findings of transformers while it filled a model, by the model's names. Shapes: stored, then wanted."""

    missing: set[str] = field(default_factory=set)
    unused: set[str] = field(default_factory=set)
    mismatched: set[tuple[str, tuple[int, ...], tuple[int, ...]]] = field(default_factory=set)
    failed: dict[str, str] = field(default_factory=dict)


@contextlib.contextmanager
def reported() -> Iterator[LoadReport]:
    """Capture the report that transformers would print, even if transformers raises afterwards."""
    report = LoadReport()

    def note(*_: Any, loading_info: Any, **__: Any) -> None:
        report.missing = set(loading_info.missing_keys)
        report.unused = set(loading_info.unexpected_keys)
        report.mismatched = {(name, tuple(a), tuple(b)) for name, a, b in loading_info.mismatched_keys}
        report.failed = dict(getattr(loading_info, "conversion_errors", {}))

    kept = modeling_utils.log_state_dict_report
    modeling_utils.log_state_dict_report = note
    try:
        yield report
    finally:
        modeling_utils.log_state_dict_report = kept


def reject_mismatches(report: LoadReport, model: str, stored_name: Callable[[str], str] = lambda name: name) -> None:
    """Reject a load with mismatches.

    Args:
        report: The findings of transformers.
        model: The name for errors.
        stored_name: Converts a model's tensor name to the file's.

    Raises:
        UnsupportedModel: Names the tensors.
    """
    problems = []
    mismatched = {name for name, _, _ in report.mismatched}
    for name, stored, wanted in sorted(report.mismatched, key=lambda item: natural(item[0]))[:NAMES_MAX]:
        problems.append(f"{stored_name(name)} is {list(stored)} and has to be {list(wanted)}")
    if more := len(report.mismatched) - NAMES_MAX:
        problems += [f"{more} more have other shapes than they have to"] if more > 0 else []
    if report.failed:
        problems.append(f"cannot be put together: {listed(map(stored_name, report.failed))}")
    if missing := report.missing - mismatched - set(report.failed):
        problems.append(f"missing: {listed(map(stored_name, missing))}")
    if report.unused:
        problems.append(f"not used by the model: {listed(report.unused)}")
    if problems:
        raise UnsupportedModel(model, "its weights are not those of its configuration: " + "; ".join(problems))


def check_experts(names: Collection[str], model: str) -> None:
    """Check that experts stored one by one are numbered 0, 1, ...; transformers joins them in order, whatever the gaps.

    Raises:
        UnsupportedModel: A number is missing.
    """
    numbers: dict[str, set[int]] = {}
    for name in names:
        if match := EXPERT.match(name):
            numbers.setdefault(match["experts"], set()).add(int(match["number"]))
    for experts, found in numbers.items():
        if absent := sorted(set(range(max(found))) - found):
            raise UnsupportedModel(model, f"its weights have {experts}.{max(found)}, and no {experts}.{absent[0]}")


def mtp_modules(names: Collection[str]) -> tuple[str, ...]:
    """Return the beginnings of the names of multi-token prediction modules, which a model itself does not use."""
    found = filter(None, map(MTP.fullmatch, names))
    return tuple({match[1] or match[3] for match in found})


def check_unpacked(module: Any, stored: Mapping[str, StoredTensor], model: str, method: str = "") -> None:
    """Reject stored numbers that are neither plain nor part of the dequantised format.

    Numbers other than floating point of 16 bits or more need a format that defines their packing or scales. Without
    one, transformers would use them as weights.

    Args:
        module: The model that transformers built, or its counterpart on the meta device.
        stored: The files' tensors, by name.
        model: The name for errors.
        method: The dequantised format, as `formats.dequantise` returned it.

    Raises:
        UnsupportedModel: Names the tensor and its type.
    """
    ignored = [re.compile(pattern) for pattern in module._keys_to_ignore_on_load_unexpected or ()]
    modules = mtp_modules(stored)
    # Compared by the last part of their names, which conversions keep.
    integers = {
        name.rpartition(".")[2] for name, tensor in module.state_dict().items() if not tensor.is_floating_point()
    }
    for name, tensor in stored.items():
        is_integer = name.rpartition(".")[2] in integers
        if tensor.type_name in PLAIN or is_integer or is_read(method, name, tensor):
            continue
        if is_removed(module, name) or name.startswith(modules) or any(each.search(name) for each in ignored):
            continue
        lacks = f"the format {method!r} does not define" if method else "no quantization_config in config.json defines"
        problem = f"its tensor {name} is stored as {tensor.type_name}, and {lacks} how it is packed or scaled"
        raise UnsupportedModel(model, problem)


@torch.inference_mode()
def check_finite(module: Any, model: str, stored_name: Callable[[str], str] = lambda name: name) -> None:
    """Check that all weights are finite.

    Raises:
        UnsupportedModel: Names the tensors with NaN or infinity.
    """
    named = [(name, tensor) for name, tensor in _lasting(module) if _can_be_nan(tensor)]
    if not named:
        return
    # Minimum and maximum are NaN if any value is, and need no memory of the weights' size.
    ends = [torch.stack(torch.aminmax(tensor)).float() for _, tensor in named]
    finite = torch.stack(ends).isfinite().all(1).tolist()
    broken = {stored_name(name) for (name, _), good in zip(named, finite, strict=True) if not good}
    if broken:
        kind = str(named[0][1].dtype).removeprefix("torch.")
        raise UnsupportedModel(model, f"its weights hold NaN or infinity (in {kind}): {listed(broken)}")


def _lasting(module: Any) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield parameters and persistent buffers by name, without expanding those that are packed."""
    yield from module.named_parameters(remove_duplicate=False)
    for path, part in module.named_modules():
        for name, buffer in part._buffers.items():
            if buffer is not None and name not in part._non_persistent_buffers_set:
                yield f"{path}.{name}".lstrip("."), buffer


def natural(name: str) -> list[tuple[int, str]]:
    """Return a sort key that puts layer 2 before layer 10."""
    return [(int(part), "") if part.isdigit() else (-1, part) for part in re.split(r"(\d+)", name)]


def listed(names: Any) -> str:
    """Join the first few names, with the number of the others."""
    found = sorted(set(names), key=natural)
    more = f" and {len(found) - NAMES_MAX} more" if len(found) > NAMES_MAX else ""
    return ", ".join(found[:NAMES_MAX]) + more


def _can_be_nan(tensor: torch.Tensor) -> bool:
    return tensor.is_floating_point() and tensor.dtype.itemsize > 1 and tensor.numel() > 0
