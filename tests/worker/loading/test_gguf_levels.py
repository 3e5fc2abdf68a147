"""GGUF files on a GPU: quantised matrices stay as codes with exactly the file's numbers."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

pytest.importorskip("triton")

from kvforge.protocol.errors import UnsupportedModel
from kvforge.worker.attention.triton_attention import is_interpreted
from kvforge.worker.device.device import Device, open_device
from kvforge.worker.kernels import experts_selftest, selftest, stored_selftest
from kvforge.worker.kernels.code_tables import pack
from kvforge.worker.kernels.stored import Codes, StoredWeight, as_int8, join_alike
from kvforge.worker.loading import gguf_levels
from kvforge.worker.loading.gguf_codes import READERS, codes_of_rows
from kvforge.worker.loading.load import load_model
from tests.worker.loading.gguf_files import random_octets, write_gguf

pytestmark = [pytest.mark.filterwarnings("ignore"), pytest.mark.usefixtures("quick_loads")]
DEVICE = open_device("auto")
runs_kernels = pytest.mark.skipif(
    not DEVICE.runs_kernels and not is_interpreted(), reason="needs a GPU or the interpreter"
)
FIELDS = {
    "vocab_size": 130,
    "hidden_size": 256,
    "intermediate_size": 256,
    "num_hidden_layers": 1,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 64,
    "max_position_embeddings": 64,
    "pad_token_id": 0,
    "tie_word_embeddings": False,
}
# What llama.cpp writes for Q4_K_M: some matrices have more bits.
MIXED = {"attn_v": "Q6_K", "ffn_down": "Q6_K", "attn_output": "Q4_K", "output.": "Q6_K", "blk.": "Q4_K"}


@pytest.fixture
def kept(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let kernels run, also where they are interpreted."""
    if not DEVICE.runs_kernels:
        monkeypatch.setattr(Device, "runs_kernels", property(lambda device: device.kernels))
        for module in (selftest, experts_selftest, stored_selftest):
            monkeypatch.setattr(module, "TOKENS", (1,))


def file_of(folder: Path, types: dict[str, str], model_type: str = "llama", **fields: Any) -> Path:
    torch.manual_seed(0)
    config = AutoConfig.for_model(model_type, **(FIELDS | fields))
    made = AutoModelForCausalLM.from_config(config).float().eval()
    architecture = {"qwen3_moe": "qwen3moe"}.get(model_type, model_type)
    metadata = {"attention.key_length": 64, "attention.value_length": 64}
    if model_type == "qwen3_moe":
        metadata |= {"expert_count": 4, "expert_used_count": 2, "expert_feed_forward_length": 256}
    return write_gguf(made, folder / "a.gguf", architecture, metadata, made_up=types)


def codes(name: str, n: int = 6, k: int = 512, seed: int = 0) -> Codes:
    return codes_of_rows(torch.from_numpy(random_octets(name, (n, k), seed)), name)


@pytest.mark.parametrize("name", READERS)
def test_codes_are_the_numbers_of_the_file(name: str) -> None:
    octets = random_octets(name, (6, 512), 0)
    found = codes_of_rows(torch.from_numpy(octets), name)
    assert np.array_equal(found.widened().numpy(), gguf.dequantize(octets, gguf.GGMLQuantizationType[name]))
    assert found.name == name and found.kind in stored_selftest.GROUPS
    bits = sum(each.nbytes for each in found.tensors()) * 8 / (6 * 512)
    assert bits == (5 if name in ("Q4_0", "IQ4_NL", "IQ4_XS", "MXFP4") else 6 if found.code == "int4" else bits)
    assert bits <= 10


def test_a_scale_that_is_not_finite_is_refused() -> None:
    octets = random_octets("Q4_K", (6, 512), 0)
    octets[2, 144 + 2 : 144 + 4] = np.array([np.inf], np.float16).view(np.uint8)
    with pytest.raises(ValueError, match="holds a scale that is not finite"):
        codes_of_rows(torch.from_numpy(octets), "Q4_K")


@pytest.mark.parametrize("name", [name for name in READERS if name != "MXFP4"])
def test_different_types_are_joined_in_8_bits(name: str) -> None:
    """Q, K and V of one product often differ."""
    one, other = codes(name), codes("Q6_K" if name != "Q6_K" else "Q4_1", seed=1)
    joined = join_alike([one, other])
    assert joined is not None and joined.code == "int8"
    assert torch.equal(joined.widened(), torch.cat((one.widened(), other.widened())))
    wide = as_int8(one)
    assert wide is not None and torch.equal(wide.widened(), one.widened())


def test_halves_are_whole_numbers_of_half_a_scale() -> None:
    wide = as_int8(codes("MXFP4"))
    assert wide is not None and torch.equal(wide.widened(), codes("MXFP4").widened())
    others = torch.randint(16, (6, 512), dtype=torch.uint8)
    quantiles = Codes("nf4", pack(others, "nf4"), torch.ones(8, 6))
    assert as_int8(quantiles) is None and join_alike([quantiles, codes("Q8_0")]) is None


