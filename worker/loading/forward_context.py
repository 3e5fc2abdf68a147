"""What the parts of a transformers model that kvforge replaces find during a pass."""

from __future__ import annotations

from kvforge.worker.attention import PagedAttention, PagedBatch
from kvforge.worker.attention.pool import KvPool
from kvforge.worker.kernels.recurrent import MixerStep, StateOperations


class ForwardContext:
    """Inputs of the attention function of every layer during one forward pass; empty between passes.

    Attributes:
        attention: The implementation.
        batch: The structure of the step.
        pool: The KV pool.
        separate: Outside a pass, layers with a recurrent state run each token alone, behind a state of zeros (see
            `trial`).
        as_part: Layers with a recurrent state return this rank's part of their result, which the caller adds up.
        steps: The steps of generated tokens in a decoder that is not described, by the index of the mixer.
        operations: The operations of these steps.
    """

    def __init__(self, attention: PagedAttention) -> None:
        self.attention = attention
        self.separate = self.as_part = False
        self.batch: PagedBatch | None = None
        self.pool: KvPool | None = None
        self.steps: dict[int, MixerStep] = {}
        self.operations: StateOperations | None = None
