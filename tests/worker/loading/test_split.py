"""Several ranks answer as one process does, whatever the plan, and no rank holds more than its part."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file

from kvforge.models.files import stored_tensors
from kvforge.worker.device.device import open_device
from kvforge.worker.kernels.packed import quantising_problem
from kvforge.worker.loading import split, streamed_files
from kvforge.worker.loading.configuration import read_config
from kvforge.worker.loading.model import LoadedModel
from kvforge.worker.loading.report import LoadReport
from kvforge.worker.loading.slices import VOCABULARY, plan_of
from kvforge.worker.loading.source import find_source
from kvforge.worker.loading.split import build_split
from tests.amount import examples
from tests.worker.loading.random_models import LATENT, YARN_BY_POSITION
from tests.worker.loading.several import say, several
from tests.worker.loading.test_composite import whole

pytestmark = pytest.mark.usefixtures("quick_loads")

BASE: dict[str, Any] = {
    "vocab_size": 256,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "initializer_range": 0.2,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
}
EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32}
# One model for each style of plan or special case.
MODELS: dict[str, dict[str, Any]] = {
    "llama": {"attention_bias": True, "mlp_bias": True},  # columns, rows, gathered head; biases of sums added once
    "qwen2": {"num_key_value_heads": 1},  # fewer K and V heads than ranks: both ranks hold the same head
    "qwen3": {"tie_word_embeddings": True, "head_dim": 16},  # a tied head, norms of heads
    "phi3": {},  # queries, keys and values joined, and gate and up
    "glm4": {"head_dim": 16},  # gate and up joined
    "mixtral": {"num_local_experts": 4},  # experts, stored one by one under other names
    "qwen3_moe": {"head_dim": 16, **EXPERTS},
    "gemma2": {"head_dim": 16},
    "olmo2": {},  # norms over all heads
    "glm4_moe": {  # a stored buffer
        "head_dim": 16,
        "n_routed_experts": 4,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 32,
        "n_shared_experts": 1,
        "first_k_dense_replace": 1,
        "n_group": 1,
        "topk_group": 1,
    },
    "deepseek_v3": {  # latents that both ranks have, and heads that they divide, without a plan
        **LATENT,
        "n_routed_experts": 4,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 32,
        "n_shared_experts": 1,
        "first_k_dense_replace": 1,
        "n_group": 1,
        "topk_group": 1,
    },
    "minicpm3": {**LATENT, "q_lora_rank": None},  # with a plan, and no latent of queries
    "granite_swa": {"layer_types": ["full_attention", "sliding_attention"]},  # sinks, one of each head
    "gemma4_text": {  # V from K
        "head_dim": 16,
        "global_head_dim": 32,
        "layer_types": ["sliding_attention", "full_attention"],
        "attention_k_eq_v": True,
        "hidden_size_per_layer_input": 0,
        "num_kv_shared_layers": 0,
    },
    "llama4_text": {  # experts of another layout
        "head_dim": 16,
        "num_local_experts": 3,
        "num_experts_per_tok": 1,
        "intermediate_size_mlp": 96,
        "no_rope_layers": [1, 0],
        "moe_layers": [0],
    },
    "mimo_v2_flash": {  # heads of V that are widened, sinks with another name in files
        "head_dim": 16,
        "v_head_dim": 8,
        "num_local_experts": 4,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 32,
        "layer_types": ["full_attention", "sliding_attention"],
        "mlp_layer_types": ["dense", "sparse"],
        "rope_parameters": {
            kind: {"rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": 0.5}
            for kind in ("full_attention", "sliding_attention")
        },
    },
    "olmo": {"clip_qkv": 0.5},  # norms without weights
    "ministral3": {"head_dim": 16, "rope_parameters": YARN_BY_POSITION},  # queries by position
    "odd": {"vocab_size": 255},  # a head that two ranks cannot divide
}
# Models of more than text: their text part is cut. One has no plan, the names of another's files begin differently.
COMPOSITE = ("mistral3", "qwen3_vl", "smolvlm")
FUSED = (
    *COMPOSITE,
    "head of its own",
    "head alone",
    "llama",
    "phi3",
    "glm4",
    "qwen2",
    "qwen3",
    "gemma2",
    "mixtral",
    "qwen3_moe",
    "granite_swa",
    "gemma4_text",
    "glm4_moe",
    "deepseek_v3",
    "minicpm3",
    "llama4_text",
    "mimo_v2_flash",
    "olmo",
    "ministral3",
    "odd",
)  # by several ranks
FUSED_ALONE = (*FUSED, "olmo2")
NO_INT8 = quantising_problem(open_device("cpu"), torch.float32, "int8")
ASKED = 1 + examples(2)  # prompts; the last answer is drawn by chance
ON_GPUS = (
    "llama",
    "qwen2",
    "phi3",
    "olmo2",
    "mixtral",
    "odd",
    "qwen3_vl",
)  # where GPUs differ from CPUs: each way to exchange


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Return a model with weights for each kind."""
    made = {}
    for kind, fields in MODELS.items():
        model_type = "llama" if kind == "odd" else kind
        config = transformers.AutoConfig.for_model(model_type, **{**BASE, **fields})
        torch.manual_seed(1)
        module = transformers.AutoModelForCausalLM.from_config(config)
        for name, parameter in module.named_parameters():
            if name.endswith(("bias", "sinks")):
                torch.nn.init.normal_(parameter, std=0.2 if name.endswith("bias") else 2.0)
        for name, buffer in module.named_buffers():
            if "correction_bias" in name:
                torch.nn.init.normal_(buffer, std=0.5)
            elif "layer_scalar" in name:
                buffer.fill_(0.7)
        made[kind] = tmp_path_factory.mktemp(kind)
        module.save_pretrained(made[kind])
    for kind in ("head of its own", "head alone"):
        made[kind] = tmp_path_factory.mktemp(kind.replace(" ", "_"))
        wrongly_tied(folders=made, to=made[kind], keeps_table=kind == "head of its own")
    for kind in COMPOSITE:
        made[kind] = tmp_path_factory.mktemp(kind)
        whole(kind, BASE["vocab_size"]).save_pretrained(made[kind])
    return made


