"""A request's answer has the same bits as alone, whatever ran beside it and whatever happened to its KV."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from random import Random
from typing import Any

import pytest
import torch

from kvforge.protocol.errors import KvforgeError
from kvforge.worker.device.device import Device, open_device
from kvforge.worker.loading.load import load_model
from kvforge.worker.loading.model import LoadedModel
from tests import fresh
from tests.amount import examples
from tests.worker.loading.random_models import DESCRIBED, save
from tests.worker.step.company import FIELDS, Alone, Company, Request, compare, draw, wide_model

CASES = json.loads((Path(__file__).parents[2] / "data" / "smollm2_sample.json").read_text(encoding="utf-8"))["cases"]
NARROW = {
    "hidden_size": 256,
    "intermediate_size": 704,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "head_dim": 64,
    "vocab_size": 4000,
}
ON_CPU = [
    pytest.param(("llama", "float32", "auto", "auto"), marks=pytest.mark.soak),  # as Qwen2 below, without its biases
    pytest.param(("llama", "float32", "int8", "auto"), marks=pytest.mark.soak),  # as Gemma 3's below
    ("llama", "float32", "fp8", "auto"),
    ("llama", "bfloat16", "auto", "auto"),
    pytest.param(("llama", "float16", "auto", "auto"), marks=pytest.mark.soak),  # as GPT-2's below
    pytest.param(("llama", "float32", "auto", "int8"), marks=pytest.mark.soak),  # as Granite's below
    pytest.param(("qwen3", "float32", "float16", "auto"), marks=pytest.mark.soak),  # as Qwen2 MoE's below
    ("qwen2", "float32", "auto", "auto"),
    ("mistral", "float32", "auto", "auto"),
]
MOST = 16 + examples(24)  # tokens of an answer
PROMPT_TOKENS = 112  # of a held prompt, more than a step takes
UNDESCRIBED = ("gpt2",)
FP8_BESIDE = ("gpt2", "float32", "fp8", "auto")  # a soak test: fp8 is Llama's in `make test`, and Conv1D in float16
# By their descriptions and through transformers: joined products, scaled embeddings, Conv1D, experts, a gate of one
# number, layer norms, norms of whole rows, queries scaled by position; inner sizes that are no multiple of a vector.
OTHERS = [
    ("phi3", "float32", "auto", "auto"),
    ("gemma3_text", "bfloat16", "int8", "auto"),
    FP8_BESIDE,
    ("gpt2", "float16", "auto", "auto"),
    ("mixtral", "bfloat16", "auto", "auto"),
    ("qwen2_moe", "float32", "float16", "auto"),
    ("cohere", "float32", "bfloat16", "auto"),
    ("olmo2", "float32", "auto", "auto"),
    ("granite", "float32", "auto", "int8"),
    ("ministral3", "bfloat16", "auto", "auto"),
]
ON_GPU = [
    (kind, dtype, kv_dtype, "auto")
    for kind in ("llama", "qwen3")
    for dtype in ("bfloat16", "float16", "float32")
    for kv_dtype in ("auto", "int8", "fp8")
] + [("mistral", dtype, kv_dtype, "auto") for dtype in ("bfloat16", "float32") for kv_dtype in ("auto", "int8")]

OTHERS_ON_GPU = [
    (kind, dtype, kv_dtype, "auto")
    for kind in ("phi3", "gemma3_text", "gpt2", "mixtral", "qwen2_moe", "cohere", "olmo2", "glm4")
    for dtype, kv_dtype in (("bfloat16", "auto"), ("float16", "int8"), ("float32", "fp8"))
]


def on_a_gpu(test: Callable[..., None]) -> Callable[..., None]:
    """Mark a GPU test, and skip it without a GPU."""
    return pytest.mark.gpu(pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")(test))


def difference(model: LoadedModel, count: int, seed: int, rows_max: int, longest: int) -> tuple[str, Company]:
    """Return the first difference between batched and alone ("" if none), and a summary."""
    random = Random(seed)
    vocabulary = model.vocab_size
    prefixes = [[random.randrange(vocabulary) for _ in range(random.randint(20, 120))] for _ in range(3)]
    requests: list[Request] = [draw(random, number, prefixes, longest, vocabulary, MOST) for number in range(count)]
    graph_rows_max = 0 if model.device.computes_on_cores else rows_max
    company = Company(model, random, rows_max, 256, graph_rows_max)
    alone = Alone(model, graph_rows_max=min(4, graph_rows_max))
    try:
        requests += company.play(requests, forks=count // 4, deaths=2)
        return compare(alone, requests), company
    finally:
        company.close()
        alone.close()


def served(folder: Path, device: Device, case: tuple[str, str, str, str], **fields: object) -> LoadedModel:
    """Return the case's model. Skip if this CPU does not support it; a GPU supports all."""
    model_type, dtype, kv_dtype, weight_dtype = case
    try:
        fields = FIELDS.get(model_type, {}) | fields
        return wide_model(folder, device, dtype, kv_dtype, weight_dtype, model_type=model_type, **fields)
    except KvforgeError as error:
        if not device.computes_on_cores:
            raise
        pytest.skip(f"{device.name}: {error}")


