"""Sampling: greedy, or one draw per (request seed, number of tokens generated so far).

`draws.uniforms` gives each token id of the vocabulary a uniform u. The token with the largest
logit / temperature - log(-log u) wins (Gumbel-max: exactly a draw from the softmax). The draw depends neither on the
batch nor on the row, so a request draws the same tokens wherever and however often it runs.

The alternative is one uniform and the inverse of the cumulative distribution. A rounding difference of size d in the
logits would then move every boundary and flip the token with a probability that grows with the vocabulary. With
Gumbel-max only the two best tokens compete, and the probability stays near d. Requests recomputed after a crash depend
on that.

Each row pays only for what it uses: greedy rows without penalties take an argmax, only random rows draw, and only rows
with top_k or top_p search for their most likely tokens.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from kvforge.protocol.messages import NO_FLOAT32, NO_INT32, Float32Array, Int32Array, RowStart, SamplingParams
from kvforge.worker.device.device import Device
from kvforge.worker.device.targets import current_target
from kvforge.worker.wanted import ADVANCES, AHEAD

from .ahead import AheadRows
from .draws import signed, uniforms
from .filters import log_normaliser, min_p_mask, most_likely_mask, top_logprobs
from .penalties import LogitBias, PenaltyCounts

NO_TOKEN = -1
COLUMNS = ("temperature", "top_k", "top_p", "min_p", "repetition_penalty", "presence_penalty", "frequency_penalty")
TEMPERATURE, TOP_P, MIN_P = (COLUMNS.index(name) for name in ("temperature", "top_p", "min_p"))
PENALTIES = slice(COLUMNS.index("repetition_penalty"), COLUMNS.index("frequency_penalty") + 1)
assert TEMPERATURE == 0, "the kernels expect the temperature in column 0"
WORD_BITS = 32  # of a mask
# A sampled row is sent to the host as three int32: token, bits of the log-probability, and these flags.
FINITE, BANNED = 1, 2


@dataclass(frozen=True)
class SampledRows:
    """Sampled rows on the device. Token and log-probability are undefined for rows that are not finite or are banned.

    Attributes:
        tokens: [n] int64.
        logprobs: [n] float32, of the raw distribution, nats.
        finite: [n] bool, False if a logit was NaN or infinite.
        banned: [n] bool, True if logit_bias bans every token; None if no row has biases.
        top_logprobs: None if no row wants top log-probabilities; else (counts [n] int64 on the host, tokens and
            logprobs [n, widest] on the device), the most likely first; row r has counts[r] entries.
    """

    tokens: torch.Tensor
    logprobs: torch.Tensor
    finite: torch.Tensor
    banned: torch.Tensor | None
    top_logprobs: tuple[npt.NDArray[np.int64], torch.Tensor, torch.Tensor] | None

    @property
    def top_counts(self) -> Int32Array:
        """Number of top log-probabilities that each row wants: [n] int32 on the host."""
        return (
            np.zeros(len(self.tokens), np.int32) if self.top_logprobs is None else self.top_logprobs[0].astype(np.int32)
        )

    def packed(self) -> torch.Tensor:
        """Pack all results for one copy to the host: [any] int32 on the device, read by `HostRows.unpacked`."""
        flags = self.finite.int() * FINITE
        if self.banned is not None:
            flags += self.banned.int() * BANNED
        parts = [self.tokens.int(), self.logprobs.view(torch.int32), flags]
        if self.top_logprobs is not None:
            parts += [self.top_logprobs[1].int().flatten(), self.top_logprobs[2].view(torch.int32).flatten()]
        return torch.cat(parts)

    def to_host(self) -> HostRows:
        """Copy the results to the host. Wait for the device."""
        return HostRows.unpacked(self.packed().cpu().numpy(), self.top_counts)


@dataclass(frozen=True)
class HostRows:
    """SampledRows on the host: arrays of [n], and top_tokens and top_logprobs of [n, widest]."""

    tokens: Int32Array
    logprobs: Float32Array
    finite: npt.NDArray[np.bool_]
    banned: npt.NDArray[np.bool_]
    top_counts: Int32Array
    top_tokens: Int32Array
    top_logprobs: Float32Array

    @staticmethod
    def unpacked(packed: Int32Array, top_counts: Int32Array) -> HostRows:
        """Unpack the result of `SampledRows.packed`."""
        rows = len(top_counts)
        widest = (len(packed) // rows - 3) // 2 if rows else 0
        tokens, logprobs, flags = packed[: 3 * rows].reshape(3, rows)
        most_likely = packed[3 * rows :].reshape(2, rows, widest)
        return HostRows(
            tokens,
            logprobs.view(np.float32),
            (flags & FINITE) != 0,
            (flags & BANNED) != 0,
            top_counts,
            most_likely[0],
            most_likely[1].view(np.float32),
        )

    @staticmethod
    def joined(parts: list[HostRows]) -> HostRows:
        """Concatenate the rows of the parts."""
        if len(parts) == 1:
            return parts[0]
        widest = max(part.top_tokens.shape[1] for part in parts)

        def padded(array: npt.NDArray[Any]) -> npt.NDArray[Any]:
            missing = widest - array.shape[1]
            return np.pad(array, ((0, 0), (0, missing))) if missing else array

        return HostRows(
            np.concatenate([part.tokens for part in parts]),
            np.concatenate([part.logprobs for part in parts]),
            np.concatenate([part.finite for part in parts]),
            np.concatenate([part.banned for part in parts]),
            np.concatenate([part.top_counts for part in parts]),
            np.concatenate([padded(part.top_tokens) for part in parts]),
            np.concatenate([padded(part.top_logprobs) for part in parts]),
        )

    def pick(self, rows: npt.NDArray[np.integer]) -> HostRows:
        """Return the rows at these indices."""
        return HostRows(
            self.tokens[rows],
            self.logprobs[rows],
            self.finite[rows],
            self.banned[rows],
            self.top_counts[rows],
            self.top_tokens[rows],
            self.top_logprobs[rows],
        )

    def top_logprobs_of(self, rows: npt.NDArray[np.integer]) -> tuple[Int32Array, Int32Array, Float32Array]:
        """Return top_counts, top_tokens and top_logprobs of these rows in the format of StepResult."""
        counts = self.top_counts[rows]
        if not counts.any():
            return NO_INT32, NO_INT32, NO_FLOAT32
        held = np.arange(self.top_tokens.shape[1]) < counts[:, None]
        return counts, self.top_tokens[rows][held], self.top_logprobs[rows][held]


class SamplingState:
    """Sampling parameters and progress of each slot.

    The device holds `values` [slots_max, COLUMNS] float64; `seed` [slots_max] int64, the bits of an unsigned number;
    `generated` [slots_max] int64, tokens that the request has generated; `last_token` [slots_max] int64, the last token
    sampled here, NO_TOKEN before the first. Each has one extra entry, slot `slots_max`, for the padding rows of
    captured graphs. The host keeps flags (random, filtered and so on), so that no call has to read from the device.
    """

    def __init__(self, slots_max: int, vocab_size: int, device: Device) -> None:
        self._device, self.vocab_size = device, vocab_size
        self.runs_kernels = device.runs_kernels
        self._cpu_kernels = not self.runs_kernels and not device.cpu_kernels_problem
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
        """Assign a slot to a new request; `upload_starts` must follow. The caller has validated the start.

        Args:
            start: The slot's new sampling parameters.
            prompt: [any] int32 on the host, tokens of the prompt that penalties count.
            generated: [any] int32 on the host, tokens of the answer that penalties count.

        Raises:
            RuntimeError: torch is out of memory.
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
        """Copy the starts since the last call to the device; the last start of a slot counts."""
        if not self._started:
            return
        starts, upload = list(self._started.values()), self._device.upload
        self._started = {}
        slots = upload(np.array([start.slot for start in starts], np.int64))
        self.values[slots] = upload(np.array([_columns(start.sampling) for start in starts]))
        self.seed[slots] = upload(np.array([signed(start.seed) for start in starts], np.int64))
        self.generated[slots] = upload(np.array([start.generated for start in starts], np.int64))
        self.last_token[slots] = NO_TOKEN

    def _remember(self, slot: int, sampling: SamplingParams) -> None:
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
        """Whether simple rows always use `sample_simple`.

        Then a row takes the same path in every batch; two paths may differ in the last bit of a log-probability.
        """
        return self.runs_kernels or self._cpu_kernels

    def simple(self, slots: npt.NDArray[np.integer]) -> npt.NDArray[np.bool_]:
        """Return a mask [n] of the slots that `sample_simple` can handle.

        These are greedy slots, and with kernels also slots that draw from the whole vocabulary, without adjusted
        logits or top log-probabilities. The fast path ignores every other parameter, so `_remember` must know each
        parameter of a request.
        """
        return self._simple[slots]

    def plain(self, slots: npt.NDArray[np.integer]) -> npt.NDArray[np.bool_]:
        """Return a mask [n] of the slots that `sample_simple` can handle with a token mask, if they have a grammar."""
        return self._plain[slots]

    def sample(
        self,
        logits: torch.Tensor,
        slots: npt.NDArray[np.integer],
        masks: torch.Tensor | None = None,
        ahead: AheadRows | None = None,
    ) -> SampledRows:
        """Sample a token for each row and advance its slot, unless the row is not finite or all tokens are banned.

        Args:
            logits: [n, vocab] float32 on the device, raw.
            slots: [n] on the host, without repetition unless `ahead` is given.
            masks: [n, words] int32 on the device: bit t % 32 of word t // 32 allows token t, at least one per row;
                None: all tokens are allowed.
            ahead: The rows, if they sample behind drafts: then no slot advances until `advance`.

        Returns:
            The sampled rows.

        Raises:
            RuntimeError: torch failed; no slot has advanced.
        """
        on_device = self._device.upload(slots.astype(np.int64))
        good = finite = torch.isfinite(logits.sum(dim=-1))  # one NaN or infinity makes the sum one
        scores, banned = self._adjusted(logits, slots, on_device, masks, ahead)
        if banned is not None:
            good = finite & ~banned
        tokens = torch.argmax(scores, dim=-1)  # the first of equal values: the lowest id wins a tie
        positions = self._positions(on_device, ahead)
        drawn = np.flatnonzero(self._random[slots])
        if len(drawn) == len(slots):
            tokens = self._draw(scores, slots, on_device, positions)
        elif len(drawn):
            rows = self._device.upload(drawn)
            tokens[rows] = self._draw(scores[rows], slots[drawn], on_device[rows], positions[rows])
        normaliser = log_normaliser(logits)
        logprobs = (logits.gather(1, tokens[:, None]).squeeze(1).double() - normaliser).float()
        most_likely = self._most_likely(logits, normaliser, slots)
        if ahead is None:
            self.counts.add(slots, tokens, good)
            self.move(on_device, tokens, good)
        return SampledRows(tokens, logprobs, finite, banned, most_likely)

    def feed(self, packed: torch.Tensor) -> torch.Tensor:
        """Convert inputs [4, n] int32 (token, slot, any, any) to int64; tokens below 0 become the slot's last one.

        A failed step may leave a slot without a last token. Its token becomes 0, and the row will fail with the step.
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
        """Sample for simple slots (with masks: plain slots) entirely on the device, for capture in a graph.

        Args:
            logits: [n, vocab] float32 on the device.
            slots: [n] int64 on the device. Rows that advance a slot are its only ones; slot `slots_max` is padding.
            wanted: [n] int64 on the device; ADVANCES, or AHEAD + the drafts that the row is behind, or 0. Only
                ADVANCES advances the slot.
            packed: [3 * n] int32 on the device, receives the result in the format of `SampledRows.packed`.
            masks: As in `sample`.
        """
        if self.splits:
            state = (self.values, self.seed, self.generated, self.last_token)
            self._choose_by_kernels(logits, slots, wanted, state, packed, masks)
            return
        finite = torch.isfinite(logits.sum(dim=-1))
        scores = logits if masks is None else logits.masked_fill(~unpacked(masks, logits.shape[1]), -torch.inf)
        tokens = torch.argmax(scores, dim=-1)
        logprobs = (logits.gather(1, tokens[:, None]).squeeze(1).double() - log_normaliser(logits)).float()
        self.move(slots, tokens, finite & (wanted == ADVANCES))
        packed.copy_(SampledRows(tokens, logprobs, finite, None, None).packed())

    def sample_ahead(
        self, logits: torch.Tensor, ahead: AheadRows, packed: torch.Tensor, masks: torch.Tensor | None = None
    ) -> None:
        """Do what `sample_simple` does for rows behind drafts, with kernels: no slot advances until `advance`.

        Args:
            logits: [n, vocab] float32 on the device.
            ahead: The rows, of simple slots (with masks: plain slots).
            packed: As in `sample_simple`.
            masks: As in `sample`.
        """
        assert self.splits, "only kernels sample by another path than `sample`"
        slots, wanted = self._device.upload(np.stack([ahead.slots, AHEAD + ahead.offsets]).astype(np.int64))
        self.sample_simple(logits, slots, wanted, packed, masks)

    def advance(self, slots: npt.NDArray[np.integer], tokens: npt.NDArray[np.integer]) -> None:
        """Advance slots by the accepted tokens of rows that sampled ahead.

        Args:
            slots: [n] on the host; the rows of a slot lie together.
            tokens: [n] on the host, in the order of the answer.

        Raises:
            RuntimeError: torch failed.
        """
        upload = self._device.upload  # once for all three: the next step waits for this
        last = np.append(slots[1:] != slots[:-1], True)
        counts = np.diff(np.append(-1, np.flatnonzero(last)))
        on_device, tokens_on_device, more = upload(np.stack([slots[last], tokens[last], counts]).astype(np.int64))
        self.last_token[on_device] = tokens_on_device
        self.generated.index_add_(0, on_device, more)
        self.counts.add_accepted(slots, tokens)

    def _positions(self, slots: torch.Tensor, ahead: AheadRows | None) -> torch.Tensor:
        """Return the number of tokens before each row's draw: [n] int64 on the device."""
        generated = self.generated[slots]
        return generated if ahead is None else generated + self._device.upload(ahead.offsets.astype(np.int64))

    def _choose_by_kernels(
        self,
        logits: torch.Tensor,
        slots: torch.Tensor,
        wanted: torch.Tensor,
        state: tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor],
        packed: torch.Tensor,
        masks: torch.Tensor | None,
    ) -> None:
        """Sample by the kernels; `state` holds values, seeds, generated and last tokens by slot."""
        if self.runs_kernels:
            from .kernels import choose_tokens

            choose_tokens(logits, slots, wanted, *state, packed, self.overlap, masks)
        else:
            from kvforge.worker.cpu import sampling as cpu_sampling  # imports numba

            cpu_sampling.choose_tokens(logits, slots, wanted, *state, packed, masks)

    def move(self, slots: torch.Tensor, tokens: torch.Tensor, good: torch.Tensor) -> None:
        """Record sampled tokens where `good`. slots, tokens: [n] int64 on the device. good: [n] bool on the device."""
        self.last_token[slots] = torch.where(good, tokens, self.last_token[slots])
        self.generated[slots] += good.long()

    def _adjusted(
        self,
        logits: torch.Tensor,
        slots: npt.NDArray[np.integer],
        on_device: torch.Tensor,
        masks: torch.Tensor | None,
        ahead: AheadRows | None = None,
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Apply biases, penalties and masks.

        Returns:
            Scores [n, vocab]: the logits themselves if no row is adjusted, float64 after biases or penalties. Then the
            banned rows, [n] bool, or None if no row has biases.
        """
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
            behind = None if ahead is None else ahead.pick(rows)
            self.counts.apply(scores, slots[rows], of, self.values[on_device[of]][:, PENALTIES], behind)
        return scores, banned

    def _draw(
        self,
        scores: torch.Tensor,
        slots: npt.NDArray[np.integer],
        on_device: torch.Tensor,
        positions: torch.Tensor,
    ) -> torch.Tensor:
        """Draw a token for each row: [n] int64. scores: [n, vocab], adjusted; every temperature is above 0."""
        values, vocab = self.values[on_device], scores.shape[1]
        tempered = scores.double() / values[:, TEMPERATURE, None]
        top_k, nucleus = np.minimum(self._top_k[slots], vocab), self._nucleus[slots]
        for group in (np.flatnonzero(top_k), np.flatnonzero(nucleus & (top_k == 0))):
            if len(group):  # rows with top_k need only k sorted tokens, the others all
                rows = self._device.upload(group)
                width = int(top_k[group].max()) or vocab
                keep = most_likely_mask(tempered[rows], self._device.upload(top_k[group]), values[rows, TOP_P], width)
                tempered[rows] = tempered[rows].masked_fill_(~keep, -torch.inf)
        group = np.flatnonzero(self._min_p[slots])
        if len(group):
            rows = self._device.upload(group)
            tempered[rows] = tempered[rows].masked_fill_(~min_p_mask(tempered[rows], values[rows, MIN_P]), -torch.inf)
        seeds = self.seed[on_device]
        if self._cpu_kernels:
            from kvforge.worker.cpu import sampling as cpu_sampling

            return cpu_sampling.draw_tokens(tempered, seeds, positions)
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
    """Unpack masks [n, words] int32 into a bool per token: [n, vocab] on the device."""
    places = torch.arange(WORD_BITS, dtype=torch.int32, device=masks.device)
    return ((masks[:, :, None] >> places) & 1).bool().flatten(1)[:, :vocab]


def _columns(sampling: SamplingParams) -> list[float]:
    """Return the values of COLUMNS. A temperature below the smallest float32 becomes 0 to avoid overflow."""
    values = [float(getattr(sampling, name)) for name in COLUMNS]
    values[TEMPERATURE] = float(np.float32(values[TEMPERATURE]))
    return values