@runs_kernels
@pytest.mark.parametrize(
    ("types", "kinds"),
    [
        ({"blk.": "Q8_0", "output.": "Q8_0"}, {"Q8_0": 5}),
        ({"blk.": "Q4_0"}, {"Q4_0": 4, "": 1}),
        (MIXED, {"int8": 1, "Q4_K": 2, "Q6_K": 2}),
        ({"blk.": "Q5_K"}, {"Q5_K": 4, "": 1}),
        ({"blk.": "IQ4_NL", "attn_q": "MXFP4"}, {"IQ4_NL": 4, "": 1}),
    ],
    ids=["Q8_0", "Q4_0", "Q4_K_M", "Q5_K", "IQ4_NL"],
)
def test_a_file_stays_in_its_levels(types: dict[str, str], kinds: dict[str, int], tmp_path: Path, kept: None) -> None:
    """`load_model` compares the kernels' logits with those of transformers' layers over the numbers of the codes."""
    path = file_of(tmp_path, types)
    model = load_model(path, dtype="float16", device=DEVICE, block_size=4, attention="reference")
    assert model.fused is not None
    weights = list(model.fused.product_weights())
    names = [each.codes.name if isinstance(each, StoredWeight) else "" for each in weights]
    assert {name: names.count(name) for name in names} == kinds
    assert model.info.weight_dtype in kinds
    reader = gguf.GGUFReader(path)
    stored = {each.name: gguf.dequantize(each.data, each.tensor_type) for each in reader.tensors}
    layer = model.module.model.layers[0]
    for part, name in ((layer.self_attn.o_proj, "attn_output"), (layer.self_attn.v_proj, "attn_v")):
        assert np.array_equal(part.codes.widened().cpu().numpy(), stored[f"blk.0.{name}.weight"])
    rows = stored["blk.0.attn_q.weight"].reshape(4, 32, 2, 256).swapaxes(1, 2).reshape(256, 256)
    assert np.array_equal(layer.self_attn.q_proj.codes.widened().cpu().numpy(), rows)


@runs_kernels
def test_experts_stay_in_their_levels(tmp_path: Path, kept: None) -> None:
    mixture = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 256, "decoder_sparse_step": 1}
    types = {"down_exps": "Q6_K", "exps": "Q4_K"}
    path = file_of(tmp_path, types, "qwen3_moe", **mixture)
    model = load_model(path, dtype="float16", device=DEVICE, block_size=4, attention="reference")
    assert model.fused is not None
    mixed = model.fused.layers[0].mixture
    assert mixed is not None
    up, down = mixed.matrices.up, mixed.matrices.down
    assert isinstance(up, StoredWeight) and isinstance(down, StoredWeight)
    assert (up.codes.name, down.codes.name) == ("Q4_K", "Q6_K")
    reader = gguf.GGUFReader(path)
    stored = {each.name: gguf.dequantize(each.data, each.tensor_type) for each in reader.tensors}
    both = [stored[f"blk.0.ffn_{each}_exps.weight"] for each in ("gate", "up")]
    assert np.array_equal(up.widened().cpu().numpy(), np.concatenate(both, 1))
    assert np.array_equal(down.widened().cpu().numpy(), stored["blk.0.ffn_down_exps.weight"])


@runs_kernels
@pytest.mark.parametrize("model_type", ["llama", pytest.param("qwen3_moe", marks=pytest.mark.soak)])
def test_levels_are_quantised_anew_where_that_is_faster(model_type: str, tmp_path: Path, kept: None) -> None:
    """`weight_dtype` makes codes of the levels that a file has, also of experts."""
    fields = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 256, "decoder_sparse_step": 1}
    path = file_of(tmp_path, {"blk.": "Q8_0"}, model_type, **(fields if model_type == "qwen3_moe" else {}))
    model = load_model(path, dtype="float16", weight_dtype="int8", device=DEVICE, block_size=4, attention="reference")
    assert model.fused is not None and model.info.weight_dtype == "int8"
    weights = [each for each in model.fused.product_weights() if isinstance(each, StoredWeight)]
    assert len(weights) >= 4 and {each.codes.name for each in weights} == {"int8"}
    assert {each.codes.group for each in weights} == {256}, "a scale for each row"


@runs_kernels
def test_codes_that_are_not_the_models_numbers_are_not_taken(
    tmp_path: Path, kept: None, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    path = file_of(tmp_path, {"blk.": "Q8_0"})

    def other(octets: torch.Tensor, type_name: str) -> Codes:
        changed = octets.clone()
        changed[:, 2] ^= 1
        return codes_of_rows(changed, type_name)

    monkeypatch.setattr(gguf_levels, "codes_of_rows", other)
    caplog.set_level("INFO")
    model = load_model(path, dtype="float16", device=DEVICE, block_size=4, attention="reference")
    assert model.info.weight_dtype == "float16"
    assert "blk.0.attn_output.weight stays in torch.float16: it is not the model's numbers" in caplog.text


@runs_kernels
def test_a_damaged_tensor_is_refused_by_its_name(tmp_path: Path, kept: None, monkeypatch: pytest.MonkeyPatch) -> None:
    path = file_of(tmp_path, {"blk.": "Q8_0"})

    def broken(octets: torch.Tensor, type_name: str) -> Codes:
        raise ValueError("holds a scale that is not finite")

    monkeypatch.setattr(gguf_levels, "codes_of_rows", broken)
    with pytest.raises(UnsupportedModel, match=r"its tensor blk\.0\.\S+ holds a scale that is not finite"):
        load_model(path, dtype="float16", device=DEVICE, block_size=4, attention="reference")
