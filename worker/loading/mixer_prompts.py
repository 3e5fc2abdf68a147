"""Prompt tokens of described mixers, in chunks by kernels of our own: all prompt rows of a step together.

The kernels are the operations of the mixer's step over prompt rows (see `kernels.prompt_rows`), where the device has
them. Elsewhere prompts run through transformers' modules row by row: see `mixers`.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from kvforge.worker.attention import PagedBatch
from kvforge.worker.attention.mixed_batch import MixedBatch
from kvforge.worker.kernels.channel_delta_step import ChannelDeltaStep
from kvforge.worker.kernels.gated_unit_step import GatedUnitStep
from kvforge.worker.kernels.lightning_step import LightningStep
from kvforge.worker.kernels.prompt_rows import PromptRows, fixed_prompt_rows, prompt_rows
from kvforge.worker.kernels.recurrent import (
    ConvolutionStep,
    DeltaStep,
    MixerStep,
    StateOperations,
    StateSpaceStep,
    StepOperations,
    form_of_prompts,
)
from kvforge.worker.kernels.selective_step import SelectiveStep

from .mixer_waves import Wave

# Steps whose operations have a form for prompts.
Described = (
    ConvolutionStep | DeltaStep | ChannelDeltaStep | StateSpaceStep | SelectiveStep | LightningStep | GatedUnitStep
)


@dataclass(frozen=True)
class PromptWave:
    """The prompt rows of a wave.

    Attributes:
        rows: The rows.
        pages: [rows, pages of a state] int32 on the device, of these rows.
    """

    rows: PromptRows
    pages: torch.Tensor


def prompts_of(batch: PagedBatch, wave: Wave) -> PromptWave:
    """Return the rows that a wave's mixers compute alone."""
    key = ("prompts of mixers", tuple(wave.alone))
    if key not in batch.plans:
        if isinstance(batch, MixedBatch):
            assert batch.state_pages is not None, "a static batch without the pages of its rows' states"
            own = batch.state_pages[: batch.size.prompts]
            batch.plans[key] = PromptWave(fixed_prompt_rows(batch), own)
            return batch.plans[key]
        assert batch.states is not None, "a step without the pages of its rows' states"
        upload, rows = batch.device.upload, wave.alone
        made = prompt_rows(batch.starts[rows], batch.query_starts[rows], batch.counts[rows], upload)
        batch.plans[key] = PromptWave(made, upload(batch.states[rows]))
    found: PromptWave = batch.plans[key]
    return found


@dataclass(frozen=True)
class ChunkedPrompts:
    """Computes the prompt rows of waves.

    Attributes:
        step: The mixer's step.
        operations: The operations of the decoder.
        batch: The batch.
    """

    step: MixerStep
    operations: StepOperations
    batch: PagedBatch

    def operations_of(self, wave: Wave, dtype: torch.dtype) -> StateOperations | None:
        """Return the operations over a wave's prompt rows; None: transformers' module computes them.

        Args:
            wave: The wave.
            dtype: Of the tokens.
        """
        if not wave.alone or not isinstance(self.step, Described):
            return None
        form = form_of_prompts(self.step, self.operations, dtype)
        return None if form is None else form(prompts_of(self.batch, wave).rows)
