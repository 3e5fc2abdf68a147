"""Choosing tokens: greedy, or one draw per (request seed, number of tokens generated so far).

The draw. `draws.uniforms` gives each token id of the vocabulary a uniform u; the token with the largest
logit / temperature - log(-log u) wins (Gumbel-max: exactly a draw from the softmax). Neither the batch nor the row
enters, so a request draws the same wherever and however often it runs.

Why not one uniform and the inverse of the cumulative distribution: there a rounding difference in the logits of size
d moves every boundary, and flips the token with a probability that grows with the vocabulary in play; here only the
two best compete, and it stays near d. Requests that are recomputed after a crash depend on that.

What a row pays for: rows that are greedy and unpenalised take an argmax and nothing else; only random rows draw; only
rows with top_k or top_p look for their most likely tokens.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from kvforge.protocol.messages import NO_FLOAT32, NO_INT32, Float32Array, Int32Array, RowStart, Sampling
from worker.device.device import Device
from worker.device.targets import current_target

from .draws import signed, uniforms
from .filters import log_normaliser, min_p_mask, most_likely_mask, top_logprobs
from .penalties import LogitBias, PenaltyCounts

NO_TOKEN = -1
COLUMNS = ("temperature", "top_k", "top_p", "min_p", "repetition_penalty", "presence_penalty", "frequency_penalty")
TEMPERATURE, TOP_P, MIN_P = (COLUMNS.index(name) for name in ("temperature", "top_p", "min_p"))
PENALTIES = slice(COLUMNS.index("repetition_penalty"), COLUMNS.index("frequency_penalty") + 1)
assert TEMPERATURE == 0, "the kernels read it there"
WORD_BITS = 32  # of a mask
# A sampled row travels to the host as three int32: the token, the bits of the log-probability, and these flags.
FINITE, BANNED = 1, 2


@dataclass(frozen=True)
class SampledRows:
    """tokens: [n] int64 device. logprobs: [n] float32 device, of the raw distribution, nats. finite: [n] bool device,
    False where a logit was NaN or infinite. banned: [n] bool device, True where logit_bias leaves no token, or None
    where no row has any. Token and log-probability of a row that is not finite or is banned mean nothing.

    tops: None where no row wants any, else (counts [n] int64 host, tokens, logprobs [n, widest] device), the most
    likely first; row r has counts[r] of them.
    """

    tokens: torch.Tensor
    logprobs: torch.Tensor
    finite: torch.Tensor
    banned: torch.Tensor | None
    tops: tuple[npt.NDArray[np.int64], torch.Tensor, torch.Tensor] | None

    @property
    def top_counts(self) -> Int32Array:
        """How many of its most likely tokens each row wants: [n] int32 host."""
        return np.zeros(len(self.tokens), np.int32) if self.tops is None else self.tops[0].astype(np.int32)

    def packed(self) -> torch.Tensor:
        """All of it in one copy for the host: [any] int32 device, as `HostRows.unpacked` reads it."""
        flags = self.finite.int() * FINITE
        if self.banned is not None:
            flags += self.banned.int() * BANNED
        parts = [self.tokens.int(), self.logprobs.view(torch.int32), flags]
        if self.tops is not None:
            parts += [self.tops[1].int().flatten(), self.tops[2].view(torch.int32).flatten()]
        return torch.cat(parts)

    def to_host(self) -> HostRows:
        """The same in host memory. Waits for the device."""
        return HostRows.unpacked(self.packed().cpu().numpy(), self.top_counts)


@dataclass(frozen=True)
class HostRows:
    """SampledRows on the host: [n] each; top_tokens, top_logprobs: [n, widest]."""

    tokens: Int32Array
    logprobs: Float32Array
    finite: npt.NDArray[np.bool_]
    banned: npt.NDArray[np.bool_]
    top_counts: Int32Array
    top_tokens: Int32Array
    top_logprobs: Float32Array

    @staticmethod
    def unpacked(packed: Int32Array, top_counts: Int32Array) -> HostRows:
        """What `SampledRows.packed` packed."""
        rows = len(top_counts)
        widest = (len(packed) // rows - 3) // 2 if rows else 0
        tokens, logprobs, flags = packed[: 3 * rows].reshape(3, rows)
        tops = packed[3 * rows :].reshape(2, rows, widest)
        return HostRows(
            tokens,
            logprobs.view(np.float32),
            (flags & FINITE) != 0,
            (flags & BANNED) != 0,
            top_counts,
            tops[0],
            tops[1].view(np.float32),
        )

    @staticmethod
    def joined(parts: list[HostRows]) -> HostRows:
        """All rows of the parts."""
        if len(parts) == 1:
            return parts[0]
        widest = max(part.top_tokens.shape[1] for part in parts)

        def padded(array: npt.NDArray[Any]) -> npt.NDArray[Any]:
            return np.pad(array, ((0, 0), (0, widest - array.shape[1])))

        return HostRows(
            np.concatenate([part.tokens for part in parts]),
            np.concatenate([part.logprobs for part in parts]),
            np.concatenate([part.finite for part in parts]),
            np.concatenate([part.banned for part in parts]),
            np.concatenate([part.top_counts for part in parts]),
            np.concatenate([padded(part.top_tokens) for part in parts]),
            np.concatenate([padded(part.top_logprobs) for part in parts]),
        )

    def tops_of(self, rows: npt.NDArray[np.integer]) -> tuple[Int32Array, Int32Array, Float32Array]:
        """top_counts, top_tokens and top_logprobs of these rows as StepResult has them."""
        counts = self.top_counts[rows]
        if not counts.any():
            return NO_INT32, NO_INT32, NO_FLOAT32
        held = np.arange(self.top_tokens.shape[1]) < counts[:, None]
        return counts, self.top_tokens[rows][held], self.top_logprobs[rows][held]


class SamplingState:
    """Each slot's sampling parameters and progress.

    On the device: values [slots_max, COLUMNS] float64; seed [slots_max] int64, the bits of an
    unsigned 64-bit number; generated [slots_max] int64, tokens the request has generated; last_token [slots_max]
    int64, the one sampled last here, NO_TOKEN before the first. Each has one place more, slot `slots_max`: captured
    graphs let the rows that only fill them up write there. On the host, so that the device need not be asked: which
    slots are random, filtered and so on.
    """

    def __init__(self, slots_max: int, vocab_size: int, device: Device) -> None:
        self._device, self.vocab_size = device, vocab_size
        self.runs_kernels = device.runs_kernels
        self._host_kernels = not self.runs_kernels and not device.host_kernels_problem
        self.overlap = self.runs_kernels and current_target(device).chained
        where = device.torch_device
        self.slots_max = slots_max
        self.values = torch.zeros((slots_max + 1, len(COLUMNS)), dtype=torch.float64, device=where)
        self.seed = torch.zeros(slots_max + 1, dtype=torch.int64, device=where)
        self.generated = torch.zeros(slots_max + 1, dtype=torch.int64, device=where)
        self.last_token = torch.full((slots_max + 1,), NO_TOKEN, dtype=torch.int64, device=where)
        self.counts = PenaltyCounts(slots_max, vocab_size, device)
        self._bias = LogitBias(slots_max, device)
        self._random = np.zeros(slots_max, np.bool_)
        self._min_p = np.zeros(slots_max, np.bool_)
        self._nucleus = np.zeros(slots_max, np.bool_)
        self._top_k = np.zeros(slots_max, np.int64)
        self._tops = np.zeros(slots_max, np.int64)
        self._plain = np.ones(slots_max, np.bool_)
        self._simple = np.ones(slots_max, np.bool_)
        self._started: dict[int, RowStart] = {}

    def begin(self, start: RowStart, prompt: Int32Array = NO_INT32, generated: Int32Array = NO_INT32) -> None:
        """A slot changes hands; `upload_starts` must follow. The start was checked by the caller.

        prompt, generated: the tokens that penalties count, [any] int32 host. Errors: what torch raises without memory.
        """
        sampling = start.sampling
        if sampling.penalises:
            self.counts.begin(start.slot, prompt, generated)
        else:
            self.counts.forget(start.slot)
        self._bias.begin(start.slot, sampling.logit_bias)
        self._remember(start.slot, sampling)
        self._started[start.slot] = start

    def upload_starts(self) -> None:
        """What `begin` was told reaches the device; the last of equal slots counts."""
        if not self._started:
            return
        starts, upload = list(self._started.values()), self._device.upload
        self._started = {}
        slots = upload(np.array([start.slot for start in starts], np.int64))
        self.values[slots] = upload(np.array([_columns(start.sampling) for start in starts]))
        self.seed[slots] = upload(np.array([signed(start.seed) for start in starts], np.int64))
        self.generated[slots] = upload(np.array([start.generated for start in starts], np.int64))
        self.last_token[slots] = NO_TOKEN

    def _remember(self, slot: int, sampling: Sampling) -> None:
        self._random[slot] = _columns(sampling)[0] > 0
        self._min_p[slot] = sampling.min_p > 0
        self._nucleus[slot] = sampling.top_p < 1
        self._top_k[slot] = sampling.top_k if sampling.top_k < self.vocab_size else 0
        self._tops[slot] = sampling.logprobs
        filtered = self._min_p[slot] or self._nucleus[slot] or self._top_k[slot]
        special = filtered if self.splits else self._random[slot]
        self._plain[slot] = not (special or sampling.penalises or sampling.logit_bias or sampling.logprobs)
        self._simple[slot] = self._plain[slot] and sampling.grammar is None

    @property
    def splits(self) -> bool:
        """Whether simple rows are always chosen for by `sample_simple`, so that a row goes one way whatever is beside
        it: two ways may differ in the last bit of a log-probability."""
        return self.runs_kernels or self._host_kernels

    def simple(self, slots: npt.NDArray[np.integer]) -> npt.NDArray[np.bool_]:
        """Which of the slots `sample_simple` can do: those that are greedy, and with kernels also those that draw from
        the whole vocabulary, where no logit is shifted and no other token told. [n] bool. Whatever else a request may
        ask must be named where it begins (`_remember`): nothing looks at it on the fast path."""
        return self._simple[slots]

    def plain(self, slots: npt.NDArray[np.integer]) -> npt.NDArray[np.bool_]:
        """The same, where a grammar may be asked too: `sample_simple` can do them with a mask. [n] bool."""
        return self._plain[slots]

    def sample(
        self, logits: torch.Tensor, slots: npt.NDArray[np.integer], masks: torch.Tensor | None = None
    ) -> SampledRows:
        """Chooses a token for each row and moves its slot on by one, unless the row is not finite or all banned.

        logits: [n, vocab] float32 device, raw. slots: [n] host, without repetition. masks: [n, words] int32 device, bit
        t % 32 of word t // 32 for each token t that may be chosen, at least one a row; None: all may. Errors: what
        torch raises; then no slot has moved.
        """
        on_device = self._device.upload(slots.astype(np.int64))
        good = finite = torch.isfinite(logits.sum(dim=-1))  # one NaN or infinity makes the sum one
        scores, banned = self._adjusted(logits, slots, on_device, masks)
        if banned is not None:
            good = finite & ~banned
        tokens = torch.argmax(scores, dim=-1)  # the first of equal values: the lowest id wins a tie
        drawn = np.flatnonzero(self._random[slots])
        if len(drawn) == len(slots):
            tokens = self._draw(scores, slots, on_device)
        elif len(drawn):
            rows = self._device.upload(drawn)
            tokens[rows] = self._draw(scores[rows], slots[drawn], on_device[rows])
        normaliser = log_normaliser(logits)
        logprobs = (logits.gather(1, tokens[:, None]).squeeze(1).double() - normaliser).float()
        tops = self._most_likely(logits, normaliser, slots)
        self.counts.add(slots, tokens, good)
        self.move(on_device, tokens, good)
        return SampledRows(tokens, logprobs, finite, banned, tops)

    def feed(self, packed: torch.Tensor) -> torch.Tensor:
        """[4, n] int32 device (token, slot, any, any) as int64, where tokens below 0 have become the slot's last one.

        Where it has none, which a step that fails may leave behind: token 0. That row will fail with the step.
        """
        if self.runs_kernels:
            from .kernels import feed_tokens  # imports triton

            return feed_tokens(packed, self.last_token)
        fed = packed.long()
        tokens, slots = fed[0], fed[1]
        fed[0] = torch.where(tokens < 0, self.last_token[slots].clamp_(min=0), tokens)
        return fed

    def sample_simple(
        self,
        logits: torch.Tensor,
        slots: torch.Tensor,
        wanted: torch.Tensor,
        packed: torch.Tensor,
        masks: torch.Tensor | None = None,
    ) -> None:
        """As `sample` for simple slots (with masks: plain ones), all on the device, so that it can be captured in a
        graph.

        logits: [n, vocab] float32 device. slots: [n] int64 device; only slot `slots_max` may be named twice. wanted:
        [n] int64 device, 0: the slot does not move. packed: gets the result, [3 * n] int32 device, as
        `SampledRows.packed`.
        """
        if self.runs_kernels:
            from .kernels import choose_tokens

            state = (self.values, self.seed, self.generated, self.last_token)
            choose_tokens(logits, slots, wanted, *state, packed, self.overlap, masks)
            return
        if self._host_kernels:
            from . import host  # imports numba

            state = (self.values, self.seed, self.generated, self.last_token)
            host.choose_tokens(logits, slots, wanted, *state, packed, masks)
            return
        finite = torch.isfinite(logits.sum(dim=-1))
        scores = logits if masks is None else logits.masked_fill(~unpacked(masks, logits.shape[1]), -torch.inf)
        tokens = torch.argmax(scores, dim=-1)
        logprobs = (logits.gather(1, tokens[:, None]).squeeze(1).double() - log_normaliser(logits)).float()
        self.move(slots, tokens, finite & (wanted != 0))
        packed.copy_(SampledRows(tokens, logprobs, finite, None, None).packed())

    def move(self, slots: torch.Tensor, tokens: torch.Tensor, good: torch.Tensor) -> None:
        """The slots have sampled these tokens, where `good`. [n] int64, int64, bool device."""
        self.last_token[slots] = torch.where(good, tokens, self.last_token[slots])
        self.generated[slots] += good.long()

    def _adjusted(
        self,
        logits: torch.Tensor,
        slots: npt.NDArray[np.integer],
        on_device: torch.Tensor,
        masks: torch.Tensor | None,
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Logits after bias, penalties and masks, [n, vocab]: as they are where no row has any, float64 after the first
        two. Which rows are banned, [n] bool, where any has a bias."""
        penalised, biased = self.counts.holds(slots), self._bias.holds(slots)
        refused = None if masks is None else ~unpacked(masks, logits.shape[1])
        if not (penalised.any() or biased.any()):
            return logits if refused is None else logits.masked_fill(refused, -torch.inf), None
        scores = logits.double()
        if refused is not None:
            scores.masked_fill_(refused, -torch.inf)
        banned = None
        if biased.any():
            self._bias.apply(scores, slots)
            banned = scores.amax(dim=-1) == -torch.inf
        rows = np.flatnonzero(penalised)
        if len(rows):
            of = self._device.upload(rows)
            self.counts.apply(scores, slots[rows], of, self.values[on_device[of]][:, PENALTIES])
        return scores, banned

    def _draw(self, scores: torch.Tensor, slots: npt.NDArray[np.integer], on_device: torch.Tensor) -> torch.Tensor:
        """One draw for each row: [n] int64. scores: [n, vocab] after bias and penalties; every temperature above 0."""
        values, vocab = self.values[on_device], scores.shape[1]
        tempered = scores.double() / values[:, TEMPERATURE, None]
        top_k, nucleus = np.minimum(self._top_k[slots], vocab), self._nucleus[slots]
        for group in (np.flatnonzero(top_k), np.flatnonzero(nucleus & (top_k == 0))):
            if len(group):  # those with top_k need no more than k ordered, the others all
                rows = self._device.upload(group)
                width = int(top_k[group].max()) or vocab
                keep = most_likely_mask(tempered[rows], self._device.upload(top_k[group]), values[rows, TOP_P], width)
                tempered[rows] = tempered[rows].masked_fill_(~keep, -torch.inf)
        group = np.flatnonzero(self._min_p[slots])
        if len(group):
            rows = self._device.upload(group)
            tempered[rows] = tempered[rows].masked_fill_(~min_p_mask(tempered[rows], values[rows, MIN_P]), -torch.inf)
        seeds, positions = self.seed[on_device], self.generated[on_device]
        if self._host_kernels:
            from . import host

            return host.draw_tokens(tempered, seeds, positions)
        uniform = uniforms(seeds, positions, vocab)
        return torch.argmax(tempered.sub_(uniform.log_().neg_().log_()), dim=-1)

    def _most_likely(
        self, logits: torch.Tensor, normaliser: torch.Tensor, slots: npt.NDArray[np.integer]
    ) -> tuple[npt.NDArray[np.int64], torch.Tensor, torch.Tensor] | None:
        counts = np.minimum(self._tops[slots], logits.shape[1])
        wanting = np.flatnonzero(counts)
        if not len(wanting):
            return None
        rows = self._device.upload(wanting)
        tokens, logprobs = top_logprobs(logits[rows], normaliser[rows], int(counts.max()))
        if len(wanting) == len(slots):
            return counts, tokens, logprobs
        shape = (len(slots), tokens.shape[1])
        every_token = torch.zeros(shape, dtype=tokens.dtype, device=tokens.device)
        every_logprob = torch.zeros(shape, dtype=logprobs.dtype, device=logprobs.device)
        every_token[rows], every_logprob[rows] = tokens, logprobs
        return counts, every_token, every_logprob


def unpacked(masks: torch.Tensor, vocab: int) -> torch.Tensor:
    """A bool for each bit: [n, vocab] device. masks: [n, words] int32 device."""
    places = torch.arange(WORD_BITS, dtype=torch.int32, device=masks.device)
    return ((masks[:, :, None] >> places) & 1).bool().flatten(1)[:, :vocab]


def _columns(sampling: Sampling) -> list[float]:
    """The numbers of COLUMNS. A temperature below the smallest float32 is 0: dividing by it would overflow."""
    values = [float(getattr(sampling, name)) for name in COLUMNS]
    values[TEMPERATURE] = float(np.float32(values[TEMPERATURE]))
    return values
