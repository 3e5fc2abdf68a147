"""The interface of a published format, and the check of a projection's tensors before they are read."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NoReturn, Protocol

import torch

from kvforge.models.safetensors_header import StoredTensor
from kvforge.protocol.errors import UnsupportedModel
from kvforge.worker.kernels.stored import Codes

Tensors = Mapping[str, torch.Tensor]  # by the last part of the name
FLOATS = ("F32", "F16", "BF16")


@dataclass(frozen=True)
class Wanted:
    """A tensor that a projection must have. name: its last part. types: of safetensors. shape: its shape."""

    name: str
    types: tuple[str, ...]
    shape: tuple[int, ...]


class PublishedFormat(Protocol):
    """A format, as one model's configuration describes it."""

    @property
    def kind(self) -> str:
        """Name of the numbers for people: fp8, int8, int4, mxfp4, nvfp4 or nf4."""

    @property
    def label(self) -> str:
        """Text that distinguishes the format, for the log and the fingerprint."""

    def covers(self, path: str, stored: Mapping[str, StoredTensor]) -> bool:
        """Return whether a projection is stored in this format. path: its name, without a dot at the end."""

    def wanted(self, path: str, n: int, k: int, stored: Mapping[str, StoredTensor]) -> Sequence[Wanted]:
        """Return the tensors of a projection [n, k]. The last parts of their names follow `path` and a dot."""

    def ignored(self, path: str) -> Sequence[str]:
        """Return the last parts of names of tensors that may be there and are not needed."""

    def codes(self, tensors: Tensors, n: int, k: int) -> Codes:
        """Return the codes of a projection [n, k].

        Raises:
            ValueError: Numbers in the tensors are impossible; the message begins with the last part of a name.
        """


def check_tensors(
    published: PublishedFormat, path: str, n: int, k: int, stored: Mapping[str, StoredTensor], model: str
) -> list[str]:
    """Check the types and shapes of a projection's tensors.

    Args:
        published: The format.
        path: Name of the projection.
        n: Its rows.
        k: Its columns.
        stored: The files' tensors, by name.
        model: The name for errors.

    Returns:
        The last parts of the names of the tensors to read.

    Raises:
        UnsupportedModel: Names the tensor that is missing or of another type or shape.
    """
    names = []
    for each in published.wanted(path, n, k, stored):
        full = f"{path}.{each.name}"
        found = stored.get(full)
        if found is None:
            problem = f"has no tensor {full}, which {published.label} has for a projection of {n} x {k}"
            raise UnsupportedModel(model, f"it {problem}")
        if found.type_name not in each.types or tuple(found.shape) != each.shape:
            has = f"{' or '.join(each.types)} {list(each.shape)}"
            problem = f"its tensor {full} is {found.type_name} {list(found.shape)}, and has to be {has}"
            raise UnsupportedModel(model, f"{problem}: {published.label}, a projection of {n} x {k}")
        names.append(each.name)
    return names


def refuse(model: str, name: str, value: Any, expected: str) -> NoReturn:
    """Refuse a setting of a quantization_config.

    Raises:
        UnsupportedModel: Always.
    """
    problem = f"its quantization_config has {name} = {repr(value)[:100]}, which kvforge does not read"
    raise UnsupportedModel(model, f"{problem}: expected {expected}")


def whole_number(values: Mapping[str, Any], name: str, model: str, choices: Sequence[int]) -> int:
    """Return a setting that must be one of some numbers.

    Raises:
        UnsupportedModel: It is another one.
    """
    value = values.get(name)
    if type(value) is not int or value not in choices:
        refuse(model, name, value, " or ".join(map(str, choices)))
    return value


GROUP_SIZES = (16, 32, 64, 128, 256, 512, 1024)


def unpacked(words: torch.Tensor, bits: int) -> torch.Tensor:
    """Unpack int32 words [..., m] into [..., m x 32 / bits] uint8, the lowest bits first."""
    shifts = torch.arange(0, 32, bits, device=words.device, dtype=torch.int32)
    return ((words[..., None] >> shifts) & ((1 << bits) - 1)).to(torch.uint8).flatten(-2)


def by_group(scales: torch.Tensor) -> torch.Tensor:
    """Return scales [n, groups] as `Codes` has them: [groups, n] float32, contiguous."""
    return scales.float().t().contiguous()
