"""The operations of recurrent layers over prompts that run token by token, on the CPU's kernels."""

from __future__ import annotations

from collections.abc import Callable

import torch

from kvforge.worker.attention.states import StateRows

from .prompt_reference import PlainPrompts
from .prompt_rows import PromptRows
from .selective import SelectiveInputs, SelectiveSpace

Scan = Callable[[SelectiveInputs, StateRows, SelectiveSpace, PromptRows], torch.Tensor | None]


class CpuPrompts(PlainPrompts):
    """`PlainPrompts` with the kernel of Mamba 1: a chunk in plain torch is as slow as transformers' modules.

    Args:
        scan: Computes selective state spaces over rows; None in place of a result: it has no kernel for them.
        rows: The rows.
    """

    def __init__(self, scan: Scan, rows: PromptRows) -> None:
        super().__init__(rows)
        self._scan = scan

    def advance_selective(self, inputs: SelectiveInputs, states: StateRows, space: SelectiveSpace) -> torch.Tensor:
        """Implement `StateOperations.advance_selective`."""
        found = self._scan(inputs, states, space, self._rows)
        return super().advance_selective(inputs, states, space) if found is None else found
