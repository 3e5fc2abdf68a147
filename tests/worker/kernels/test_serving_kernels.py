"""The log and `kvforge health` name the kernels in use, and the reason against others."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch

pytest.importorskip("triton")

from kvforge.worker.attention import AttentionOptions, KvLayer, ReferenceAttention, prefill_plan, triton_attention
from kvforge.worker.attention.prefill_plan import gluon_problem, hopper_problem, prefill_shape
from kvforge.worker.attention.triton_attention import TritonAttention
from kvforge.worker.device.device import Device
from kvforge.worker.device.products import keeps_from_tiles
from kvforge.worker.device.targets import TARGETS
from kvforge.worker.kernels.packed import own_product
from kvforge.worker.loading.forward_context import ForwardContext
from kvforge.worker.loading.model import LoadedModel
from kvforge.worker.loading.serving_kernels import serving_kernels

F32, F16, BF16, I8 = torch.float32, torch.float16, torch.bfloat16, torch.int8
HOPPER = TARGETS["sm_90"]


@pytest.mark.parametrize("version", ["3.4.0", "3.5.1", "3.10.0", "4.0.0", "3.6.0", "3.9.1+git1"])
def test_other_versions_of_triton_do_without_the_kernel_for_hopper(version: str) -> None:
    takes = version.startswith(("3.6", "3.9"))
    assert gluon_problem(version) == ("" if takes else f"the Hopper kernel needs Triton 3.6 to 3.9, this is {version}")


@pytest.mark.parametrize(
    ("arguments", "reason"),
    [
        ((BF16, BF16, 128, 16, 0, HOPPER), ""),
        ((BF16, BF16, 128, 16, 100, HOPPER), ""),
        ((BF16, BF16, 128, 16, 0, TARGETS["sm_89"]), "this device is not a Hopper GPU"),
        ((F32, F32, 128, 16, 0, HOPPER), "the Hopper kernel reads 16-bit K and V of the model's dtype"),
        ((BF16, I8, 128, 16, 0, HOPPER), "the Hopper kernel reads 16-bit K and V of the model's dtype"),
        ((BF16, BF16, 128, 12, 0, HOPPER), "the Hopper kernel cannot read blocks of 12"),
        ((BF16, BF16, 128, 16, 10, HOPPER), "the Hopper kernel cannot read blocks of 16 with a window of 10"),
        ((BF16, BF16, 512, 16, 0, HOPPER), "the Hopper kernel cannot read heads of 512"),
    ],
)
def test_what_is_said_is_what_is_chosen(arguments: Any, reason: str) -> None:
    query, stored, head_size, block_size, window, target = arguments
    options = AttentionOptions(1.0, window=window)
    assert hopper_problem(query, stored, head_size, block_size, options, target) == reason
    if head_size <= 256:
        cache = torch.empty((3, block_size, 2, head_size), dtype=stored, device="meta")
        layer = KvLayer(cache, cache)
        assert prefill_shape(8, query, layer, options, target).hopper == (not reason)


def test_a_triton_attention_tells_its_kernels(cpu: Device, monkeypatch: pytest.MonkeyPatch) -> None:
    def told(target: str, *arguments: Any) -> tuple[str, str]:
        monkeypatch.setattr(triton_attention, "current_target", lambda _: TARGETS[target])
        return TritonAttention(cpu).describe(*arguments)

    plain, sinks = AttentionOptions(1.0), AttentionOptions(1.0, sinks=torch.zeros(2))

    assert told("sm_90", 128, BF16, BF16, 16, plain) == ("Triton, tiles for sm_90", "Triton for Hopper")
    assert told("sm_90", 128, BF16, I8, 16, plain)[1] == "Triton for Hopper after a copy, portable for few new tokens"
    assert told("sm_86", 128, BF16, BF16, 16, plain)[1] == "Triton, portable: this device is not a Hopper GPU"
    assert told("sm_90", 128, BF16, BF16, 16, sinks)[1] == "Triton for Hopper"
    assert told("sm_90", 300, BF16, BF16, 16, plain) == ("plain torch: no kernel supports heads of 300",) * 2
    monkeypatch.setattr(prefill_plan, "gluon_problem", lambda: "Triton is too old")
    assert told("sm_90", 128, BF16, BF16, 16, plain)[1] == "Triton, portable: Triton is too old"


def test_a_model_tells_what_serves_it(tiny: Callable[..., LoadedModel], monkeypatch: pytest.MonkeyPatch) -> None:
    model = tiny("llama")
    served, problem = "Numba for", model.device.cpu_kernels_problem
    if problem:
        served = f"plain torch: {problem}"
    told = serving_kernels(model)
    assert told["decode"] == told["prefill"] and told["decode"].startswith(served)
    others = {what: told[what] for what in ("decode", "prefill")}
    others |= {"sampling": served if problem else "Numba; plain torch for filters, penalties and log-probabilities"}
    others["determinism"] = "batch-invariant"
    between = "" if problem else "; Numba between the products"
    ours = {own_product(weight) is not None for weight in model.packed_weights()}
    assert ours == {not problem and torch.backends.cpu.get_cpu_capability() == "AVX2"}
    by = "Numba in oneDNN's tiles" if True in ours else "oneDNN"
    assert serving_kernels(model) == others | {"layers": f"{by}, weights packed at load{between}"}
    with monkeypatch.context() as other:  # an unknown oneDNN layout for some weights
        found = iter((None, None))
        other.setattr("kvforge.worker.loading.serving_kernels.own_product", lambda each: next(found, own_product(each)))
        some = "Numba in oneDNN's tiles and oneDNN" if True in ours else "oneDNN"
        assert serving_kernels(model)["layers"].startswith(f"{some}, weights packed")
    monkeypatch.setattr("kvforge.worker.loading.fusion.table_of", lambda *_: None)  # an unknown oneDNN layout
    wide = {"tie_word_embeddings": True, "vocab_size": 997}  # most of the model, so it is not stored twice
    head = f"{by}, weights packed at load; the head, tied to the embedding, in plain torch{between}"
    assert serving_kernels(tiny("llama", **wide))["layers"] == head
    assert serving_kernels(tiny("llama", dtype="float16"))["layers"] == "plain torch: float16 is not packed"
    assert serving_kernels(tiny("llama", kernels=False))["layers"] == "plain torch: kernels = 'reference'"
    context = ForwardContext(ReferenceAttention())
    without = replace(model, device=replace(model.device, kernels=False), fused=None, context=context)
    told = serving_kernels(without)
    assert told["decode"] == told["sampling"] == "plain torch: kernels = 'reference'"
    assert told["layers"] == "transformers' own: LlamaForCausalLM is run one operation at a time"
    monkeypatch.setattr(Device, "runs_kernels", True)
    told = serving_kernels(replace(model, context=context))
    assert (told["prefill"], told["sampling"]) == ("plain torch: attention = 'reference'", "Triton")


def test_products_by_amx_are_named(tiny: Callable[..., LoadedModel]) -> None:
    model = tiny("llama", dtype="bfloat16")
    if problem := model.device.packing_problem(BF16) or model.device.cpu_kernels_problem:
        pytest.skip(problem)
    from kvforge.worker.kernels.amx import amx_problem

    by = "oneDNN" if amx_problem() or not keeps_from_tiles() else "Numba with AMX in oneDNN's tiles"
    told = serving_kernels(model)
    assert told["layers"] == f"{by}, weights packed at load; Numba between the products"
    assert told["determinism"] == "batch-invariant"
