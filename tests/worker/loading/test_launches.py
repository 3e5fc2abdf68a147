"""A decode step launches no more than is listed here: at batch 1 a model waits for launches, not for its weights."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch

pytest.importorskip("triton")

from triton import knobs

from kvforge.worker.attention.pool import KvPool
from kvforge.worker.device.device import Device
from kvforge.worker.device.targets import TARGETS
from kvforge.worker.kernels.fused import FusedOperations
from kvforge.worker.loading.model import LoadedModel
from tests.worker.launches import launches

from .random_models import HYBRIDS, NEEDS_CACHE

pytestmark = [pytest.mark.skipif(not knobs.runtime.interpret, reason="only under Triton's interpreter"), NEEDS_CACHE]
ROWS = 3
SIZES = {
    "num_hidden_layers": 2,
    "layer_types": ["linear_attention", "full_attention"],
    "hidden_size": 512,  # whose products have kernels for a few rows
    "linear_num_key_heads": 2,
}
MIXER = ["convolve_kernel", "delta_kernel", "gated_norm_kernel"]
# From projections that are cut by heads of keys to queries, keys, values and gates.
BY_KIND: dict[str, list[str]] = {"qwen3_5_moe": [], "qwen3_next": ["index_select", "index_select"]}
# contiguous: on a CPU alone. Attention itself runs in no kernel of Triton here.
GATE = ["contiguous", "sigmoid", "mul"]
FEED = ["linear_kernel", "route_kernel", "rank_kernel", "grouped_kernel", "grouped_kernel", "combine_kernel"]


@pytest.fixture
def loaded(tiny: Callable[..., LoadedModel], monkeypatch: pytest.MonkeyPatch) -> Callable[[str], LoadedModel]:
    def operations(device: Device, _dtype: torch.dtype) -> FusedOperations:
        made = FusedOperations(device, overlap=False)
        made.target = replace(TARGETS["sm_90"], steady=True)
        return made

    monkeypatch.setattr("kvforge.worker.loading.load.choose_operations", operations)
    # The interpreter's products depend on the number of rows; slabs of torch's would take their place.
    monkeypatch.setattr("kvforge.worker.loading.load.make_batch_invariant", lambda *_: "")

    def load(kind: str) -> LoadedModel:
        model_type, fields = HYBRIDS[kind]
        return tiny(model_type, dtype="float16", **{**fields, **SIZES})

    return load


def step_of(model: LoadedModel) -> Callable[[], Any]:
    """Return a step of generated tokens."""
    assert model.fused is not None
    fused, pages, width = model.fused, model.geometry.state_blocks, 3
    pool = KvPool(model.geometry, ROWS * (width + pages), model.device)
    for tensor in pool.tensors():
        tensor.zero_()
    blocks = np.arange(ROWS * width, dtype=np.int32).reshape(ROWS, width)
    starts, counts = np.full(ROWS, 9, np.int32), np.ones(ROWS, np.int32)
    batch = pool.batch(blocks, starts, counts, counts == 1)
    batch.states = ROWS * width + np.arange(ROWS * pages, dtype=np.int32).reshape(ROWS, pages)
    batch.state_pages = model.device.upload(batch.states)
    tokens, positions = torch.arange(ROWS), torch.full((ROWS,), 9)
    return torch.inference_mode()(lambda: fused.forward(tokens, positions, None, batch, pool))


@pytest.mark.parametrize("kind", [pytest.param("qwen3_5_moe", marks=pytest.mark.soak), "qwen3_next"])
def test_a_step_of_generated_tokens(
    kind: str, loaded: Callable[[str], LoadedModel], monkeypatch: pytest.MonkeyPatch
) -> None:
    step = step_of(loaded(kind))
    step()  # buffers are made once
    recurrent = ["linear_kernel", *BY_KIND[kind], *MIXER, "linear_kernel", "combine_kernel", *FEED]
    attending = ["linear_kernel", "norm_kernel", *GATE, "linear_kernel", "combine_kernel", *FEED]
    embedding = ["embedding", "norm_kernel", "rotary_kernel"]
    assert launches(step, monkeypatch) == [*embedding, *recurrent, *attending, "linear_kernel"]
