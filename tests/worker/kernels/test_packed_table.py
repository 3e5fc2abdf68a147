"""The embedding of a tied model is read from the packed head if every number matches; otherwise it is kept."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from kvforge.worker.device.device import Device
from kvforge.worker.kernels import packed_table
from kvforge.worker.kernels.packed import PackedOperations, packing_problem
from kvforge.worker.kernels.packed_table import PackedTable, look_up, table_of
from kvforge.worker.loading.model import LoadedModel

CPU = Device("cpu", torch.device("cpu"), "CPU")
pytestmark = pytest.mark.usefixtures("quick_loads")
DTYPES = tuple(dtype for dtype in (torch.float32, torch.bfloat16) if not packing_problem(CPU, dtype))


def random(n: int, k: int, dtype: torch.dtype) -> torch.Tensor:
    return torch.randn(n, k, generator=torch.Generator().manual_seed(n * k)).to(dtype)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(("n", "k"), [(64, 32), (97, 64), (100, 33), (1000, 576), (5000, 47)])
def test_every_row_is_found_in_the_packed_weight(n: int, k: int, dtype: torch.dtype) -> None:
    weight = random(n, k, dtype)
    weight[n // 2, k // 2], weight[0, 0] = float("nan"), -0.0
    packed = torch.ops.mkldnn._reorder_linear_weight(weight, 16)
    table = table_of(packed, weight)
    assert table is not None and table.shape == (n, k) and table.dtype == dtype
    integer = packed_table.INTEGERS[dtype.itemsize]
    ids = torch.arange(n).flip(0)
    found = look_up(ids, table)
    assert found.is_contiguous() and torch.equal(found.view(integer), weight[ids].view(integer))
    assert torch.equal(look_up(ids[:1], table).view(integer), look_up(ids[:1], weight).view(integer))
    assert torch.equal(table.dense().view(integer), weight.view(integer))
    del packed  # the table keeps a reference
    assert torch.equal(look_up(ids, table).view(integer), weight[ids].view(integer))


@pytest.mark.parametrize("turned", [False, True])
def test_a_weight_that_lies_as_it_was_or_turned_is_found(turned: bool) -> None:
    """oneDNN uses these layouts on other chips."""
    weight = random(97, 33, torch.float32)
    laid_out = weight.t().contiguous() if turned else weight
    guesses = list(packed_table._guesses(laid_out.flatten(), weight))
    right = [guess for guess in guesses if packed_table._is_weight(guess, weight)]
    assert right
    table = PackedTable(weight, right[0])
    assert torch.equal(table.rows(torch.tensor([96, 3, 3])), weight[[96, 3, 3]])


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("place", [(0, 0), (63, 31), (64, 5), (199, 40)])
def test_one_number_that_is_elsewhere_is_seen(
    place: tuple[int, int], dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    weight = random(200, 41, dtype)
    packed = torch.ops.mkldnn._reorder_linear_weight(weight, 16)
    weight[place] += 1
    for numbers in (packed_table.COMPARED_NUMBERS, 64):  # all tiles at once, and one by one
        monkeypatch.setattr(packed_table, "COMPARED_NUMBERS", numbers)
        assert table_of(packed, weight) is None


def test_a_plain_weight_is_no_packed_one() -> None:
    assert table_of(random(8, 8, torch.float32), random(8, 8, torch.float32)) is None


def test_a_table_takes_part_in_no_computation(cpu: Device) -> None:
    weight = random(64, 16, torch.float32)
    table = table_of(PackedOperations(cpu).pack(weight), weight)
    assert table is not None
    with pytest.raises(TypeError, match="does not support a packed table"):
        torch.add(table, 1)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("model_type", ["llama", "qwen3"])
@torch.inference_mode()
def test_a_tied_model_computes_what_it_did(
    model_type: str,
    dtype: torch.dtype,
    tiny: Callable[..., LoadedModel],
    eager_logits: Callable[..., torch.Tensor],
    paged_logits: Callable[..., list[torch.Tensor]],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    name, ids = str(dtype).removeprefix("torch."), list(range(5, 30))
    found = []
    for known in (True, False):
        if not known:
            monkeypatch.setattr("kvforge.worker.loading.fusion.table_of", lambda *_: None)
        model = tiny(model_type, dtype=name, tie_word_embeddings=True)
        assert model.fused is not None and isinstance(model.fused.table, PackedTable) == known
        embedding = model.module.get_input_embeddings()
        assert model.vocab_size == embedding.num_embeddings == len(embedding.weight)
        found.append(
            (
                paged_logits(model, [ids], [[20], *[[1]] * 5])[0],
                eager_logits(model, ids),
                model.module.state_dict()["model.embed_tokens.weight"],
                sorted(model.module.state_dict()),
            )
        )
    (logits, eager, table, names), (plain_logits, plain_eager, plain_table, plain_names) = found
    tolerance = 1e-5 if dtype == torch.float32 else 3e-2  # without a table this head is not packed
    assert torch.allclose(logits, plain_logits, rtol=tolerance, atol=tolerance * float(plain_logits.abs().max()))
    assert torch.allclose(eager, plain_eager, rtol=tolerance, atol=tolerance * float(plain_eager.abs().max()))
    assert torch.equal(table, plain_table) and names == plain_names
