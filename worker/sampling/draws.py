"""Reproducible uniform numbers: one row per (request seed, number of tokens generated so far).

Philox4x32-10 (Salmon et al., "Parallel Random Numbers: As Easy as 1, 2, 3", SC 2011) turns the 64-bit seed (its key)
and the position (its counter) into 64 bits. SplitMix64 (Steele, Lea, Flood, OOPSLA 2014), seeded with those, gives each
token id of the vocabulary its number. Integer arithmetic gives the same bits on every device.
"""

from __future__ import annotations

import torch

from kvforge.worker import random_constants
from kvforge.worker.random_constants import PHILOX_MULTIPLIERS, PHILOX_ROUNDS, PHILOX_WEYL

MASK_32 = 0xFFFFFFFF


def signed(value: int) -> int:
    """Return the int64 with the bits of an unsigned 64-bit number."""
    return value - (1 << 64) if value >= 1 << 63 else value


SPLITMIX_GAMMA = signed(random_constants.SPLITMIX_GAMMA)
SPLITMIX_MULTIPLIERS = tuple(map(signed, random_constants.SPLITMIX_MULTIPLIERS))


def philox(counter: torch.Tensor, key: torch.Tensor) -> torch.Tensor:
    """Compute Philox4x32-10.

    The product of two words wraps in int64, which keeps all 64 bits; masks extract the words.

    Args:
        counter: [n, 4] int64 holding unsigned 32-bit words.
        key: [n, 2], likewise.

    Returns:
        [n, 4], likewise.
    """
    c0, c1, c2, c3 = counter.unbind(-1)
    k0, k1 = key.unbind(-1)
    for _ in range(PHILOX_ROUNDS):
        product_0, product_1 = c0 * PHILOX_MULTIPLIERS[0], c2 * PHILOX_MULTIPLIERS[1]
        c0, c1, c2, c3 = (
            ((product_1 >> 32) & MASK_32) ^ c1 ^ k0,
            product_1 & MASK_32,
            ((product_0 >> 32) & MASK_32) ^ c3 ^ k1,
            product_0 & MASK_32,
        )
        k0, k1 = (k0 + PHILOX_WEYL[0]) & MASK_32, (k1 + PHILOX_WEYL[1]) & MASK_32
    return torch.stack((c0, c1, c2, c3), dim=-1)


def splitmix64(state: torch.Tensor, index: torch.Tensor) -> torch.Tensor:
    """Return output number `index` (from 0) of SplitMix64 seeded with `state`; broadcasts; int64 bit patterns."""
    z = state + (index + 1) * SPLITMIX_GAMMA
    z = (z ^ _shift_right(z, 30)) * SPLITMIX_MULTIPLIERS[0]
    z = (z ^ _shift_right(z, 27)) * SPLITMIX_MULTIPLIERS[1]
    return z ^ _shift_right(z, 31)


def _shift_right(bits: torch.Tensor, count: int) -> torch.Tensor:
    """Shift logically: torch's >> on int64 is arithmetic."""
    return (bits >> count) & ((1 << (64 - count)) - 1)


def uniforms(seeds: torch.Tensor, positions: torch.Tensor, count: int) -> torch.Tensor:
    """Return `count` numbers in (0, 1) for each row.

    Args:
        seeds: [n] int64 on the device, the bits of the unsigned 64-bit seeds.
        positions: [n] int64 on the device.
        count: Numbers per row.

    Returns:
        [n, count] float64 on the device, multiples of 2^-53 plus half of one.
    """
    zero = torch.zeros_like(positions)
    counter = torch.stack((positions & MASK_32, _shift_right(positions, 32), zero, zero), dim=-1)
    key = torch.stack((seeds & MASK_32, _shift_right(seeds, 32)), dim=-1)
    words = philox(counter, key)
    state = words[:, 0] | (words[:, 1] << 32)
    index = torch.arange(count, device=seeds.device)
    bits = splitmix64(state[:, None], index[None])
    return (_shift_right(bits, 11).double() + 0.5) * 2.0**-53
