"""Activations compute what transformers' own functions of the same names compute."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
from transformers.activations import ACT2FN
from transformers.models.gpt_oss.modeling_gpt_oss import GptOssExperts

from kvforge.worker.kernels.activations import NAMES, Activation


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_name_means_what_transformers_means(name: str, dtype: torch.dtype) -> None:
    x = torch.randn(7, 65, generator=torch.Generator().manual_seed(1)).to(dtype) * 3
    got, want = Activation(NAMES[name]).apply(x), ACT2FN[name](x)
    assert got.dtype == dtype
    torch.testing.assert_close(got, want, rtol=1e-6 if dtype == torch.float32 else 1e-2, atol=1e-6)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_clamped_gate_is_that_of_gpt_oss(dtype: torch.dtype) -> None:
    gate, up = (torch.randn(2, 9, 64, generator=torch.Generator().manual_seed(2)) * 6).to(dtype)
    assert float(gate.max()) > 7 and float(up.abs().max()) > 7
    want = GptOssExperts._apply_gate(SimpleNamespace(alpha=1.702, limit=7.0), torch.stack((gate, up), -1).flatten(-2))
    torch.testing.assert_close(Activation("clamped_swiglu", 1.702, 7.0).gate(gate, up), want, rtol=1e-2, atol=1e-5)
