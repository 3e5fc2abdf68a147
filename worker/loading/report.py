"""Is what lies in memory what lay in the files? Nothing missing, nothing left over, nothing of another shape, no NaN.

transformers makes up what it does not find and passes over what it does not know: it says so in a report, which is
read here. What a model's class declares ignorable is not in it any more. Beside it stands what the report cannot show.
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
PLAIN = frozenset({"F64", "F32", "F16", "BF16"})
EXPERT = re.compile(r"(?P<experts>.*\.experts)\.(?P<number>\d+)\.")


@dataclass
class LoadReport:
    """What transformers found when it filled a model. Names are the model's; shapes: stored, and wanted."""

    missing: set[str] = field(default_factory=set)
    unused: set[str] = field(default_factory=set)
    mismatched: set[tuple[str, tuple[int, ...], tuple[int, ...]]] = field(default_factory=set)
    failed: dict[str, str] = field(default_factory=dict)


@contextlib.contextmanager
def reported() -> Iterator[LoadReport]:
    """The report that transformers would print. Filled when it would have been printed, also where it then raises."""
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


def judge(report: LoadReport, model: str, stored_name: Callable[[str], str] = lambda name: name) -> None:
    """Raises UnsupportedModel, by the names of tensors. stored_name: of a model's tensor in the file."""
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
    """Experts stored one by one are joined in the order of their numbers, whatever these are: they must be 0, 1, ...

    Raises UnsupportedModel.
    """
    numbers: dict[str, set[int]] = {}
    for name in names:
        if match := EXPERT.match(name):
            numbers.setdefault(match["experts"], set()).add(int(match["number"]))
    for experts, found in numbers.items():
        if absent := sorted(set(range(max(found))) - found):
            raise UnsupportedModel(model, f"its weights have {experts}.{max(found)}, and no {experts}.{absent[0]}")


def check_unpacked(module: Any, stored: Mapping[str, StoredTensor], model: str, method: str = "") -> None:
    """Refuse stored numbers that are neither plain nor part of the format that was undone.

    Numbers other than floating point numbers of 16 bits or more mean something only with a format that defines how they
    are packed or scaled; transformers turns others into weights as they are.

    Args:
        module: The model that transformers built from them, or its like on the meta device.
        stored: The files' tensors, by name.
        model: The name in a refusal.
        method: The format that was undone, as `formats.dequantise` returned it.

    Raises:
        UnsupportedModel: Names the tensor and its type.
    """
    ignored = [re.compile(pattern) for pattern in module._keys_to_ignore_on_load_unexpected or ()]
    # By the last part of their names, which conversions keep.
    integers = {
        name.rpartition(".")[2] for name, tensor in module.state_dict().items() if not tensor.is_floating_point()
    }
    for name, tensor in stored.items():
        is_integer = name.rpartition(".")[2] in integers
        if tensor.type_name in PLAIN or is_integer or is_read(method, name, tensor):
            continue
        if is_removed(module, name) or any(pattern.search(name) for pattern in ignored):
            continue
        lacks = f"the format {method!r} does not define" if method else "no quantization_config in config.json defines"
        problem = f"its tensor {name} is stored as {tensor.type_name}, and {lacks} how it is packed or scaled"
        raise UnsupportedModel(model, problem)


@torch.inference_mode()
def check_finite(module: Any, model: str, stored_name: Callable[[str], str] = lambda name: name) -> None:
    """Raises UnsupportedModel where a weight is NaN or infinite, by the names of the tensors."""
    named = [(name, tensor) for name, tensor in module.state_dict().items() if _can_be_nan(tensor)]
    if not named:
        return
    # The smallest and the largest: both are NaN where one value is, and nothing of the weights' size is allocated.
    ends = [torch.stack(torch.aminmax(tensor)).float() for _, tensor in named]
    finite = torch.stack(ends).isfinite().all(1).tolist()
    broken = {stored_name(name) for (name, _), good in zip(named, finite, strict=True) if not good}
    if broken:
        kind = str(named[0][1].dtype).removeprefix("torch.")
        raise UnsupportedModel(model, f"its weights hold NaN or infinity (in {kind}): {listed(broken)}")


def natural(name: str) -> list[tuple[int, str]]:
    """Sorts layer 2 before layer 10."""
    return [(int(part), "") if part.isdigit() else (-1, part) for part in re.split(r"(\d+)", name)]


def listed(names: Any) -> str:
    """The first few, and how many more."""
    found = sorted(set(names), key=natural)
    more = f" and {len(found) - NAMES_MAX} more" if len(found) > NAMES_MAX else ""
    return ", ".join(found[:NAMES_MAX]) + more


def _can_be_nan(tensor: torch.Tensor) -> bool:
    return tensor.is_floating_point() and tensor.dtype.itemsize > 1 and tensor.numel() > 0
