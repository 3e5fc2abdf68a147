"""Fingerprint: a hash of every byte of every tensor and of the configuration.

Hashing the files would not do: two loads of one file may differ (another dtype, another version of transformers, an
invented tensor), and SHA-256 of tens of gigabytes takes minutes. Each tensor is therefore summed on its device first:
pieces of 65,536 words, each word multiplied by an odd random 64-bit number, modulo 2^64 (multilinear hashing: two
different pieces have equal sums with probability below 2^-32). SHA-256 then hashes the sums.
"""

from __future__ import annotations

import functools
import hashlib
import json
from collections.abc import Iterator
from typing import Any

import numpy as np
import torch

from .coded_parts import coded_tensors

PIECE_WORDS = 1 << 16
PIECES_AT_ONCE = 256
# Keys without effect on results: origin, author, and how the model is computed here.
IGNORED = ("_name_or_path", "transformers_version", "architectures", "dtype", "torch_dtype", "quantization_config")

Sums = np.ndarray[Any, np.dtype[np.int64]]


@torch.inference_mode()
def fingerprint(module: Any, dtype: str) -> str:
    """Hash everything that determines a model's tokens.

    Args:
        module: The transformers model: its class, configuration, parameters and buffers.
        dtype: Dtype of the weights.

    Returns:
        Hex SHA-256.
    """
    values = {key: value for key, value in module.config.to_dict().items() if key not in IGNORED}
    digest = hashlib.sha256(f"{type(module).__name__} {dtype} ".encode())
    digest.update(json.dumps(values, sort_keys=True, default=_plain).encode())
    for name, tensor in _tensors(module):
        digest.update(f" {name} {tensor.dtype} {tuple(tensor.shape)} ".encode())
        digest.update(_sums(tensor).tobytes())
    return digest.hexdigest()


def joined_digest(digests: list[str]) -> str:
    """Return the digest of a model split over ranks, from the ranks' digests in order."""
    return hashlib.sha256(" ".join(digests).encode()).hexdigest()


def _plain(value: Any) -> Any:
    """Convert a value for JSON. The order of a set differs between processes."""
    return sorted(map(str, value)) if isinstance(value, set | frozenset) else str(value)


def _tensors(module: Any) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield parameters, buffers and weights in codes by name; tied ones once."""
    found = [*module.named_parameters(), *module.named_buffers(), *coded_tensors(module)]
    yield from sorted(found, key=lambda item: item[0])


def _sums(tensor: torch.Tensor) -> Sums:
    """Return the sums of a tensor's pieces: [pieces] int64."""
    octets = tensor.detach().contiguous().view(-1).view(torch.uint8)
    whole = len(octets) // 4 * 4
    words = octets[:whole].view(torch.int32)
    if whole < len(octets):
        rest = torch.nn.functional.pad(octets[whole:], (0, whole + 4 - len(octets)))
        words = torch.cat((words, rest.view(torch.int32)))
    if len(words) % PIECE_WORDS:
        words = torch.nn.functional.pad(words, (0, -len(words) % PIECE_WORDS))
    pieces = words.view(len(words) // PIECE_WORDS, PIECE_WORDS)
    return _on_cpu(pieces.numpy()) if tensor.device.type == "cpu" else _on_device(pieces)


def _on_cpu(pieces: np.ndarray[Any, np.dtype[np.int32]]) -> Sums:
    """Sum piece by piece, so that the operands stay in the cache: 5 GB/s on one core."""
    weights = _weights(torch.device("cpu")).numpy()
    product, sums = np.empty(PIECE_WORDS, np.int64), np.empty(len(pieces), np.int64)
    for index, piece in enumerate(pieces):
        np.multiply(piece, weights, out=product)
        sums[index] = product.sum()
    return sums


def _on_device(pieces: torch.Tensor) -> Sums:
    """Sum pieces [pieces, PIECE_WORDS] int32 on the device, many per call."""
    weights = _weights(pieces.device)
    parts = [(part * weights).sum(1) for part in pieces.split(PIECES_AT_ONCE)]
    found: Sums = torch.cat(parts).cpu().numpy() if parts else np.empty(0, np.int64)
    return found


@functools.lru_cache
def _weights(device: torch.device) -> torch.Tensor:
    """Return the constant weights [PIECE_WORDS] int64, equal on every device and in every version."""
    rng = np.random.Generator(np.random.Philox(20261122))
    words = rng.integers(np.iinfo(np.int64).min, np.iinfo(np.int64).max, PIECE_WORDS, dtype=np.int64, endpoint=True)
    return torch.from_numpy(words | 1).to(device)
