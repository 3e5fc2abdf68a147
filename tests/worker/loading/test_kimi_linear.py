"""Kimi Linear: each of its parts counts at load, also in 16 bits, and ranks read their part of each tensor."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from accelerate import init_empty_weights

from kvforge.protocol.errors import UnsupportedModel
from kvforge.worker.device.device import Device
from kvforge.worker.kernels.channel_delta_step import ChannelDeltaStep
from kvforge.worker.kernels.positions import RotaryTable
from kvforge.worker.loading import determinism, families, mixer_steps, parts
from kvforge.worker.loading.load import load_model
from kvforge.worker.loading.slices import TensorSlice, slices_of
from tests.pairs import every_pair
from tests.worker.conftest import TINY

from .random_models import HYBRIDS, NEEDS_CACHE, save

pytestmark = [
    pytest.mark.filterwarnings("ignore:.*:UserWarning:transformers.*"),
    pytest.mark.usefixtures("quick_loads"),
    NEEDS_CACHE,
]
MIXER, FAMILY = "kimi_linear.KimiLinearDeltaAttention", "kimi_linear.KimiLinearForCausalLM"
Change = Callable[[ChannelDeltaStep], ChannelDeltaStep]


def _delta(**changes: Callable[[Any], Any]) -> Change:
    """Return a change of attributes of the rule."""
    return lambda step: replace(
        step, delta=replace(step.delta, **{name: change(getattr(step.delta, name)) for name, change in changes.items()})
    )


def _projections(*order: int) -> Change:
    return lambda step: replace(step, projections=tuple(step.projections[place] for place in order))  # type: ignore[arg-type]


# One changed part of each kind.
PLANTED: dict[str, Change] = {
    "taps in reverse order": lambda step: replace(
        step, convolution=replace(step.convolution, weight=step.convolution.weight.flip(1))
    ),
    "no SiLU behind the convolution": lambda step: replace(step, convolution=replace(step.convolution, has_silu=False)),
    "rates of other heads": _delta(rates=lambda rates: rates.flip(0)),
    "biases of other numbers": _delta(biases=lambda biases: biases.flip(0)),
    "no weight of the norm": _delta(weight=torch.ones_like),
    "SiLU of the gate": _delta(has_sigmoid=lambda _: False),
    "another epsilon of the norm": _delta(epsilon=lambda _: 1.0),
    "keys for queries": _projections(1, 0, 2, 3, 4, 5),
    "inputs of the gate for those of decays": _projections(0, 1, 2, 3, 5, 4),
    "the product of the gate for that of decays": lambda step: replace(step, decay=step.gate),
    "the product of decays for that of the gate": lambda step: replace(step, gate=step.decay),
}
# All experts are chosen there: a router with close scores would choose others after another rounding.
IN_16_BITS = ("keys for queries", "no weight of the norm", "SiLU of the gate")


def first_of(names: Iterable[str], count: int) -> list[Any]:
    """Return names as parameters; those behind the first ones are soak tests."""
    return [pytest.param(name, marks=pytest.mark.soak if at >= count else ()) for at, name in enumerate(names)]


@pytest.fixture(autouse=True)
def _rows_in_company_are_tried_elsewhere(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(determinism, "_unsteady", lambda *_: "")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save(tmp_path_factory.mktemp("kimi") / "model", *HYBRIDS["kimi_linear"])


@pytest.fixture(scope="module")
def narrow(tmp_path_factory: pytest.TempPathFactory) -> Path:
    model_type, fields = HYBRIDS["kimi_linear"]
    every = fields | {"num_experts_per_tok": fields["num_local_experts"]}
    return save(tmp_path_factory.mktemp("kimi") / "narrow", model_type, every, torch.bfloat16)


@pytest.mark.parametrize(("kernels", "dtype"), every_pair([False, True], ["float32", "bfloat16", "float16"]))
def test_it_is_served_as_described(dtype: str, kernels: bool, folder: Path, cpu: Device) -> None:
    model = load_model(folder, device=replace(cpu, kernels=kernels), block_size=16, dtype=dtype)
    assert model.fused is not None and model.can_be_captured
    assert [layer.attends for layer in model.fused.layers] == [False, False, True]
    assert model.info.kv_layout == "latents" and model.geometry.states


@pytest.mark.parametrize("what", first_of(PLANTED, 4))
def test_a_wrong_part_of_a_step_is_refused_at_load(
    what: str, folder: Path, cpu: Device, monkeypatch: pytest.MonkeyPatch
) -> None:
    """transformers' layers cannot take the place of the described ones, because the pool has latents."""
    describe = mixer_steps.STEPS[MIXER]
    monkeypatch.setitem(mixer_steps.STEPS, MIXER, lambda mixer: PLANTED[what](describe(mixer)))  # type: ignore[arg-type]
    with pytest.raises(UnsupportedModel, match=r"paged attention differs"):
        load_model(folder, device=replace(cpu, kernels=False), block_size=16)


