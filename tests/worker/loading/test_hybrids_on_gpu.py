"""Models with recurrent states beside attention on a GPU: logits of transformers, and bits of a row alone."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from kvforge.worker.device.device import open_device
from kvforge.worker.loading.load import load_model
from kvforge.worker.loading.verification import in_float32
from tests.worker.step.test_states import play

from .cached_logits import cached_logits
from .random_models import HYBRIDS, NEEDS_CACHE

pytestmark = [pytest.mark.gpu, NEEDS_CACHE, pytest.mark.filterwarnings("ignore:.*:UserWarning:transformers.*")]
LENGTHS = (127, 1, 65, 64)
TOLERANCE = {"float32": 1e-3, "bfloat16": 5e-2}
# With two of four experts, a token near the border goes to another one in 16 bits: with four of six weights of such a
# random model a load refused it, in its trial. With two of two experts no load did.
FIELDS_IN_16_BITS: dict[str, dict[str, Any]] = {"minimax": {"num_local_experts": 2}}


def config_of(name: str, dtype: str, write_config: Callable[..., Path]) -> Path:
    """Return the folder of a tiny model."""
    model_type, fields = HYBRIDS[name]
    return write_config(model_type, **fields | (FIELDS_IN_16_BITS.get(name, {}) if dtype == "bfloat16" else {}))


def apart(got: torch.Tensor, wanted: torch.Tensor) -> torch.Tensor:
    """Return the largest difference of each token's logits, relative to the largest logit of all."""
    return (got - wanted).abs().amax(1) / wanted.abs().max()


@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize("name", HYBRIDS)
def test_logits_and_bits_on_a_gpu(
    name: str,
    dtype: str,
    write_config: Callable[..., Path],
    paged_logits: Callable[..., list[torch.Tensor]],
) -> None:
    folder, device = config_of(name, dtype, write_config), open_device("auto")
    if not device.queues:
        pytest.skip("no GPU here")
    model = load_model(folder, load_format="dummy", dtype=dtype, device=device, block_size=16)
    assert model.info.determinism == "batch-invariant"
    has_experts = any("expert" in name for name, _ in model.module.named_parameters())
    rng = np.random.default_rng(3)
    sequences = [rng.integers(0, model.vocab_size, count) for count in LENGTHS]
    alone = [paged_logits(model, [sequence], [[len(sequence)]], prompts=1)[0] for sequence in sequences]
    chunked = paged_logits(model, sequences, [[64, 0, 0, 64], [0, 1, 64, 0], [63, 0, 1, 0]], prompts=3)
    for got, want, sequence in zip(chunked, alone, sequences, strict=True):
        assert torch.equal(got, want)
        if dtype == "bfloat16" and model.fused is not None:
            continue  # see the next test
        reference = cached_logits(model, sequence, [len(sequence)])
        # In 16 bits a token near the border of two experts may go to the other one.
        allowed = len(sequence) // 10 if has_experts and dtype != "float32" else 0
        far = apart(got, reference)
        assert int((far > TOLERANCE[dtype]).sum()) <= allowed, far.sort().values[-allowed - 3 :]
    # Generated tokens: alone, and beside others in another order.
    decoded = paged_logits(model, sequences[:1], [[64], *[[1]] * 20], prompts=1)[0]
    steps = [[64, 1, 64], *[[int(step == 0), 0, 1] for step in range(20)]]
    beside = paged_logits(model, [sequences[2], sequences[1], sequences[0]], steps, prompts=1)
    assert torch.equal(beside[2], decoded)


@pytest.mark.parametrize("name", HYBRIDS)
def test_in_16_bits_logits_are_as_near_as_those_of_transformers(
    name: str, write_config: Callable[..., Path], paged_logits: Callable[..., list[torch.Tensor]]
) -> None:
    """Prompts run through kernels of our own, and random weights enlarge what is rounded otherwise, by up to half of
    the largest logit. The distance to float32 is a matter of chance for one prompt, so that many are compared.
    """
    folder, device = config_of(name, "bfloat16", write_config), open_device("auto")
    if not device.queues:
        pytest.skip("no GPU here")
    ratios, rng = [], np.random.default_rng(3)
    for seed in range(6):
        model = load_model(folder, load_format="dummy", dtype="bfloat16", device=device, block_size=16, seed=seed)
        if model.fused is None:
            pytest.skip("its layers are transformers' own: see the test above")
        for count in (127, 64):
            sequence = rng.integers(0, model.vocab_size, count)
            got = paged_logits(model, [sequence], [[count]], prompts=1)[0]
            reference = cached_logits(model, sequence, [count])
            with in_float32(model.module):
                exact = cached_logits(model, sequence, [count])
            shares = torch.tensor((0.5, 0.9), device=got.device)
            ours, theirs = (apart(each, exact).quantile(shares) for each in (got, reference))
            ratios.append((ours / theirs).log2())
    middle = torch.stack(ratios).median(0).values.exp2()
    assert float(middle[0]) <= 1.15 and float(middle[1]) <= 1.3, middle


@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize(
    "name", ["bamba", "granite", "kimi_linear", "lfm2", "lfm2_moe", "minimax", "qwen3_next", "qwen3_5", "qwen3_5_moe"]
)
def test_an_answer_from_graphs_on_a_gpu(name: str, dtype: str, write_config: Callable[..., Path]) -> None:
    """It has the bits of one without graphs: beside others, behind a checkpoint, as a fork, after a rewind."""
    folder, device = config_of(name, dtype, write_config), open_device("auto")
    if not device.queues:
        pytest.skip("no GPU here")
    # With the weights of seed 0, transformers' own logits of qwen3_5_moe are 0.86 of the largest from float32.
    model = load_model(folder, load_format="dummy", dtype=dtype, device=device, block_size=16, seed=2)
    assert model.can_be_captured
    assert play(model, graph_rows_max=4) == play(model)
