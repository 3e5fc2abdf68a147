"""Checks at load that the ranks of a model together have each expert once, with the weights of the files.

The ranks compare the model with transformers' layers over the same weights, which would not show that a rank has the
experts of another one. Each rank therefore reads a row of the first and of the last expert that the next rank should
have, and compares it with what that rank has.
"""

from __future__ import annotations

import json
import zlib
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from typing import Any, Self

import torch
from safetensors import safe_open

from kvforge.protocol.errors import InvalidConfiguration, UnsupportedModel
from kvforge.worker.device.ranks import Ranks
from kvforge.worker.kernels.stored import codes_of

from .coded_parts import coded_experts
from .slices import Slices, expert_range, stored_names
from .split_experts import first_held

SINGLE = ("down_proj", "w2")  # names in files of the last matrix of an expert that is stored alone
Checksum = Callable[[str, int], int]  # of an expert of a module


def check_experts_of_ranks(module: Any, mine: Slices, ranks: Ranks, name: str, checksum: Checksum | None) -> None:
    """Check this rank's experts and those of the next rank. All ranks must call it, also those that divide none.

    Args:
        module: This rank's part of the model.
        mine: What it should be.
        ranks: The group of ranks.
        name: The model's name.
        checksum: Checksum of an expert in the files, by the name of its module and its number in the model; None: there
            are no files.

    Raises:
        InvalidConfiguration: Ranks have other settings.
        UnsupportedModel: A rank has other experts than it should, or another model's.
    """
    held = ranks.texts(json.dumps({path: _held(module.get_submodule(path)) for path in mine.experts}))
    if len({bool(json.loads(text)) for text in held}) > 1:
        problem = "some ranks divide the experts and others do not; give all ranks of a worker the same value"
        raise InvalidConfiguration("expert_parallel", problem)
    other = (mine.rank + 1) % mine.count
    problem = _difference(json.loads(held[other]), mine, other, checksum)
    if problem := next(filter(None, ranks.texts(problem)), ""):
        raise UnsupportedModel(name, problem)


def _held(part: Any) -> list[int]:
    """Return the first expert of a module, their number, and the checksums of the first and the last one."""
    first, coded = first_held(part), coded_experts(part)
    down = None if coded is None else codes_of(coded.matrices.down)
    weights = part.down_proj if down is None else down.words
    return [first, len(weights), *(row_checksum(weights[place, 0]) for place in (0, -1))]


def _difference(held: dict[str, list[int]], mine: Slices, rank: int, checksum: Checksum | None) -> str:
    for path, own in mine.experts.items():
        wanted = expert_range(own.total, rank, mine.count)
        first, count, *checksums = held.get(path, [0, 0])
        if (first, count) != (wanted.first, wanted.stop - wanted.first):
            numbers = f"{wanted.first} to {wanted.stop - 1}"
            return f"rank {rank} has experts {first} to {first + count - 1} of {path}, where it should have {numbers}"
        for expert, found in zip((wanted.first, wanted.stop - 1), checksums, strict=True):
            if checksum is not None and checksum(path, expert) != found:
                problem = f"rank {rank} has other weights of expert {expert} of {path} than the files of rank"
                return f"{problem} {mine.rank}; give all ranks the same files"
    return ""


def row_checksum(row: torch.Tensor) -> int:
    """Return the checksum of the bytes of a row [n]."""
    return zlib.crc32(row.detach().contiguous().cpu().view(torch.uint8).numpy().tobytes())


class StoredExperts:
    """Checksums of experts in files, for weights that are loaded with `dtype`; a context."""

    def __init__(self, files: tuple[Path, ...], dtype: torch.dtype) -> None:
        self._stack, self._dtype = ExitStack(), dtype
        opened = [self._stack.enter_context(safe_open(file, framework="pt", device="cpu")) for file in files]
        self._of = {name: file for file in opened for name in file.keys()}  # noqa: SIM118 - not a dictionary

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._stack.close()

    def __call__(self, path: str, expert: int) -> int:
        """Return the checksum of an expert's row."""
        return row_checksum(self._row(path, expert).to(self._dtype))

    def _row(self, path: str, expert: int) -> torch.Tensor:
        for name in stored_names(f"{path}.down_proj"):
            if name in self._of:
                together: torch.Tensor = self._of[name].get_slice(name)[expert : expert + 1, 0]
                return together[0]
            owner = name.rpartition(".")[0]
            for single in (f"{owner}.{expert}.{last}.weight" for last in SINGLE):
                if single in self._of:
                    alone: torch.Tensor = self._of[single].get_slice(single)[0]
                    return alone
        raise AssertionError(f"{path} was read from these files")