@pytest.mark.parametrize("what", first_of(IN_16_BITS, 1))
def test_a_wrong_part_of_a_step_is_refused_in_16_bits(
    what: str, narrow: Path, cpu: Device, monkeypatch: pytest.MonkeyPatch
) -> None:
    describe, device = mixer_steps.STEPS[MIXER], replace(cpu, kernels=False)
    assert load_model(narrow, device=device, block_size=16).dtype == torch.bfloat16
    monkeypatch.setitem(mixer_steps.STEPS, MIXER, lambda mixer: PLANTED[what](describe(mixer)))  # type: ignore[arg-type]
    with pytest.raises(UnsupportedModel, match=r"its logits are"):
        load_model(narrow, device=device, block_size=16)


@pytest.mark.parametrize(
    "changed",
    [
        {"inner_norm": ""},
        {"mixture": replace(families.FAMILIES[FAMILY].mixture, choice_bias="")},  # type: ignore[type-var]
        {"mixture": replace(families.FAMILIES[FAMILY].mixture, router=families._softmax)},  # type: ignore[type-var]
    ],
    ids=["no norm", "no bias of the choice", "softmax of experts"],
)
def test_a_wrong_declaration_is_refused(
    changed: dict[str, Any], folder: Path, cpu: Device, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(families.FAMILIES, FAMILY, replace(families.FAMILIES[FAMILY], **changed))
    with pytest.raises(UnsupportedModel, match=r"paged attention differs"):
        load_model(folder, device=replace(cpu, kernels=False), block_size=16)


def test_latents_that_are_rotated_are_refused(folder: Path, cpu: Device, monkeypatch: pytest.MonkeyPatch) -> None:
    def turning(self: Any, rotated: int, like: torch.Tensor) -> int:
        self.found.append(RotaryTable(like.new_ones(rotated // 2, dtype=torch.float32), 1.0))
        return len(self.found) - 1

    monkeypatch.setattr(parts._RotaryTables, "still", turning)
    with pytest.raises(UnsupportedModel, match=r"paged attention differs"):
        load_model(folder, device=replace(cpu, kernels=False), block_size=16)


def test_a_rank_has_the_numbers_of_its_heads() -> None:
    model_type, fields = HYBRIDS["kimi_linear"]
    config = transformers.AutoConfig.for_model(model_type, **{**TINY, **fields, "linear_num_heads": 4})
    with init_empty_weights():
        module = transformers.AutoModelForCausalLM.from_config(config)
    cut, layer = slices_of(module, 1, 2).cut, "model.layers.0.self_attn"
    assert cut(f"{layer}.forget_gate.A_log") == TensorSlice(2, ((2, 4),))
    assert cut(f"{layer}.forget_gate.dt_bias") == cut(f"{layer}.v_proj.weight") == TensorSlice(0, ((32, 64),))
    assert cut(f"{layer}.conv1d.weight") == TensorSlice(0, ((32, 64), (96, 128), (160, 192)))
    assert cut(f"{layer}.forget_gate.f_a_proj.weight").is_whole and cut(f"{layer}.o_norm.weight").is_whole
    assert cut(f"{layer}.o_proj.weight") == TensorSlice(1, ((32, 64),))
    assert cut("model.layers.2.self_attn.kv_b_proj.weight") == TensorSlice(0, ((48, 96),))
    with pytest.raises(UnsupportedModel, match="self_attn has 4 heads, which 3 ranks cannot divide: 2, 4 could"):
        slices_of(module, 0, 3)


def test_rows_are_read_from_the_tensors_that_have_them() -> None:
    whole = torch.arange(24).view(12, 2)
    tensors, rows = list(whole.split([4, 2, 6])), [4, 2, 6]
    assert torch.equal(TensorSlice().of_rows(tensors, rows), whole)
    for ranges in (((0, 3),), ((2, 5), (7, 8)), ((3, 12),), ((4, 6),), ((0, 1), (5, 6), (11, 12))):
        cut = TensorSlice(0, ranges)
        assert torch.equal(cut.of_rows(tensors, rows), cut.of(whole))
