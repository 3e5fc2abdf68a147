"""The parts of mixers that ranks have: sections of whole heads, and groups that several ranks share."""

from __future__ import annotations

import copy
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import transformers
from accelerate import init_empty_weights

from kvforge.protocol.errors import UnsupportedModel
from kvforge.worker.loading.mixer_slices import PLANS, MixerPlan, fit_mixer, join_norm, mixer_plans
from kvforge.worker.loading.mixer_steps import step_of
from kvforge.worker.loading.sections import Section, ranges_of
from tests.worker.conftest import TINY
from tests.worker.loading.random_models import HYBRIDS, NEEDS_CACHE


def test_sections_are_cut_between_units() -> None:
    heads, groups = Section(24, 6, "heads"), Section(10, 2, "groups", is_shared=True)
    assert [heads.part(rank, 3) for rank in range(3)] == [(0, 8), (8, 16), (16, 24)]
    assert [groups.part(rank, 4) for rank in range(4)] == [(0, 5), (0, 5), (5, 10), (5, 10)]
    assert [list(groups.sharing(rank, 4)) for rank in range(4)] == [[0, 1], [0, 1], [2, 3], [2, 3]]
    assert list(groups.sharing(1, 2)) == [1]
    assert ranges_of((heads, groups), 1, 2) == ((12, 24), (29, 34))
    assert heads.problem(4) == "6 heads, which 4 ranks cannot divide: 2, 3, 6 could"
    assert groups.problem(3) == "2 groups, which 3 ranks cannot divide: 2 could"
    assert groups.problem(4) == heads.problem(6) == ""


@pytest.mark.parametrize("name", ["bamba", "falcon_h1"])
@pytest.mark.parametrize("gates_last", [False, True])
def test_ranks_that_share_a_group_compute_its_norm(name: str, gates_last: bool) -> None:
    """Four ranks, two groups: the parts together are the norm of the whole."""
    module = getattr(transformers.models, name)
    torch.manual_seed(1)
    if name == "bamba":
        whole, part = (module.modeling_bamba.BambaRMSNormGated(size, group_size=32) for size in (64, 16))
    else:
        kind = module.modeling_falcon_h1.FalconH1RMSNormGated
        whole, part = (kind(size, n_groups=2, norm_before_gate=gates_last) for size in (64, 16))
    whole.weight.data.normal_()
    x, gate, places = (
        torch.randn(1, 5, 64),
        torch.randn(1, 5, 64),
        [slice(16 * rank, 16 * rank + 16) for rank in range(4)],
    )
    scaled = x if gates_last and name == "falcon_h1" else x * torch.nn.functional.silu(gate)
    means = torch.stack([scaled[..., place].pow(2).mean(-1, keepdim=True) for place in places])
    plan = MixerPlan({}, {}, norm=("norm", Section(2, 2, "groups", is_shared=True)))
    want = whole(x, gate)
    for rank, place in enumerate(places):
        part.weight.data = whole.weight.data[place].clone()
        ranks: Any = SimpleNamespace(rank=rank, count=4, gather=lambda _: means)
        join_norm(SimpleNamespace(norm=part), plan, ranks)
        assert torch.allclose(part(x[..., place], gate[..., place]), want[..., place], atol=1e-6)


@torch.inference_mode()
def test_ranks_of_lightning_attention_have_their_heads_decays_and_the_norm_of_all() -> None:
    """In bfloat16, in which the whole mixer has rounded slopes: each rank finds the exact ones of its heads."""
    modeling: Any = pytest.importorskip("transformers.models.minimax.modeling_minimax")
    config = modeling.MiniMaxConfig(
        hidden_size=24, num_attention_heads=4, head_dim=6, num_hidden_layers=2, layer_types=["linear_attention"] * 2
    )
    torch.manual_seed(1)
    whole = modeling.MiniMaxLightningAttention(config, 1)
    whole.norm.weight.normal_()
    whole.slope_rate = whole.slope_rate.bfloat16()
    decays, means = -whole.get_slope_rate().flatten(), torch.rand(2, 3, 1)
    found = torch.randn(3, 24) * means.mean(0).sqrt()
    want = whole.norm.weight * found * torch.rsqrt(means.mean(0) + 1e-6)
    for rank, (heads, place) in enumerate(((slice(2), slice(12)), (slice(2, 4), slice(12, 24)))):
        part = copy.deepcopy(whole)
        plan = PLANS["minimax.MiniMaxLightningAttention"](part)
        part.norm.weight = torch.nn.Parameter(whole.norm.weight[place])
        fit_mixer(part, plan, rank, 2)
        assert torch.equal(part.diagonal_decay, whole.diagonal_decay[:, heads])
        ranks: Any = SimpleNamespace(rank=rank, count=2, gather=lambda _: means)
        join_norm(part, plan, ranks)
        step: Any = step_of(part)
        assert torch.equal(step.space.rates, decays[heads])
        operations: Any = SimpleNamespace(advance_state_space=lambda *_, place=place: found[:, place])
        open_gate = {"qkv_proj": torch.zeros(3, 36), "output_gate": torch.full((3, 12), torch.inf)}
        got = step.run(operations, operations, open_gate, lambda _name: None)
        torch.testing.assert_close(got, want[:, place], rtol=1e-5, atol=1e-6)


@NEEDS_CACHE
def test_what_ranks_cannot_divide_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    model_type, fields = HYBRIDS["qwen3_next"]
    config = transformers.AutoConfig.for_model(model_type, **{**TINY, **fields})
    with init_empty_weights():
        module = transformers.AutoModelForCausalLM.from_config(config)
    assert len(mixer_plans(module, 2)) == 3
    with pytest.raises(
        UnsupportedModel, match=r"linear_attn has 4 heads of V, which 3 ranks cannot divide: 2, 4 could"
    ):
        mixer_plans(module, 3)
    with pytest.raises(UnsupportedModel, match=r"linear_attn has 2 heads of K, which 4 ranks cannot divide: 2 could"):
        mixer_plans(module, 4)
    monkeypatch.delitem(PLANS, "qwen3_next.Qwen3NextGatedDeltaNet")
    reason = r"ranks = 2: its Qwen3NextGatedDeltaNet keeps a recurrent state, .*; leave out tensor_parallel and ranks"
    with pytest.raises(UnsupportedModel, match=reason):
        mixer_plans(module, 2)
