"""Published quantised formats: read as their specifications say, and refused by name where something is damaged.

On a CPU the numbers are dequantised at load; on a GPU, or with Triton's interpreter, the weights stay in codes.
"""

from __future__ import annotations

import importlib
import json
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import pytest
import torch
from safetensors.torch import load_file, save_file

pytest.importorskip("triton")

from kvforge.protocol.errors import UnsupportedModel
from kvforge.worker.attention.triton_attention import is_interpreted
from kvforge.worker.device.device import Device, open_device
from kvforge.worker.kernels import experts_selftest, selftest, stored_selftest
from kvforge.worker.kernels.packed import dense, quantising_problem, weight_kind
from kvforge.worker.kernels.stored import Codes, code_name, codes_of
from kvforge.worker.loading import split
from kvforge.worker.loading.coded_parts import CodedLinear, coded_experts
from kvforge.worker.loading.configuration import read_config
from kvforge.worker.loading.fingerprint import fingerprint
from kvforge.worker.loading.formats import forget_format
from kvforge.worker.loading.load import load_model
from kvforge.worker.loading.published import parse_format
from kvforge.worker.loading.quantised_reader import Published
from kvforge.worker.loading.source import find_source
from kvforge.worker.loading.verification import use_attention
from kvforge.worker.loading.weight_bytes import weight_bytes
from tests.worker.loading.published_models import CASES, OF_STATES, OF_TEXT, Case, Weights, write_checkpoint

pytestmark = [pytest.mark.filterwarnings("ignore"), pytest.mark.usefixtures("quick_loads")]
DEVICE = open_device("auto")
CPU = open_device("cpu")
runs_kernels = pytest.mark.skipif(
    not DEVICE.runs_kernels and not is_interpreted(), reason="needs a GPU or the interpreter"
)
# Soak tests: a model of experts has dense projections in the same format, or another case has each part of the format.
AGAIN = {
    "awq": "experts-awq",
    "fp8-blocks": "experts-blocks",
    "gptq": "gptq-act-order",
    "nf4": "experts-nf4",
    "nvfp4-modelopt": "experts-nvfp4",
}
each_case = pytest.mark.parametrize(
    "case",
    [pytest.param(case, marks=[pytest.mark.soak] if case.name in AGAIN else [], id=case.name) for case in CASES],
)
# Soak tests of kernels: another case has the same codes. `test_a_format_is_its_numbers` reads each format.
SAME_CODES = AGAIN | {"nf4-nested": "experts-nf4", "nvfp4": "experts-nvfp4", "packed-zeros": "experts-awq"}
each_code = pytest.mark.parametrize(
    "case",
    [pytest.param(case, marks=[pytest.mark.soak] if case.name in SAME_CODES else [], id=case.name) for case in CASES],
)
BY_NAME = {case.name: case for case in CASES}
assert all(BY_NAME[case].kind == BY_NAME[other].kind for case, other in SAME_CODES.items())
FIRST_OF_KIND = {case.kind: case for case in reversed(CASES) if case.name not in SAME_CODES}