@pytest.mark.parametrize("case", ON_CPU, ids="-".join)
def test_company_changes_no_bit(tmp_path: Path, case: tuple[str, str, str, str]) -> None:
    model = served(tmp_path, open_device("cpu"), case, **NARROW)
    if model.unsteady:
        pytest.skip(f"not promised here: {model.unsteady}")
    problem, company = difference(model, 9 + examples(7), seed=1, rows_max=12, longest=200)
    assert not problem, problem
    assert company.evictions and company.hits and company.copies and company.forks and company.deaths, company.summary()


# In `make test`: one with experts and one without. The others through transformers are soak tests, where the same
# modules are replaced. All run by their descriptions in `make test`.
BY_TRANSFORMERS = ("mixtral", "cohere")


@pytest.fixture
def described(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> bool:
    """Whether a described family runs by its description, or through transformers as others do."""
    if request.param == "by transformers":
        monkeypatch.setattr("kvforge.worker.loading.parts.family_of", lambda _module: None)
    return bool(request.param == "described")


def both_ways(cases: list[tuple[str, str, str, str]], soak: bool) -> list[Any]:
    """Return each case by its description and, if it has one, through transformers; `soak`: some as soak tests."""
    found = [
        pytest.param(
            case,
            "described",
            id=f"{'-'.join(case)}-described",
            marks=[pytest.mark.soak] if soak and case == FP8_BESIDE else [],
        )
        for case in cases
    ]
    for case in cases:
        marks = [pytest.mark.soak] if soak and case[0] not in BY_TRANSFORMERS else []
        if case[0] not in UNDESCRIBED:
            found.append(pytest.param(case, "by transformers", id=f"{'-'.join(case)}-by transformers", marks=marks))
    return found


@pytest.mark.parametrize(("case", "described"), both_ways(OTHERS, soak=True), indirect=["described"])
def test_company_changes_no_bit_of_other_families(
    tmp_path: Path, case: tuple[str, str, str, str], described: bool
) -> None:
    """The layers and the replaced modules are deterministic, or the worker claims no determinism."""
    fields = NARROW | {"intermediate_size": 700, "num_key_value_heads": 2, "max_position_embeddings": 1024}
    model = served(tmp_path, open_device("cpu"), case, **fields | FIELDS.get(case[0], {}))
    assert (model.fused is not None) == (described and case[0] not in UNDESCRIBED)
    if model.unsteady:
        pytest.skip(f"not promised here: {model.unsteady}")
    problem, company = difference(model, 8, seed=1, rows_max=8, longest=80)
    assert not problem, problem
    assert company.evictions and company.hits and company.deaths, company.summary()


@pytest.mark.parametrize("name", fresh.of_the_day(DESCRIBED, 3))
def test_company_changes_no_bit_of_any_described_family(tmp_path: Path, name: str) -> None:
    model_type, fields = DESCRIBED[name]
    save(tmp_path / "model", model_type, fields | {"max_position_embeddings": 1024}, torch.bfloat16)
    model = load_model(tmp_path / "model", device=open_device("cpu"), block_size=16, dtype="bfloat16")
    assert model.fused is not None
    if model.unsteady:
        pytest.skip(f"not promised here: {model.unsteady}")
    problem, company = difference(model, 8, seed=1, rows_max=8, longest=80)
    assert not problem, problem
    assert company.evictions and company.hits and company.deaths, company.summary()


@on_a_gpu
@pytest.mark.parametrize("block_size", [32, 128])
def test_windows_over_large_blocks_change_no_bit(tmp_path: Path, block_size: int) -> None:
    """The window's first token has a different position in its block for every row."""
    case = ("mistral", "bfloat16", "auto", "auto")
    model = served(tmp_path, open_device("auto"), case, block_size=block_size, sliding_window=block_size + 37)
    assert not model.unsteady, "the promise is made for this model"
    problem, company = difference(model, 100, seed=3, rows_max=40, longest=700)
    assert not problem, problem
    assert company.evictions and company.hits and company.copies and company.forks and company.deaths, company.summary()


@on_a_gpu
@pytest.mark.parametrize("case", ON_GPU, ids="-".join)
def test_company_changes_no_bit_on_a_gpu(tmp_path: Path, case: tuple[str, str, str, str]) -> None:
    model = served(tmp_path, open_device("auto"), case)
    assert not model.unsteady, "the promise is made for this model"
    problem, company = difference(model, 100, seed=2, rows_max=40, longest=700)
    assert not problem, problem
    assert company.evictions and company.hits and company.copies and company.forks and company.deaths, company.summary()


@on_a_gpu
@pytest.mark.parametrize(("case", "described"), both_ways(OTHERS_ON_GPU, soak=False), indirect=["described"])
def test_company_changes_no_bit_of_other_families_on_a_gpu(
    tmp_path: Path, case: tuple[str, str, str, str], described: bool
) -> None:
    model = served(tmp_path, open_device("auto"), case)
    assert (model.fused is not None) == (described and case[0] not in UNDESCRIBED)
    assert not model.unsteady, "the promise is made for this model"
    problem, company = difference(model, 50, seed=4, rows_max=40, longest=500)
    assert not problem, problem
    assert company.evictions and company.hits and company.copies and company.forks and company.deaths, company.summary()


def test_fast_is_said_to_be_fast(tmp_path: Path) -> None:
    model = served(tmp_path, open_device("cpu", steady=False), ("llama", "float32", "auto", "auto"), **NARROW)
    assert model.info.determinism == "fast" and not model.wants_kinds


@pytest.mark.model
def test_the_held_prompts_have_one_answer_in_bfloat16(smollm2_path: Path) -> None:
    """A real model in 16 bits: alone, batched, preempted, forked, on a worker that crashes. Only one of the two long
    prompts, and of it the part that takes two steps: a CPU without bfloat16 instructions takes 50 ms for a token."""
    model = load_model(smollm2_path, dtype="bfloat16", device=open_device("cpu"), block_size=16)
    if model.unsteady:
        pytest.skip(f"not promised here: {model.unsteady}")
    prompts = [case["prompt_tokens"] for case in CASES]
    prompts.remove(max(prompts, key=len))
    requests = [Request(i, prompt[:PROMPT_TOKENS], 6, 7, 0.0) for i, prompt in enumerate(prompts)]
    company, alone = Company(model, Random(3), 4, PROMPT_TOKENS - 16, 0), Alone(model)
    try:
        forked = company.play(requests, forks=2, deaths=1)
        assert compare(alone, requests + forked) == ""
        assert company.evictions and company.deaths, company.summary()
    finally:
        company.close()
        alone.close()