def wrongly_tied(folders: dict[str, Path], to: Path, keeps_table: bool) -> None:
    """Write Llama's weights, with a configuration that ties the head to the embedding."""
    for file in folders["llama"].iterdir():
        (to / file.name).write_bytes(file.read_bytes())
    config = to / "config.json"
    config.write_text(config.read_text().replace('"tie_word_embeddings": false', '"tie_word_embeddings": true'))
    if not keeps_table:
        weights = load_file(to / "model.safetensors")
        del weights["model.embed_tokens.weight"]
        save_file(weights, to / "model.safetensors", metadata={"format": "pt"})


@pytest.fixture(scope="module")
def of_two(folders: dict[str, Path], tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[dict[str, Any]]]:
    """Return by kind the answers of two ranks. One pair of processes loads all models, because its start is slow."""
    models = {kind: (folder, "float32", "dtype") for kind, folder in folders.items()}
    models |= {name: (folder, "float32", "dtype") for name, folder in hopeless(folders, tmp_path_factory).items()}
    models |= {"bfloat16": (folders["qwen3"], "bfloat16", "dtype")}
    if not NO_INT8:
        models |= {"int8": (folders["qwen3"], "float32", "int8")}
    told = several(2, list(models.values()), tmp_path_factory.mktemp("meeting") / "here", ASKED)
    return {kind: [rank[place] for rank in told] for place, kind in enumerate(models)}


