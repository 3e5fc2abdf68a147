"""What `benchmarks.gpu_step` measures, in each of its parts alike."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

BLOCK_SIZE = 16
VOCABULARY = 97  # of the prompts: every model knows so many tokens
WARM_STEPS = 12  # after the last request's first token

Save = Callable[[dict[str, Any]], None]


@dataclass(frozen=True)
class Plan:
    """What to measure. steps: measured ones of each batch. context: tokens of a row in the middle of them."""

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

    @property
    def prompt_tokens(self) -> int:
        """So that the rows have `context` tokens in the middle of the steps that are measured."""
        return max(4, self.context - WARM_STEPS - self.steps // 2)

    @property
    def answer_tokens(self) -> int:
        """Enough for the first request to go on while the prompts of the last ones are computed."""
        prefill = -(-max(self.batches) * self.prompt_tokens // self.step_tokens)
        return 2 * prefill + 2 * WARM_STEPS + self.steps + 64

    @property
    def context_max(self) -> int:
        return -(-(self.prompt_tokens + self.answer_tokens + 1) // BLOCK_SIZE) * BLOCK_SIZE
