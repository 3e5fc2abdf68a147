"""The recurrent state of one row, in the interface of a transformers cache."""

from __future__ import annotations

from typing import Any

import torch


class RowCache:
    """The state of one layer and one row, in the interface of a transformers cache.

    Attributes:
        state: Its tensors by name, in the mixer's own shapes, with a leading 1. None: the row has no tokens yet.
    """

    def __init__(self, state: dict[str, torch.Tensor] | None = None) -> None:
        self.state = dict(state) if state is not None else {}
        self._begun = state is not None

    def copied(self) -> RowCache:
        """Return a cache with copies of the tensors."""
        return RowCache({name: tensor.clone() for name, tensor in self.state.items()} if self._begun else None)

    def get_conv_state(self, _layer: int, state_idx: int = 0) -> torch.Tensor | None:
        """Return the last inputs of a convolution, [1, channels, kernel], which the caller may change; None: none."""
        return self.state[f"conv {state_idx}"] if self._begun else None

    def get_recurrent_state(self, _layer: int, state_idx: int = 0) -> torch.Tensor | None:
        """Return a recurrent state, [1, ...], which the caller may change; None: none."""
        return self.state[f"recurrent {state_idx}"] if self._begun else None

    def update_conv_state(
        self,
        conv_states: torch.Tensor,
        _layer: int | None = None,
        state_idx: int = 0,
        conv_kernel_size: int | None = None,
        **_: Any,
    ) -> torch.Tensor:
        """Append inputs of a convolution, and keep the last ones.

        Args:
            conv_states: [1, channels, tokens].
            state_idx: Which convolution of the layer.
            conv_kernel_size: Inputs to keep.

        Returns:
            The inputs from before and the new ones; at the begin of a sequence at least `conv_kernel_size`, with zeros
            in front.
        """
        name = f"conv {state_idx}"
        if conv_kernel_size is None:
            raise ValueError("a convolution of its layers gives its cache no kernel size")
        if self._begun:
            full = torch.cat([self.state[name], conv_states], dim=-1)
        else:
            missing = max(0, conv_kernel_size - conv_states.shape[-1])
            full = torch.nn.functional.pad(conv_states, (missing, 0))
        self.state[name] = full[..., -conv_kernel_size:]
        return full

    def update_recurrent_state(
        self, recurrent_states: torch.Tensor, _layer: int | None = None, state_idx: int = 0, **_: Any
    ) -> torch.Tensor:
        """Replace a recurrent state."""
        self.state[f"recurrent {state_idx}"] = recurrent_states
        return recurrent_states

    def has_previous_state(self, _layer: int | None = None, _index: int | None = None) -> bool:
        """Return whether the row has tokens before."""
        return self._begun

    def is_recording_past(self, _layer: int) -> bool:
        """Return whether earlier states are kept: never."""
        return False
