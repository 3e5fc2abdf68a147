"""Shared experts are experts of the grouped products where their block has the shape of experts."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from kvforge.worker.device.device import open_device
from kvforge.worker.kernels import PlainOperations
from kvforge.worker.kernels.activations import SILU, Activation
from kvforge.worker.kernels.choice import choose_operations
from kvforge.worker.kernels.expert_loop import ExpertMatrices
from kvforge.worker.kernels.layer_weights import FeedForward, MixtureOfExperts, Projection
from kvforge.worker.kernels.packed import packing_problem
from kvforge.worker.kernels.stored import StoredWeight, quantise_codes
from kvforge.worker.loading.load import load_model
from kvforge.worker.loading.model import LoadedModel
from kvforge.worker.loading.row_independence import first_experts
from kvforge.worker.loading.shared_experts import beside_shared

from .random_models import DESCRIBED, HYBRIDS, NEEDS_CACHE, save

CPU = open_device("cpu")
# The shared experts that are chosen with the others; 0: they stay a block of their own.
JOINED = {
    "deepseek_v2": 2,
    "deepseek_v3": 2,
    "ernie4_5_moe": 2,
    "glm4_moe": 2,
    "hunyuan_moe": 1,
    "qwen3_5_moe": 1,
    "qwen3_next": 1,
    "kimi_linear": 1,
    "granitemoeshared": 0,  # another inner size
    "llama4": 0,  # its experts are stored by columns
    "qwen2_moe": 0,  # another inner size
}


@pytest.fixture(autouse=True)
def unpacked(monkeypatch: pytest.MonkeyPatch) -> None:
    """Keep weights as a GPU does. A CPU packs each expert by itself, and shared ones as a block."""
    monkeypatch.setattr("kvforge.worker.loading.load.choose_operations", lambda *_: PlainOperations())


def load(name: str, folder: Path, **changes: Any) -> LoadedModel:
    kind, fields = (DESCRIBED | HYBRIDS)[name]
    folder = save(folder / "model", kind, {**fields, **changes}, torch.float32)
    return load_model(folder, device=CPU, block_size=4, dtype="float32")


def mixture_of(model: LoadedModel) -> MixtureOfExperts:
    assert model.fused is not None
    return next(each.mixture for each in model.fused.layers if each.mixture is not None)


# Soak tests: families with shared experts as another one has them.
AGAIN = ("deepseek_v2", "hunyuan_moe", "kimi_linear", "qwen3_5_moe", "granitemoeshared")


def each_family() -> list[Any]:
    return [
        pytest.param(
            name, marks=[*([NEEDS_CACHE] if name in HYBRIDS else []), *([pytest.mark.soak] if name in AGAIN else [])]
        )
        for name in JOINED
    ]


@pytest.mark.parametrize("name", each_family())
def test_families(name: str, tmp_path: Path) -> None:
    """Loading has compared the logits with those of transformers' layers."""
    model = load(name, tmp_path)
    mixture = mixture_of(model)
    assert mixture.matrices.shared == mixture.router.shared == JOINED[name]
    assert (mixture.shared is None) == bool(JOINED[name])
    experts = first_experts(model.module, PlainOperations(), model.fused)
    assert experts is not None and experts.matrices.shared == JOINED[name], "the self-test of kernels has others"
    if mixture.matrices.shared_down is not None:
        weights = {each.data_ptr() for each in model.module.parameters()}
        assert mixture.matrices.shared_down.data_ptr() in weights, "a second copy"


FAULTS: dict[str, Callable[[ExpertMatrices], ExpertMatrices]] = {
    "rows of other experts": lambda found: replace(found, shared_up=found.shared_up.roll(48, 0)),  # type: ignore[union-attr]
    "columns of other experts": lambda found: replace(found, shared_down=found.shared_down.roll(48, 1)),  # type: ignore[union-attr]
    "a part of the block": lambda found: replace(found, shared_down=torch.zeros_like(found.shared_down)),  # type: ignore[arg-type]
}


@pytest.mark.parametrize("fault", FAULTS)
def test_other_weights_are_found_at_load(fault: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def changed(*given: Any) -> ExpertMatrices | None:
        found = beside_shared(*given)
        return None if found is None else FAULTS[fault](found)

    monkeypatch.setattr("kvforge.worker.loading.fusion.beside_shared", changed)
    assert load("glm4_moe", tmp_path).fused is None, "it runs through transformers' layers"


@pytest.mark.skipif(bool(packing_problem(CPU, torch.float32)), reason="this CPU packs no weights")
def test_packed_ones_stay_apart(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Before they are packed too: what is compared then has the roundings of what serves."""
    monkeypatch.setattr("kvforge.worker.loading.load.choose_operations", choose_operations)
    joined = list[object]()
    monkeypatch.setattr("kvforge.worker.loading.fusion.beside_shared", lambda *given: joined.append(given))
    mixture = mixture_of(load("glm4_moe", tmp_path))
    assert mixture.shared is not None and not joined


@pytest.mark.parametrize(("size", "shared"), [(96, 0), (48, 1), (40, 0)])
def test_sizes(size: int, shared: int, tmp_path: Path) -> None:
    """Three experts of a token are joined by one shared one, not by two."""
    mixture = mixture_of(load("qwen2_moe", tmp_path, shared_expert_intermediate_size=size))
    assert mixture.matrices.shared == mixture.router.shared == shared


def weights(*shape: int) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(sum(shape)))


MATRICES = ExpertMatrices(weights(6, 64, 16), None, weights(6, 16, 32), None)
BLOCK = FeedForward(Projection(weights(128, 16), None), Projection(weights(16, 64), None))


def coded(weight: torch.Tensor) -> torch.Tensor:
    return StoredWeight(quantise_codes(weight.bfloat16(), "int8"), torch.bfloat16)


OTHERS: dict[str, dict[str, Any]] = {
    "experts with biases": {"matrices": replace(MATRICES, up_bias=weights(6, 64))},
    "experts by columns": {"matrices": replace(MATRICES, up=weights(6, 16, 64).transpose(1, 2))},
    "packed experts": {"matrices": replace(MATRICES, up=list(weights(6, 64, 16)))},
    "a block with a bias": {"shared": replace(BLOCK, down=Projection(BLOCK.down.weight, weights(16)))},
    "a block of another dtype": {"shared": replace(BLOCK, down=Projection(BLOCK.down.weight.half(), None))},
    "a block in codes": {"shared": replace(BLOCK, down=Projection(coded(weights(16, 64)), None))},
    "a block with a factor": {"shared": replace(BLOCK, gate_factor=2.0)},
    "a block without a gate": {"shared": replace(BLOCK, is_gated=False)},
    "another activation": {"activation": Activation("relu")},
    "a gate with a bias": {"gate": Projection(weights(1, 16), weights(1))},
    "a gate of another dtype": {"gate": Projection(weights(1, 16).half(), None)},
    "few chosen experts": {"chosen": 3},
}


@pytest.mark.parametrize("case", OTHERS)
def test_other_blocks_stay_as_they_are(case: str) -> None:
    given: dict[str, Any] = {"matrices": MATRICES, "shared": BLOCK, "gate": None, "activation": SILU, "chosen": 4}
    joined = beside_shared(**given)
    assert joined is not None and joined.shared == 2
    assert beside_shared(**{**given, **OTHERS[case]}) is None
