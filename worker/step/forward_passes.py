"""Passes over rows outside of captured graphs: from host arrays to logits and scored prompt tokens on the device."""

from __future__ import annotations

import numpy as np
import torch

from kvforge.worker.attention import PagedBatch
from kvforge.worker.attention.pool import KvPool
from kvforge.worker.device.queue import AsyncCopy, Staging
from kvforge.worker.loading.model import LoadedModel
from kvforge.worker.sampling.sampler import NO_TOKEN, SamplingState
from kvforge.worker.sampling.scoring import ScoredPart, score, tokens_at_a_time

from .checks import BoolArray, Rows
from .slot_records import SlotRecords
from .token_kinds import split_by_kind, split_passes


class ForwardPasses:
    """Queues passes of one model over one pool.

    Args:
        model: The model.
        pool: Its pool.
        state: Sampling state of slots, with their last tokens.
        records: The host's records of slots.
        step_tokens_max: Most tokens of a step.
        step_rows_max: Most rows of a step.

    Attributes:
        model: The model.
    """

    def __init__(
        self,
        model: LoadedModel,
        pool: KvPool,
        state: SamplingState,
        records: SlotRecords,
        step_tokens_max: int,
        step_rows_max: int,
    ) -> None:
        self.model, self._pool, self._state, self._records = model, pool, state, records
        # Tokens, positions and slots of a step, then the indices of the tokens to sample after.
        self._inputs = Staging(model.device, 3 * step_tokens_max + step_rows_max)

    def forward(self, rows: Rows) -> tuple[torch.Tensor, list[ScoredPart]]:
        """Queue the passes over rows.

        Returns:
            Logits [sampled, vocab] float32 on the device, as `sampling_rows` orders them, and scored tokens.
        """
        found = [self._run(*part) for part in split_passes(*split_by_kind(rows))]
        if len(found) == 1:
            return found[0]
        return torch.cat([logits for logits, _ in found]), [part for _, parts in found for part in parts]

    def _run(self, rows: Rows, generated: BoolArray) -> tuple[torch.Tensor, list[ScoredPart]]:
        """Run one pass over rows. generated: [rows] bool, the rows that are decodes. Return as `forward` does."""
        states = rows.states, rows.windows, rows.sources
        batch = self._pool.batch(rows.tables, rows.starts, rows.counts, generated, *states)
        samples = rows.samples == 1
        count, wanted = len(rows.tokens), int(samples.sum())
        ends = np.cumsum(rows.counts)
        packed = self._inputs.host()
        tokens, positions, owners = packed[: 3 * count].reshape(3, count)
        tokens[:] = rows.tokens
        positions[:] = np.arange(count) - np.repeat(ends - rows.counts - rows.starts, rows.counts)
        owners[:] = np.repeat(rows.slots, rows.counts)
        packed[3 * count : 3 * count + wanted] = ends[samples] - 1
        self._inputs.send(3 * count + wanted)
        inputs = self._inputs.on_device[: 3 * count + wanted].long()
        token_ids, places, slots = inputs[: 3 * count].view(3, count).unbind()
        if (rows.tokens == NO_TOKEN).any():
            # A failed step may have left NO_TOKEN. Clamp it: the row fails once the failure is known.
            token_ids = torch.where(token_ids == NO_TOKEN, self._state.last_token[slots].clamp_(min=0), token_ids)
        if rows.scoring is not None and (rows.scoring.places >= 0).any():
            return self._run_and_score(token_ids, places, inputs[3 * count :], batch, rows)
        return self.model.forward(token_ids, places, inputs[3 * count :], batch, self._pool), []

    def _run_and_score(
        self,
        token_ids: torch.Tensor,
        positions: torch.Tensor,
        logit_tokens: torch.Tensor,
        batch: PagedBatch,
        rows: Rows,
    ) -> tuple[torch.Tensor, list[ScoredPart]]:
        """Run one pass, score prompt tokens part by part, and return the logits of `logit_tokens`."""
        scoring = rows.scoring
        assert scoring is not None
        device, most = self.model.device, tokens_at_a_time(self.model.vocab_size)
        (where,) = np.nonzero(scoring.places >= 0)
        places = scoring.places[where]
        slots = np.repeat(rows.slots, rows.counts)[where]
        counts = self._records.prompt_tops[slots]
        wanted = device.upload(where.astype(np.int64))
        following = device.upload(scoring.following[places].astype(np.int64))
        parts = [*wanted.split(most), logit_tokens]
        scored: list[torch.Tensor] = []
        for logits in self.model.forward_by_parts(token_ids, positions, parts, batch, self._pool):
            if len(scored) < len(parts) - 1:
                begin = len(scored) * most
                scored.append(score(logits, following[begin : begin + most], scoring.top_width))
        packed = AsyncCopy(device, torch.cat(scored))
        return logits, [ScoredPart(slots, places, counts, packed)]
