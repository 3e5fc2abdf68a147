"""Refuses models by their config.json, before weights are fetched and again before they are read.

Only definite cases are refused here. Whether a decoder can be served is known once transformers has built it.
"""

from __future__ import annotations

from typing import Any

from kvforge.protocol.errors import UnsupportedModel

DEQUANTISED = ("fp8", "mxfp4")  # transformers dequantises them too
# The worker's `loading.published` reads them.
SERVED = (*DEQUANTISED, "awq", "gptq", "compressed-tensors", "modelopt", "bitsandbytes")
FORMATS = {"fbgemm_fp8": "FBGEMM FP8"}
PLAIN_MODEL = "use the folder of the unquantised model, or its GGUF file"
# Endings of the names of classes that generate text.
WRITES = ("ForCausalLM", "LMHeadModel", "ForConditionalGeneration", "ForImageTextToText", "ForVision2Seq")
VISION = ("ForImageClassification", "ForObjectDetection", "VisionModel", "ForDepthEstimation", "ForMaskedImageModeling")
VISION_TYPES = frozenset(
    {"vit", "siglip", "siglip2", "clip", "dinov2", "dinov3_vit", "swin", "convnext", "beit", "deit"}
)


def check_config(config: dict[str, Any], model: str) -> None:
    """Refuse a model by the content of its config.json.

    Args:
        config: The parsed file.
        model: The name in the refusal.

    Raises:
        UnsupportedModel: An unsupported quantised format, a vision-only model, or an adapter.
    """
    if "peft_type" in config:
        problem = f"it holds only an adapter (peft_type {config['peft_type']!r}): merge it into its model"
        raise UnsupportedModel(model, problem)
    check_quantisation(config, model)
    text = config.get("text_config")
    if isinstance(text, dict):
        check_quantisation(text, model)
    _check_kind(config, model)


def check_quantisation(config: dict[str, Any], model: str) -> None:
    """Refuse a quantised format by its name, unless a worker reads it.

    Raises:
        UnsupportedModel: The format is not served.
    """
    wanted = config.get("quantization_config", config.get("compression_config"))
    if wanted is None:
        return
    if not isinstance(wanted, dict):
        problem = f"its quantization_config is {repr(wanted)[:100]}: expected an object with quant_method"
        raise UnsupportedModel(model, problem)
    method = wanted.get("quant_method")
    if method in SERVED or (not method and not _asks_for_something(wanted)):
        return
    kind = FORMATS.get(method, method) if isinstance(method, str) and method else "an unnamed method"
    problem = f"its weights are quantised by {kind} (quantization_config.quant_method is {method!r})"
    raise UnsupportedModel(model, f"{problem}, which kvforge does not serve: {PLAIN_MODEL}")


def _check_kind(config: dict[str, Any], model: str) -> None:
    names = config.get("architectures")
    classes = [name for name in names if isinstance(name, str)] if isinstance(names, list) else []
    if any(name.endswith(WRITES) for name in classes):
        return
    kind = config.get("model_type")
    if any(name.endswith(VISION) for name in classes) or (kind in VISION_TYPES and "text_config" not in config):
        what = classes[0] if classes else kind
        raise UnsupportedModel(model, f"it is a vision-only model ({what}): only text decoders are served")


def _asks_for_something(values: dict[str, Any]) -> bool:
    """Return whether a quantisation is enabled: old files disable bitsandbytes explicitly ({"load_in_4bit": false})."""
    rest = {name: value for name, value in values.items() if name not in ("load_in_4bit", "load_in_8bit")}
    return bool(rest) or any(values.values())
