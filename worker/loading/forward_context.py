"""What the parts of a transformers model that kvforge replaces find during a pass."""

from __future__ import annotations

from kvforge.worker.attention import PagedAttention, PagedBatch
from kvforge.worker.attention.pool import KvPool
from kvforge.worker.kernels.recurrent import MixerStep, StepOperations

from .single_tokens import SingleTokens


class ForwardContext:
    """Inputs of the attention function of every layer during one forward pass; empty between passes.

    Attributes:
        attention: The implementation.
        batch: The structure of the step.
        pool: The KV pool.
        single_tokens: Outside a pass, runs layers with a recurrent state over each token alone; None: they run as
            transformers wrote them.
        as_part: Layers with a recurrent state return this rank's part of their result, which the caller adds up.
        steps: The steps of generated tokens in a decoder that is not described, by the index of the mixer.
        operations: The operations of these steps.
    """

    def __init__(self, attention: PagedAttention) -> None:
        self.attention = attention
        self.as_part = False
        self.single_tokens: SingleTokens | None = None
        self.batch: PagedBatch | None = None
        self.pool: KvPool | None = None
        self.steps: dict[int, MixerStep] = {}
        self.operations: StepOperations | None = None