@pytest.fixture
def kept(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let kernels run, also where they are interpreted."""
    if not DEVICE.runs_kernels:
        monkeypatch.setattr(Device, "runs_kernels", property(lambda device: device.kernels))
        for module in (selftest, experts_selftest, stored_selftest):
            monkeypatch.setattr(module, "TOKENS", (1, 9))


def apart(module: Any, plain: Any) -> float:
    """Return the largest difference of logits, relative to the largest logit."""
    tokens = torch.arange(3, 20)[None]
    device = next(module.parameters()).device
    with torch.no_grad():
        wanted = plain(input_ids=tokens, use_cache=False).logits.float()
        got = module(input_ids=tokens.to(device), use_cache=False).logits.float().cpu()
    return float((got - wanted).abs().max() / wanted.abs().max())


@each_case
def test_a_format_is_its_numbers(case: Case, tmp_path: Path) -> None:
    plain = write_checkpoint(case, tmp_path)
    model = load_model(tmp_path, dtype="float32", device=CPU, block_size=4)
    if model.fused is not None:
        use_attention(model.module, "eager")
    assert apart(model.module, plain) < 1e-4
    assert model.info.weight_dtype == "float32"


@runs_kernels
@each_code
def test_a_format_stays_as_it_is_stored(case: Case, tmp_path: Path, kept: None) -> None:
    """`load_model` compares the kernels' logits with those of transformers' layers over the numbers of the codes."""
    plain = write_checkpoint(case, tmp_path)
    model = load_model(tmp_path, dtype="float16", device=DEVICE, block_size=4, attention="reference")
    assert model.fused is not None
    names = [code_name(weight) for weight in model.fused.product_weights()]
    assert case.kind in names and names.count("") == (1 if case.name != "mxfp4" else 1 + 2 * 2)  # the head
    assert model.info.weight_dtype == case.kind
    use_attention(model.module, "eager")
    assert apart(model.module, plain) < 2e-2
    files = sum(file.stat().st_size for file in tmp_path.glob("*.safetensors"))
    assert weight_bytes(model) < 1.2 * files
    if case is FIRST_OF_KIND[case.kind]:
        no_kernels = replace(DEVICE, kernels=False)
        other = load_model(tmp_path / "plain", dtype="float16", device=no_kernels, block_size=4, attention="reference")
        assert other.info.fingerprint != model.info.fingerprint


@runs_kernels
def test_recurrent_layers_of_a_quantised_model_multiply_numbers(tmp_path: Path, kept: None) -> None:
    """The other layers, and the experts, keep their codes. Qwen3-Next in fp8 was refused on a GPU."""
    plain = write_checkpoint(OF_STATES, tmp_path)
    model = load_model(tmp_path, dtype="float16", device=DEVICE, block_size=16, attention="reference")
    assert model.fused is not None and model.info.weight_dtype == "fp8"
    coded = {name for name, part in model.module.named_modules() if isinstance(part, CodedLinear)}
    assert "model.layers.1.self_attn.q_proj" in coded
    assert not [name for name in coded if ".linear_attn." in name]
    projection = model.module.model.layers[0].linear_attn.in_proj_qkvz.weight
    assert torch.equal(projection.cpu(), plain.model.layers[0].linear_attn.in_proj_qkvz.weight.half())
    use_attention(model.module, "eager")
    assert apart(model.module, plain) < 2e-2


each_text = pytest.mark.parametrize("case", OF_TEXT, ids=[case.name for case in OF_TEXT])


@each_text
def test_the_text_part_of_a_quantised_model_with_images(case: Case, tmp_path: Path) -> None:
    """Formats but fp8 were refused, since the class of the whole model has no described layers."""
    plain = write_checkpoint(case, tmp_path)
    model = load_model(tmp_path, dtype="float32", device=CPU, block_size=16)
    assert model.fused is not None and model.info.weight_dtype == "float32"
    use_attention(model.module, "eager")
    assert apart(model.module, plain) < 1e-4


@runs_kernels
@each_text
def test_the_text_part_of_a_model_with_images_keeps_its_codes(case: Case, tmp_path: Path, kept: None) -> None:
    """It was expanded to 16 bits on a GPU in fp8."""
    plain = write_checkpoint(case, tmp_path)
    model = load_model(tmp_path, dtype="float16", device=DEVICE, block_size=16, attention="reference")
    assert model.fused is not None and model.info.weight_dtype == case.kind
    use_attention(model.module, "eager")
    assert apart(model.module, plain) < 2e-2


def test_a_text_part_that_is_not_built_without_weights_is_dequantised_by_transformers(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: Any) -> Any:
        raise NotImplementedError("Cannot copy out of meta tensor; no data!")

    build_module = importlib.import_module("kvforge.worker.loading.build")  # the package has the function by that name
    plain = write_checkpoint(OF_TEXT[1], tmp_path)
    with monkeypatch.context() as patched:
        patched.setattr(build_module, "config_for", fail)
        config = read_config(find_source(tmp_path, "auto"))
        assert build_module._family_of_text(config, "model") is None
    monkeypatch.setattr(build_module, "_family_of_text", lambda *_: None)
    model = load_model(tmp_path, dtype="float32", device=CPU, block_size=16)
    use_attention(model.module, "eager")
    assert apart(model.module, plain) < 1e-4


def test_a_quantised_model_with_recurrent_layers_is_dequantised_on_a_cpu(tmp_path: Path) -> None:
    """It is not packed, and a CPU would widen codes in each step."""
    plain = write_checkpoint(OF_STATES, tmp_path)
    model = load_model(tmp_path, dtype="float32", device=CPU, block_size=16, weight_dtype="auto")
    assert model.fused is not None and model.info.weight_dtype == "float32"
    assert not any(isinstance(part, CodedLinear) for part in model.module.modules())
    use_attention(model.module, "eager")
    assert apart(model.module, plain) < 1e-4


PROBLEM = quantising_problem(CPU, torch.float32, "int8") or quantising_problem(CPU, torch.float32, "int4")


@pytest.mark.skipif(bool(PROBLEM), reason=PROBLEM)
@pytest.mark.parametrize(
    ("name", "kinds"),
    [
        ("awq", {"int4": 8, "int8": 1}),
        pytest.param("gptq", {"int4": 8, "int8": 1}, marks=pytest.mark.soak),
        ("gptq-act-order", {"int8": 9}),  # columns in another order are quantised anew
        ("packed-zeros", {"int4": 8, "int8": 1}),
        ("fp8-blocks", {"int8": 9}),
        ("nvfp4", {"int8": 9}),
        ("nf4-nested", {"int8": 9}),
        ("experts-awq", {"int4": 4 + 16, "int8": 1}),
        ("mxfp4", {"int8": 4 + 16 + 1}),
    ],
)
def test_a_cpu_packs_the_codes(name: str, kinds: dict[str, int], tmp_path: Path, caplog: Any) -> None:
    """4 bits keep the levels of the file; what the CPU's kernels do not take is quantised anew."""
    case = BY_NAME[name]
    plain = write_checkpoint(case, tmp_path)
    caplog.set_level("INFO")
    model = load_model(tmp_path, dtype="float32", weight_dtype="auto", device=CPU, block_size=4)
    assert model.fused is not None
    assert Counter(map(weight_kind, model.fused.product_weights())) == kinds
    assert model.info.weight_dtype == ("int4" if case.kind == "int4" else "int8")
    assert ("quantised anew, to int8" in caplog.text) == (set(kinds) == {"int8"})
    use_attention(model.module, "eager")
    assert apart(model.module, plain) < (0.02 if set(kinds) == {"int4", "int8"} else 0.1)


def test_modelopts_own_file_describes_the_weights(tmp_path: Path) -> None:
    """Folders of before 2025 have it in place of a quantization_config."""
    plain = write_checkpoint(BY_NAME["nvfp4-modelopt"], tmp_path)
    file, own = tmp_path / "config.json", tmp_path / "hf_quant_config.json"
    values = json.loads(file.read_text())
    del values["quantization_config"]
    file.write_text(json.dumps(values))
    own.write_text(json.dumps({"quantization": {"quant_algo": "NVFP4", "group_size": 16, "exclude_modules": []}}))
    model = load_model(tmp_path, dtype="float32", device=CPU, block_size=4)
    use_attention(model.module, "eager")
    assert apart(model.module, plain) < 1e-4
    own.write_text("[]")
    with pytest.raises(UnsupportedModel, match=r"its hf_quant_config.json is not a JSON object"):
        load_model(tmp_path, dtype="float32", device=CPU, block_size=4)


def changed(folder: Path, change: Callable[[Weights], Weights]) -> None:
    file = folder / "model.safetensors"
    save_file({name: each.contiguous() for name, each in change(load_file(file)).items()}, file, {"format": "pt"})


def without(name: str) -> Callable[[Weights], Weights]:
    return lambda weights: {each: tensor for each, tensor in weights.items() if each != name}


def with_changed(name: str, change: Callable[[torch.Tensor], torch.Tensor]) -> Callable[[Weights], Weights]:
    return lambda weights: {each: change(tensor) if each == name else tensor for each, tensor in weights.items()}


OUTPUT = "model.layers.1.self_attn.o_proj"
EXPERT = "model.layers.0.mlp.experts.2.up_proj"
STATE = "weight.quant_state.bitsandbytes__nf4"


def octets(values: dict[str, Any]) -> torch.Tensor:
    return torch.tensor(list(json.dumps(values).encode()), dtype=torch.uint8)


DAMAGED = (
    ("awq", without(f"{OUTPUT}.scales"), f"has no tensor {OUTPUT}.scales, which AWQ in groups of 64 has"),
    ("awq", without(f"{OUTPUT}.qweight"), f"has no tensor {OUTPUT}.qweight"),
    (
        "awq",
        with_changed(f"{OUTPUT}.qzeros", lambda t: t[:1]),
        rf"{OUTPUT}.qzeros is I32 \[1, 16\], and has to be I32 \[2, 16\]",
    ),
    ("awq", with_changed(f"{OUTPUT}.scales", lambda t: t * torch.inf), f"{OUTPUT}.scales holds NaN or infinity"),
    ("gptq", with_changed(f"{OUTPUT}.g_idx", lambda t: t * 0), f"{OUTPUT}.g_idx has groups of other sizes than 64"),
    (
        "gptq",
        with_changed(f"{OUTPUT}.qweight", lambda t: t[:-1]),
        rf"{OUTPUT}.qweight is I32 \[15, 128\], and has to be",
    ),
    (
        "packed",
        with_changed(f"{OUTPUT}.weight_shape", lambda t: t + 1),
        f"{OUTPUT}.weight_shape is .129, 129., and has to be",
    ),
    ("packed", without(f"{OUTPUT}.weight_scale"), f"has no tensor {OUTPUT}.weight_scale"),
    ("packed-zeros", without(f"{OUTPUT}.weight_zero_point"), f"has no tensor {OUTPUT}.weight_zero_point"),
    ("fp8-channels", without(f"{OUTPUT}.weight_scale"), f"has no tensor {OUTPUT}.weight_scale"),
    (
        "int8-channels",
        with_changed(f"{OUTPUT}.weight", lambda t: t.int()),
        f"{OUTPUT}.weight is I32 .*, and has to be I8",
    ),
    ("experts-awq", without(f"{EXPERT}.scales"), f"has no tensor {EXPERT}.scales"),
    ("nvfp4", without(f"{OUTPUT}.weight_global_scale"), f"has no tensor {OUTPUT}.weight_global_scale, which nvfp4 has"),
    (
        "nvfp4",
        with_changed(f"{OUTPUT}.weight_scale", lambda t: t[:, ::2]),
        rf"{OUTPUT}.weight_scale is F8_E4M3 \[128, 4\], and has to be F8_E4M3 \[128, 8\]",
    ),
    (
        "nvfp4",
        with_changed(f"{OUTPUT}.weight_scale", lambda t: torch.full_like(t.float(), torch.nan).to(t.dtype)),
        f"{OUTPUT}.weight_scale holds NaN",
    ),
    (
        "nvfp4",
        with_changed(f"{OUTPUT}.weight_global_scale", lambda t: t * 0),
        f"{OUTPUT}.weight_global_scale holds NaN",
    ),
    ("nvfp4-modelopt", without(f"{OUTPUT}.weight_scale_2"), f"has no tensor {OUTPUT}.weight_scale_2"),
    ("nvfp4-modelopt", with_changed(f"{OUTPUT}.weight", lambda t: t[:, :-1]), rf"{OUTPUT}.weight is U8 \[128, 63\]"),
    ("nf4", without(f"{OUTPUT}.weight.absmax"), f"has no tensor {OUTPUT}.weight.absmax, which bitsandbytes NF4 has"),
    (
        "nf4",
        with_changed(f"{OUTPUT}.weight.absmax", lambda t: t[:-1]),
        rf"{OUTPUT}.weight.absmax is F32 \[255\], and has to be F32 or U8 \[256\]",
    ),
    (
        "nf4",
        with_changed(f"{OUTPUT}.weight.quant_map", lambda t: t.flip(0)),
        f"{OUTPUT}.weight.quant_map is not that of",
    ),
    ("nf4", with_changed(f"{OUTPUT}.{STATE}", lambda t: t[:-1]), f"{OUTPUT}.{STATE} is not a JSON object"),
    (
        "nf4",
        with_changed(f"{OUTPUT}.{STATE}", lambda _: octets({"quant_type": "nf4", "shape": [64, 256]})),
        rf"{OUTPUT}.{STATE} describes nf4 \[64, 256\], and has to describe nf4 \[128, 128\]",
    ),
    ("nf4-nested", without(f"{OUTPUT}.weight.nested_quant_map"), f"has no tensor {OUTPUT}.weight.nested_quant_map"),
    ("nf4-nested", without(f"{OUTPUT}.weight.nested_absmax"), f"has no tensor {OUTPUT}.weight.nested_absmax"),
    (
        "nf4-nested",
        with_changed(
            f"{OUTPUT}.{STATE}", lambda _: octets({"quant_type": "nf4", "shape": [128, 128], "nested_blocksize": 64})
        ),
        f"{OUTPUT}.{STATE} has nested_blocksize = 64, not 256",
    ),
)


@pytest.mark.parametrize(("name", "change", "problem"), DAMAGED, ids=lambda each: each if isinstance(each, str) else "")
def test_a_damaged_projection_is_refused_by_its_tensor(
    name: str, change: Callable[[Weights], Weights], problem: str, tmp_path: Path
) -> None:
    write_checkpoint(BY_NAME[name], tmp_path)
    changed(tmp_path, change)
    with pytest.raises(UnsupportedModel, match=problem):
        load_model(tmp_path, dtype="float32", device=CPU, block_size=4)


BROKEN = torch.full((128, 128), 0x7F, dtype=torch.uint8).view(torch.float8_e4m3fn)
MIXED = "model.layers.0.mlp.experts"


@runs_kernels
@pytest.mark.parametrize(
    ("name", "change", "problem"),
    [
        ("fp8-blocks", without(f"{OUTPUT}.weight_scale_inv"), f"has no tensor {OUTPUT}.weight_scale_inv"),
        (
            "fp8-blocks",
            with_changed(f"{OUTPUT}.weight_scale_inv", lambda t: t[:1]),
            f"{OUTPUT}.weight_scale_inv is F32 .1, 2.",
        ),
        ("fp8-blocks", with_changed(f"{OUTPUT}.weight", lambda _t: BROKEN), f"{OUTPUT}.weight holds NaN"),
        ("mxfp4", without(f"{MIXED}.down_proj_scales"), f"{MIXED}.down_proj_scales is missing"),
        (
            "mxfp4",
            with_changed(f"{MIXED}.down_proj_scales", lambda t: t * 0 + 255),
            f"{MIXED}.down_proj_scales holds NaN",
        ),
    ],
)
def test_a_damaged_projection_that_would_be_kept_is_refused(
    name: str, change: Callable[[Weights], Weights], problem: str, tmp_path: Path, kept: None
) -> None:
    write_checkpoint(BY_NAME[name], tmp_path)
    changed(tmp_path, change)
    with pytest.raises(UnsupportedModel, match=problem):
        load_model(tmp_path, dtype="float16", device=DEVICE, block_size=4, attention="reference")


SPARSE = {"quant_method": "compressed-tensors", "config_groups": {"a": {"weights": {}}}}


@pytest.mark.parametrize(
    ("values", "problem"),
    [
        ({"quant_method": "awq", "bits": 3, "group_size": 128}, "has bits = 3.*expected 4"),
        ({"quant_method": "awq", "bits": 4, "group_size": 100}, "has group_size = 100"),
        ({"quant_method": "awq", "bits": 4, "group_size": 128, "version": "marlin"}, "has version = 'marlin'"),
        ({"quant_method": "gptq", "bits": 2, "group_size": 128}, "has bits = 2.*expected 4 or 8"),
        (
            {"quant_method": "gptq", "bits": 4, "group_size": 128, "checkpoint_format": "x"},
            "has checkpoint_format = 'x'",
        ),
        ({"quant_method": "compressed-tensors", "config_groups": {}}, "has config_groups"),
        (
            {"quant_method": "compressed-tensors", "config_groups": {"a": {"weights": {}}}, "format": "marlin-24"},
            "marlin-24",
        ),
        ({"quant_method": "fp8", "weight_block_size": [128]}, "has weight_block_size"),
        ({"quant_method": "modelopt", "quant_algo": "W4A8_AWQ"}, "has quant_algo = 'W4A8_AWQ'.*expected NVFP4 or FP8"),
        (
            {"quant_method": "modelopt", "quantization": {"quant_algo": "NVFP4", "group_size": 32}},
            "has group_size = 32",
        ),
        (
            {
                "quant_method": "compressed-tensors",
                "format": "nvfp4-pack-quantized",
                "config_groups": {"a": {"weights": {"num_bits": 4, "type": "float", "strategy": "tensor"}}},
            },
            "has strategy = 'tensor'.*expected 'tensor_group' of nvfp4-pack-quantized",
        ),
        ({"quant_method": "bitsandbytes", "load_in_8bit": True}, "has load_in_4bit = None"),
        ({"quant_method": "bitsandbytes", "load_in_4bit": True}, "has bnb_4bit_quant_type = 'fp4'.*expected nf4"),
        (
            {
                "quant_method": "bitsandbytes",
                "load_in_4bit": True,
                "bnb_4bit_quant_type": "nf4",
                "bnb_4bit_quant_storage": "bfloat16",
            },
            "has bnb_4bit_quant_storage = 'bfloat16'",
        ),
        ({"quant_method": "quark"}, "'quark', which kvforge does not read"),
    ],
)
def test_a_setting_that_is_not_read_is_named(values: dict[str, Any], problem: str) -> None:
    with pytest.raises(UnsupportedModel, match=problem):
        parse_format(values, "a model")


def part_of(case: Case, folder: Path, rank: int, count: int, expert_parallel: bool = False) -> Any:
    """Return one rank's transformers model with its share of the codes, without the other ranks."""
    source = find_source(folder, "auto")
    config = read_config(source)
    ranks: Any = SimpleNamespace(rank=rank, count=count) if count > 1 else None
    forget_format(config)
    published = Published(parse_format(case.config, "a model"), keeps=True)
    quiet: Any = lambda *_: None  # noqa: E731
    with patch.object(split, "check_experts_of_ranks"):  # there is no other rank to ask
        return split.build_split(source, config, torch.float16, CPU, ranks, quiet, 0, expert_parallel, published)


def weights_of(module: Any) -> dict[str, torch.Tensor]:
    """Return the numbers of the projections and of the experts by name."""
    found = {}
    for name, part in module.named_modules():
        if isinstance(part, CodedLinear):
            found[name] = part.codes.widened()
        elif (experts := coded_experts(part)) is not None:
            found[f"{name}.up"], found[f"{name}.down"] = (
                dense(each) for each in (experts.matrices.up, experts.matrices.down)
            )
    return found


@pytest.mark.parametrize(
    "name", ["fp8-tensor", "fp8-blocks", "int8-channels", "awq", "gptq", "packed", "experts-blocks", "nvfp4", "nf4"]
)
def test_two_ranks_divide_the_codes(name: str, tmp_path: Path) -> None:
    case = BY_NAME[name]
    write_checkpoint(case, tmp_path)
    whole = weights_of(part_of(case, tmp_path, 0, 1))
    halves = [weights_of(part_of(case, tmp_path, rank, 2)) for rank in range(2)]
    assert len(whole) >= 10
    for path, numbers in whole.items():
        parts = [half[path] for half in halves]
        if path.endswith(".up"):  # gate and up are cut apart
            both = [torch.cat(each, 1) for each in zip(*(part.chunk(2, 1) for part in parts), strict=True)]
            joined = torch.cat(both, 1)
        else:
            joined = torch.cat(parts, -1 if path.endswith(("o_proj", "down_proj", ".down")) else -2)
        assert torch.equal(joined, numbers), path


@pytest.mark.parametrize("name", ["experts-awq", "mxfp4", "experts-nvfp4"])
def test_two_ranks_divide_the_experts(name: str, tmp_path: Path) -> None:
    case = BY_NAME[name]
    write_checkpoint(case, tmp_path)
    whole = weights_of(part_of(case, tmp_path, 0, 1))
    halves = [weights_of(part_of(case, tmp_path, rank, 2, expert_parallel=True)) for rank in range(2)]
    for path, numbers in whole.items():
        if "experts" in path:
            assert torch.equal(torch.cat([half[path] for half in halves]), numbers), path


def test_scales_of_mxfp4_stay_in_their_8_bits(tmp_path: Path) -> None:
    case = BY_NAME["mxfp4"]
    write_checkpoint(case, tmp_path)
    found = [coded_experts(part) for part in part_of(case, tmp_path, 0, 1).modules()]
    weights = [
        each for experts in found if experts is not None for each in (experts.matrices.up, experts.matrices.down)
    ]
    assert weights
    for weight in weights:
        codes = codes_of(weight)
        assert codes is not None and codes.kind == "e2m1 with exponents" and codes.name == "mxfp4"


def test_columns_in_the_order_of_activations_are_not_divided(tmp_path: Path) -> None:
    case = BY_NAME["gptq-act-order"]
    write_checkpoint(case, tmp_path)
    with pytest.raises(UnsupportedModel, match="cannot be divided among ranks: its 128 columns are in the order of"):
        part_of(case, tmp_path, 0, 2)


def test_one_changed_code_is_another_model(tmp_path: Path) -> None:
    case = BY_NAME["awq"]
    write_checkpoint(case, tmp_path)
    before = fingerprint(part_of(case, tmp_path, 0, 1), "float16")
    assert fingerprint(part_of(case, tmp_path, 0, 1), "float16") == before
    changed(tmp_path, with_changed(f"{OUTPUT}.qweight", lambda t: torch.cat((t[:-1], t[-1:] ^ 1))))
    assert fingerprint(part_of(case, tmp_path, 0, 1), "float16") != before


def test_no_weight_is_expanded_while_it_is_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nor while its sums for the fingerprint and its finiteness are computed."""
    case = BY_NAME["experts-blocks"]
    write_checkpoint(case, tmp_path)

    def refused(*_: object) -> None:
        raise AssertionError("a weight was expanded")

    monkeypatch.setattr(Codes, "widened", refused)
    fingerprint(part_of(case, tmp_path, 0, 1), "float16")


def test_a_model_whose_layers_are_not_described_is_refused(tmp_path: Path) -> None:
    write_checkpoint(BY_NAME["awq"], tmp_path)
    values = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(values | {"model_type": "stablelm"}))
    with pytest.raises(UnsupportedModel, match=r"AWQ in groups of 64.*stablelm has no described layers"):
        load_model(tmp_path, dtype="float32", device=CPU, block_size=4)
