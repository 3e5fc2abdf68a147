"""The measurement plan of `benchmarks.gpu_step`, shared by all its parts."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

BLOCK_SIZE = 16
VOCABULARY = 97  # token ids in prompts: every model has at least as many
WARM_STEPS = 12  # after the last request's first token

Save = Callable[[dict[str, Any]], None]


@dataclass(frozen=True)
class Plan:
    """The plan.

    Attributes:
        steps: Measured steps of each batch.
        context: Tokens of a row in the middle of these steps.
        worker: Further settings of the worker.
        common: Tokens that all rows of the runner's part have in common.
    """

    model: str
    batches: tuple[int, ...]
    context: int
    steps: int
    step_tokens: int
    tiny: bool
    kv_dtype: str = "auto"
    attention: str = "auto"
    transformers_steps: int = 24
    determinism: str = "batch-invariant"
    worker: tuple[tuple[str, str | bool | int], ...] = ()
    common: int = 0

    @property
    def prompt_tokens(self) -> int:
        """Return the prompt length that gives rows of `context` tokens in the middle of the measured steps."""
        return max(4, self.context - WARM_STEPS - self.steps // 2)

    @property
    def answer_tokens(self) -> int:
        """Return an answer length that keeps the first request decoding while the last prompts are computed."""
        prefill = -(-max(self.batches) * self.prompt_tokens // self.step_tokens)
        return 2 * prefill + 2 * WARM_STEPS + self.steps + 64

    @property
    def context_max(self) -> int:
        return -(-(self.prompt_tokens + self.answer_tokens + 1) // BLOCK_SIZE) * BLOCK_SIZE
