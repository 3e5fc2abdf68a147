"""The step of lightning attention, on every device's operations, against transformers' module behind a state."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from kvforge.worker.attention.states import StateTensor
from kvforge.worker.kernels.activations import SILU
from kvforge.worker.kernels.interface import LayerOperations
from kvforge.worker.kernels.layer_weights import Norm
from kvforge.worker.kernels.lightning_step import LightningStep
from kvforge.worker.kernels.recurrent import RECURRENT
from kvforge.worker.kernels.recurrent_selftest import scattered

HEADS, SIZE, ROWS = 4, 6, 3


@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 1e-5), (torch.bfloat16, 3e-2), (torch.float16, 4e-3)])
@torch.inference_mode()
def test_a_step_is_transformers_lightning_attention(
    operations: LayerOperations, dtype: torch.dtype, tolerance: float
) -> None:
    modeling: Any = pytest.importorskip("transformers.models.minimax.modeling_minimax")
    sizes = {"hidden_size": 24, "num_attention_heads": HEADS, "head_dim": SIZE, "num_hidden_layers": 3}
    config = modeling.MiniMaxConfig(**sizes, layer_types=["linear_attention"] * 3)
    generator = torch.Generator().manual_seed(3)
    mixer = modeling.MiniMaxLightningAttention(config, 1)
    for weight in mixer.parameters():
        weight.copy_(torch.randn(weight.shape, generator=generator))
    norm = Norm(mixer.norm.weight.to(dtype), 0.3)  # large, so that a wrong factor of the results shows
    step = LightningStep.of(-mixer.slope_rate.flatten(), norm, SILU, ("qkv_proj", "output_gate"))
    mixer.norm.variance_epsilon = norm.epsilon
    before = torch.randn((ROWS, HEADS, SIZE, SIZE), generator=generator)
    hidden = torch.randn((ROWS, 1, 24), generator=generator).to(dtype)
    states = scattered(StateTensor(0, RECURRENT, step.space.state, torch.float32), ROWS, generator)
    states.write(before.transpose(2, 3))
    weights = {name: getattr(mixer, name).weight.to(dtype) for name in (*step.projections, "out_proj")}
    projected = {name: hidden[:, 0] @ weights[name].t() for name in step.projections}
    found = step.run(operations, operations, projected, lambda _name: states) @ weights["out_proj"].t()
    cache = modeling.MiniMaxCache()
    cache.set_linear_cache(1, before)
    want, after = mixer(hidden.float(), None, None, cache)
    largest = float(want.abs().max())
    torch.testing.assert_close(found.float(), want[:, 0], rtol=0, atol=tolerance * largest)
    torch.testing.assert_close(states.read().transpose(2, 3), after, rtol=0, atol=tolerance * float(after.abs().max()))