def hopeless(folders: dict[str, Path], tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Return models that two ranks cannot load."""
    fields = {**BASE, "num_attention_heads": 6, "num_key_value_heads": 3, "hidden_size": 96}
    odd_heads = tmp_path_factory.mktemp("odd_heads")
    config = transformers.AutoConfig.for_model("llama", **fields)
    transformers.AutoModelForCausalLM.from_config(config).save_pretrained(odd_heads)
    fields = {**BASE, "n_embd": 64, "n_head": 4, "n_layer": 2}
    unplanned = tmp_path_factory.mktemp("unplanned")
    config = transformers.AutoConfig.for_model("gpt2", **fields)
    transformers.AutoModelForCausalLM.from_config(config).save_pretrained(unplanned)
    broken = tmp_path_factory.mktemp("broken")
    for file in folders["llama"].iterdir():
        (broken / file.name).write_bytes(file.read_bytes())
    config = broken / "config.json"
    config.write_text(config.read_text().replace('"num_hidden_layers": 2', '"num_hidden_layers": 3'))
    return {"odd_heads": odd_heads, "unplanned": unplanned, "broken": broken}


@pytest.mark.parametrize("kind", [*MODELS, "head of its own", "head alone", *COMPOSITE])
def test_two_ranks_say_what_one_says(
    kind: str, folders: dict[str, Path], of_two: dict[str, list[dict[str, Any]]]
) -> None:
    alone, (first, second) = say(folders[kind], "float32", "dtype", asked=ASKED), of_two[kind]
    assert "error" not in first, first
    assert first["said"] == second["said"], "both draw the same tokens, with the same bits"
    assert [[token for token, _ in each] for each in first["said"]] == [
        [token for token, _ in each] for each in alone["said"]
    ]
    assert first["fused"] == second["fused"] == (kind in FUSED)
    assert alone["fused"] == (kind in FUSED_ALONE)
    assert first["determinism"] == alone["determinism"]
    assert first["fingerprint"] == second["fingerprint"] != alone["fingerprint"]


@pytest.fixture(scope="module")
def of_two_gpus(folders: dict[str, Path], tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[dict[str, Any]]]:
    models = [(folders[kind], "float32", "dtype") for kind in ON_GPUS]
    told = several(2, models, tmp_path_factory.mktemp("meeting") / "gpus", device="cuda")
    return {kind: [rank[place] for rank in told] for place, kind in enumerate(ON_GPUS)}


@pytest.mark.gpu
@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
@pytest.mark.parametrize("kind", ON_GPUS)
def test_two_gpus_say_what_one_says(
    kind: str, folders: dict[str, Path], of_two_gpus: dict[str, list[dict[str, Any]]]
) -> None:
    """Fused layers exchange through each other's memory, transformers' layers by the library."""
    alone, (first, second) = say(folders[kind], "float32", "dtype", device=open_device("cuda")), of_two_gpus[kind]
    assert "error" not in first, first
    assert first["said"] == second["said"], "both draw the same tokens, with the same bits"
    assert [[token for token, _ in each] for each in first["said"]] == [
        [token for token, _ in each] for each in alone["said"]
    ]
    assert first["fused"] == second["fused"] == (kind in FUSED)
    assert alone["fused"] == (kind in FUSED_ALONE)
    assert ("each other's memory" in first["ranks"]) == (kind in FUSED), first["ranks"]


@pytest.mark.parametrize("kind", ["llama", "mixtral"])
def test_a_rank_holds_its_part_alone(
    kind: str, folders: dict[str, Path], of_two: dict[str, list[dict[str, Any]]]
) -> None:
    """Everything but the embedding and the norms is cut in two."""
    whole = sum(each.numel() for each in load(folders[kind]).parameters())
    shared = sum(
        each.numel() for name, each in load(folders[kind]).named_parameters() if "norm" in name or "embed" in name
    )
    for rank in of_two[kind]:
        if not rank["fused"]:  # packed weights are not in the module
            assert rank["numbers"] <= shared + (whole - shared) // 2 + 4 * BASE["hidden_size"] * 4
    expected = MODELS[kind].get("num_key_value_heads", 2) // 2
    assert {rank["kv_heads"] for rank in of_two[kind]} == {expected}


def load(folder: Path) -> Any:
    """transformers' own."""
    return transformers.AutoModelForCausalLM.from_pretrained(folder)


@pytest.mark.parametrize(
    "kind", [pytest.param("int8", marks=pytest.mark.skipif(bool(NO_INT8), reason=NO_INT8)), "bfloat16"]
)
def test_weights_in_fewer_bits(kind: str, of_two: dict[str, list[dict[str, Any]]]) -> None:
    """The same weights in fewer bits: each rank quantises its part."""
    if kind == "int8" and NO_INT8:
        pytest.skip(NO_INT8)
    first, second = of_two[kind]
    assert "error" not in first, first
    assert first["said"] == second["said"]


@pytest.mark.parametrize(
    ("kind", "why"),
    [
        ("odd_heads", "k_proj has 3 K and V heads, which 2 ranks cannot divide: 3 could"),
        ("unplanned", "no plan for splitting it"),
        ("broken", "missing: model.layers.2"),
    ],
)
def test_what_cannot_be_split_is_named(kind: str, why: str, of_two: dict[str, list[dict[str, Any]]]) -> None:
    for rank in of_two[kind]:
        assert why in rank.get("error", "")


def test_three_ranks_say_what_one_says(tmp_path: Path) -> None:
    """The heads of SmolLM2-135M: 9, and 3 of K and V; its head is its embedding."""
    fields = {"hidden_size": 144, "num_attention_heads": 9, "num_key_value_heads": 3, "vocab_size": 255}
    config = transformers.AutoConfig.for_model(
        "llama", **{**BASE, **fields, "intermediate_size": 192, "tie_word_embeddings": True}
    )
    torch.manual_seed(1)
    folder = tmp_path / "safetensors"
    transformers.AutoModelForCausalLM.from_config(config).bfloat16().save_pretrained(folder)
    alone = say(folder, "float32", "dtype", asked=2)
    told = several(3, [(folder, "float32", "dtype")], tmp_path / "meeting", asked=2)
    for rank in told:
        assert [[token for token, _ in each] for each in rank[0]["said"]] == [
            [token for token, _ in each] for each in alone["said"]
        ]
        assert rank[0]["kv_heads"] == 1 and rank[0]["fused"]


# Soak tests: their tensors are stored and divided as those of others.
ALIKE = ("qwen3", "qwen3_moe", "gemma2", "olmo2", "minicpm3", "granite_swa", "olmo", "ministral3")


@pytest.mark.parametrize(
    "kind", [pytest.param(kind, marks=pytest.mark.soak if kind in ALIKE else []) for kind in MODELS]
)
def test_a_rank_that_reads_in_parallel_has_the_same_bits(
    kind: str, folders: dict[str, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    source, cpu = find_source(folders[kind], "auto"), open_device("cpu")
    whole = sum(each.size for each in stored_tensors(source.model_files).values())

    def part(rank: int) -> dict[str, torch.Tensor]:
        ranks: Any = SimpleNamespace(rank=rank, count=2, texts=lambda text: [text, text])
        say: Any = lambda _phase, _share: None  # noqa: E731
        found: dict[str, torch.Tensor] = build_split(
            source, read_config(source), torch.bfloat16, cpu, ranks, say, 0
        ).state_dict()
        return found

    mapped = [part(rank) for rank in range(2)]
    read = []
    for module in (split, streamed_files):
        monkeypatch.setattr(module, "reads_in_parallel", lambda _device: True)
    monkeypatch.setattr(streamed_files.WeightStream, "line", lambda self: read.append(self.bytes_read) or "")
    for rank, want in enumerate(mapped):
        got = part(rank)
        assert got.keys() == want.keys()
        assert all(torch.equal(got[name], want[name]) for name in want)
    assert len(read) == 2
    assert max(read) <= whole
    if kind == "llama":  # most of it is in rows that a rank reads alone
        assert max(read) < 0.75 * whole


def test_a_described_decoder_keeps_its_table_whole(
    tiny: Callable[..., LoadedModel], monkeypatch: pytest.MonkeyPatch
) -> None:
    """transformers 5.17 adds the table to the plan of a class if the head is tied to it."""
    module = tiny("llama").module
    monkeypatch.setattr(
        type(module), "_tp_plan", {"model.embed_tokens": VOCABULARY, "lm_head": "colwise_gather_output"}
    )
    plan = plan_of(module)
    assert VOCABULARY not in plan.values() and plan["lm_head"] == "colwise_gather_output"


class Mapped:
    """A mapped file with one tensor."""

    def get_slice(self, _name: str) -> torch.Tensor:
        return torch.ones(4)


def test_stored_buffers_go_to_the_device() -> None:
    """A multi-token prediction module was not loaded on a GPU: its parameters were there, and a buffer was not."""
    router = torch.nn.Module()
    router.register_buffer("e_score_correction_bias", torch.zeros(4))
    module = torch.nn.Module()
    module.gate, module._keep_in_fp32_modules_strict = router, None  # type: ignore[assignment]
    device: Any = SimpleNamespace(torch_device=torch.device("meta"))
    report = LoadReport()
    used = split._read_buffers(module, {"gate.e_score_correction_bias": Mapped()}, report, torch.float32, device)
    assert used == {"gate.e_score_correction_bias"} and not report.missing and not report.mismatched
    assert router.e_score_correction_bias.device.type == "meta"
