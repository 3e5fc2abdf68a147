"""A stream of weights with the interface of safetensors' own files, for code that opens those.

transformers keeps reading, converting and placing tensors as it does with files: only where their bytes come from and
the memory that they arrive in are other ones.
"""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Iterable, Iterator, Mapping
from math import prod
from pathlib import Path
from typing import Any, Self

import torch
from safetensors import safe_open
from transformers import modeling_utils

from kvforge.models.safetensors_header import StoredTensor
from kvforge.worker.device.device import Device

from .early_checks import EarlyChecks
from .progress import ProgressBars
from .report import natural
from .source import Source
from .weight_stream import WeightStream

log = logging.getLogger("worker")


@contextlib.contextmanager
def streamed(stream: WeightStream | None, bars: ProgressBars, early: EarlyChecks | None = None) -> Iterator[None]:
    """Let transformers read from a stream instead of files while inside.

    Args:
        stream: The stream; None: from files.
        bars: Show the share of bytes.
        early: Checks that begin when transformers opens the first file.
    """
    if stream is None:
        yield
        return
    phase = f"reading {stream.bytes_total / 1e9:.1f} GB of weights"
    kept = modeling_utils.safe_open
    bars.measure = lambda: (phase, stream.share)

    def opened(path: str, *_: Any, **__: Any) -> StreamedFile:
        if early is not None:
            early.begin()
        return StreamedFile(stream, Path(path), stays=True)

    modeling_utils.safe_open = opened
    try:
        with stream:
            yield
    finally:
        modeling_utils.safe_open = kept
        bars.measure = None
    log.info("%s", stream.line())


@contextlib.contextmanager
def files_by_tensor(files: Iterable[Path], device: Device) -> Iterator[dict[str, Any]]:
    """Yield the open file of each tensor, by the tensor's name: streamed, or mapped where that is faster."""
    with contextlib.ExitStack() as stack:
        opened: list[Any]
        if reads_in_parallel(device):
            stream = stack.enter_context(WeightStream(tuple(files), device))
            opened = [StreamedFile(stream, file, stays=False) for file in stream.names]
        else:
            opened = [stack.enter_context(safe_open(file, framework="pt", device="cpu")) for file in files]
        yield {name: file for file in opened for name in file.keys()}  # noqa: SIM118 - not a dictionary
        if reads_in_parallel(device):
            log.info("%s", stream.line())


@contextlib.contextmanager
def part_by_tensor(source: Source) -> Iterator[dict[str, Any]]:
    """Yield what `files_by_tensor` does for a part of a checkpoint, by the part's names. Its files are mapped."""
    with contextlib.ExitStack() as stack:
        files = [stack.enter_context(safe_open(file, framework="pt")) for file in source.model_files.weights]
        yield source.of_part({name: RenamedTensor(file, name) for file in files for name in file.keys()})  # noqa: SIM118


class RenamedTensor:
    """A tensor of a file under another name, with the interface of the file."""

    def __init__(self, file: Any, name: str) -> None:
        self._file, self._name = file, name

    def get_slice(self, _: str) -> Any:
        """Return the tensor's slices."""
        return self._file.get_slice(self._name)


def reads_in_parallel(device: Device) -> bool:
    """Return whether weights are read by `weight_stream`. A device without its own memory uses mapped files."""
    return device.owns_memory


def reading_order(stored: Mapping[str, StoredTensor], removed: Iterable[str]) -> list[str]:
    """Return the names that transformers will read, in its order. removed: names that it will not read."""
    return sorted(stored.keys() - set(removed), key=natural)


class StreamedFile:
    """One file of a stream, with the interface of `safetensors.safe_open`."""

    def __init__(self, stream: WeightStream, path: Path, stays: bool) -> None:
        """stays: whether tensors ignore the next move to another device (see `Placed`)."""
        self._stream, self._names, self._stays = stream, stream.names[path], stays

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        pass

    def keys(self) -> list[str]:
        """Return the names of the tensors."""
        return self._names

    def get_slice(self, name: str) -> StreamedTensor:
        """Return a tensor that is read when it is sliced."""
        return StreamedTensor(self._stream, name, self._stays)


class StreamedTensor:
    """A tensor of a file that is read when it is sliced."""

    def __init__(self, stream: WeightStream, name: str, stays: bool) -> None:
        self._stream, self._name, self._stays = stream, name, stays
        self._whole: torch.Tensor | None = None  # kept for further cuts

    def get_shape(self) -> list[int]:
        """Return the shape."""
        return list(self._stream.stored[self._name].shape)

    def get_dtype(self) -> str:
        """Return the type by the format's name."""
        return self._stream.stored[self._name].type_name

    def __getitem__(self, index: Any) -> Any:
        """Return the slice on the device. A range of rows is read alone; other slices are cut from the whole."""
        rows = _first_rows(index, self._stream.stored[self._name].shape)
        if rows is not None:
            return self._stream.take(self._name, (rows,))
        if index is ...:
            whole = self._stream.take(self._name)
            return Placed(whole) if self._stays else whole
        if self._whole is None:
            self._whole = self._stream.take(self._name)
        return self._whole[index].clone()  # no view of the whole


def _first_rows(index: Any, shape: tuple[int, ...]) -> tuple[int, int] | None:
    """Return the range of an index that selects rows of the first dimension; None for any other."""
    if not isinstance(index, tuple) or len(index) != 1 or not isinstance(index[0], slice) or not prod(shape):
        return None
    start, stop, step = index[0].indices(shape[0])
    return (start, stop) if step == 1 and stop > start else None


class Placed:
    """A tensor that is already where it belongs: `to` changes its dtype and ignores the device.

    transformers moves what it reads to its own device, the CPU unless accelerate divides the model. With a division it
    would also compute buffers on the device, and their bits would change.
    """

    def __init__(self, tensor: torch.Tensor) -> None:
        self._tensor = tensor

    def to(self, device: Any = None, dtype: torch.dtype | None = None) -> torch.Tensor:  # noqa: ARG002
        """Return the tensor with this dtype, on its own device."""
        return self._tensor if dtype is None else self._tensor.to(dtype)
