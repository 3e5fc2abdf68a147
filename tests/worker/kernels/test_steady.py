"""The check at a worker's start finds products whose bits depend on how many rows they have."""

from __future__ import annotations

import pytest
import torch

from tests.worker.step.company import wide_model
from worker.device.device import open_device
from worker.kernels import row_counts
from worker.kernels.steady import unsteady_products
from worker.loading.determinism import made_steady
from worker.loading.model import LoadedModel

SHAPE = {"hidden_size": 128, "intermediate_size": 192, "num_hidden_layers": 1, "num_attention_heads": 2, "head_dim": 64}
ROWS_OFF = 33


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> LoadedModel:
    return wide_model(tmp_path_factory.mktemp("model"), open_device("cpu"), "float32", **(SHAPE | {"vocab_size": 300}))


def test_products_that_keep_to_it_pass(model: LoadedModel) -> None:
    assert model.fused is not None
    assert unsteady_products(model.fused, model.device) == ""
    assert model.info.determinism == "batch-invariant"


@pytest.mark.parametrize(
    ("operation", "named"), [("linear_parts", "the projection from attention"), ("gated", "the gated product")]
)
def test_one_bit_of_one_row_is_found(
    model: LoadedModel, operation: str, named: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where a product has so many rows, its last one is a little larger."""
    assert model.fused is not None
    real = getattr(model.fused.operations, operation)

    def off(x: torch.Tensor, *arguments: object) -> torch.Tensor:
        found: torch.Tensor = real(x, *arguments)
        if len(x) == ROWS_OFF:
            last = found[..., -1, :]
            last[0] = torch.nextafter(last[0], torch.tensor(torch.inf))
        return found

    monkeypatch.setattr(model.fused.operations, operation, off)
    problem = made_steady(model, model.fused.operations)
    assert problem.startswith(f"{named} of {ROWS_OFF} tokens has other bits")


def test_a_long_row_is_never_multiplied_by_itself() -> None:
    """oneDNN sums a single row of more than a thousand numbers in another order than several."""
    assert [row_counts.least_rows(k) for k in (64, 1024, 1025, 14336)] == [1, 1, 2, 2]
    for dtype in (torch.float32, torch.bfloat16, torch.float16):
        assert len(row_counts.padded(torch.ones(1, 1536, dtype=dtype))) == 2
        assert len(row_counts.padded(torch.ones(1, 1024, dtype=dtype))) == 1
