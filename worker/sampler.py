"""Choosing tokens: greedy, or one draw per (request seed, number of tokens generated so far).

The draw. Philox4x32-10 (Salmon et al., "Parallel Random Numbers: As Easy as 1, 2, 3", SC 2011) turns the 64-bit seed
(its key) and the position (its counter) into 64 bits; SplitMix64 (Steele, Lea, Flood, OOPSLA 2014) seeded with those
gives each token id of the vocabulary a uniform u; the token with the largest logit / temperature - log(-log u) wins
(Gumbel-max: exactly a draw from the softmax). Integer arithmetic gives the same bits on every device, and neither
the batch nor the row enters, so a request draws the same wherever and however often it runs.

Why not one uniform and the inverse of the cumulative distribution: there a rounding difference in the logits of size
d moves every boundary, and flips the token with a probability that grows with the vocabulary in play; here only the
two best compete, and it stays near d. Requests that are recomputed after a crash depend on that.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from protocol.messages import RowStart

from .device import Device

MASK_32 = 0xFFFFFFFF
PHILOX_ROUNDS = 10
PHILOX_MULTIPLIERS = (0xD2511F53, 0xCD9E8D57)
PHILOX_WEYL = (0x9E3779B9, 0xBB67AE85)
NO_TOKEN = -1


def _signed(value: int) -> int:
    """The int64 with the bits of an unsigned 64-bit number."""
    return value - (1 << 64) if value >= 1 << 63 else value


SPLITMIX_GAMMA = _signed(0x9E3779B97F4A7C15)
SPLITMIX_MULTIPLIERS = (_signed(0xBF58476D1CE4E5B9), _signed(0x94D049BB133111EB))


def philox(counter: torch.Tensor, key: torch.Tensor) -> torch.Tensor:
    """Philox4x32-10. counter: [n, 4], key: [n, 2], result: [n, 4], int64 holding unsigned 32-bit words.

    The product of two words wraps in int64, which keeps all 64 bits; masks take the words out again.
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
    """Output number `index` (0 is the first) of SplitMix64 seeded with `state`; broadcasts; int64 bit patterns."""
    z = state + (index + 1) * SPLITMIX_GAMMA
    z = (z ^ _shift_right(z, 30)) * SPLITMIX_MULTIPLIERS[0]
    z = (z ^ _shift_right(z, 27)) * SPLITMIX_MULTIPLIERS[1]
    return z ^ _shift_right(z, 31)


def _shift_right(bits: torch.Tensor, count: int) -> torch.Tensor:
    """Logical shift: torch's >> on int64 drags the sign along."""
    return (bits >> count) & ((1 << (64 - count)) - 1)


def uniforms(seeds: torch.Tensor, positions: torch.Tensor, count: int) -> torch.Tensor:
    """`count` numbers in (0, 1) for each row: [n, count] float64 device, multiples of 2^-53 plus half of one.

    seeds: [n] int64 device, the bits of the unsigned 64-bit seeds. positions: [n] int64 device.
    """
    zero = torch.zeros_like(positions)
    counter = torch.stack((positions & MASK_32, _shift_right(positions, 32), zero, zero), dim=-1)
    key = torch.stack((seeds & MASK_32, _shift_right(seeds, 32)), dim=-1)
    words = philox(counter, key)
    state = words[:, 0] | (words[:, 1] << 32)
    index = torch.arange(count, device=seeds.device)
    bits = splitmix64(state[:, None], index[None])
    return (_shift_right(bits, 11).double() + 0.5) * 2.0**-53


@dataclass(frozen=True)
class SampledRows:
    """tokens: [n] int64 device. logprobs: [n] float32 device, log-softmax of the raw logits. finite: [n] bool device,
    False where a logit was NaN or infinite: token and log-probability of that row mean nothing.
    """

    tokens: torch.Tensor
    logprobs: torch.Tensor
    finite: torch.Tensor


class SamplingState:
    """Each slot's sampling parameters and progress, on the device. All tensors: [slots_max].

    temperature: float32, 0 is greedy. seed: int64, the bits of an unsigned 64-bit number. generated: int64, tokens
    the request has generated. last_token: int64, the one sampled last here, NO_TOKEN before the first.
    """

    def __init__(self, slots_max: int, device: Device) -> None:
        self._device = device
        where = device.torch_device
        self.temperature = torch.zeros(slots_max, dtype=torch.float32, device=where)
        self.seed = torch.zeros(slots_max, dtype=torch.int64, device=where)
        self.generated = torch.zeros(slots_max, dtype=torch.int64, device=where)
        self.last_token = torch.full((slots_max,), NO_TOKEN, dtype=torch.int64, device=where)

    def begin(self, starts: tuple[RowStart, ...]) -> None:
        """Slots change hands. Slots and values were checked by the caller; the last of equal slots counts."""
        latest = list({start.slot: start for start in starts}.values())
        if not latest:
            return
        where = self._device.torch_device
        slots = torch.tensor([start.slot for start in latest], device=where)
        self.temperature[slots] = torch.tensor([s.temperature for s in latest], dtype=torch.float32, device=where)
        self.seed[slots] = torch.tensor([_signed(s.seed) for s in latest], dtype=torch.int64, device=where)
        self.generated[slots] = torch.tensor([s.generated for s in latest], dtype=torch.int64, device=where)
        self.last_token[slots] = NO_TOKEN

    def sample(self, logits: torch.Tensor, slots: torch.Tensor, any_random: bool) -> SampledRows:
        """Chooses a token for each row and moves its slot on by one, unless the row's logits are not finite.

        logits: [n, vocab] float32 device, raw. slots: [n] int64 device, without repetition. any_random: whether any of
        the slots has a temperature above 0 (known to the host, so that the device need not be asked).
        """
        finite = torch.isfinite(logits.sum(dim=-1))  # one NaN or infinity makes the sum one
        scores = self._perturb(logits, slots) if any_random else logits
        tokens = torch.argmax(scores, dim=-1)  # the first of equal values: the lowest id wins a tie
        chosen = logits.gather(1, tokens[:, None]).squeeze(1)
        logprobs = chosen - torch.logsumexp(logits, dim=-1)
        self.last_token[slots] = torch.where(finite, tokens, self.last_token[slots])
        self.generated[slots] += finite.long()
        return SampledRows(tokens, logprobs, finite)

    def _perturb(self, logits: torch.Tensor, slots: torch.Tensor) -> torch.Tensor:
        """Tempered logits plus Gumbel noise where the temperature is above 0, else the logits: [n, vocab] float64."""
        temperature = self.temperature[slots].double()[:, None]
        greedy = temperature == 0
        tempered = logits.double() / torch.where(greedy, torch.ones_like(temperature), temperature)
        noise = uniforms(self.seed[slots], self.generated[slots], logits.shape[1]).log_().neg_().log_().neg_()
        return tempered + noise.masked_fill_(greedy, 0.0)
