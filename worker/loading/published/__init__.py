"""Quantised formats that models are published in: one file for each, which reads a projection's tensors as codes.

format.py              what a format says about a projection, and the check of its tensors' types and shapes
fp8.py                 e4m3 with a scale for a tensor, or for each block (DeepSeek, Qwen: quant_method fp8)
compressed_tensors.py  fp8, int8, packed int4 and int8, nvfp4 (quant_method compressed-tensors)
awq.py, gptq.py        packed int4 in groups; packed int4 and int8 in groups, also in the order of activations
mxfp4.py               4-bit floats with an exponent for each 32, of experts (gpt-oss)
nvfp4.py               4-bit floats with an e4m3 scale for each 16; also fp8 of ModelOpt (quant_method modelopt)
bitsandbytes.py        NF4, with and without quantised scales

Law: a format is refused by its name before a tensor is read, and a damaged one by the tensor's name. Formats know
nothing of devices: `quantised_reader` reads their tensors, and `kernels.stored` has what becomes of them.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from kvforge.protocol.errors import UnsupportedModel

from . import awq, bitsandbytes, compressed_tensors, fp8, gptq, mxfp4, nvfp4
from .format import PublishedFormat, Wanted, check_tensors

PARSERS = {
    "fp8": fp8.parse,
    "compressed-tensors": compressed_tensors.parse,
    "awq": awq.parse,
    "gptq": gptq.parse,
    "mxfp4": mxfp4.parse,
    "modelopt": nvfp4.parse_modelopt,
    "bitsandbytes": bitsandbytes.parse,
}


def parse_format(values: Mapping[str, Any], model: str) -> PublishedFormat:
    """Parse a `quantization_config`.

    Args:
        values: Its content.
        model: The name for errors.

    Returns:
        The format.

    Raises:
        UnsupportedModel: The format, or one of its settings, is not served.
    """
    method = values.get("quant_method")
    if method not in PARSERS:
        raise UnsupportedModel(model, f"its weights are quantised by {method!r}, which kvforge does not read")
    return PARSERS[method](values, model)


__all__ = ["PARSERS", "PublishedFormat", "Wanted", "check_tensors", "parse_format"]
