"""Names that settings may have, known without torch: the command line checks them before it starts a process."""

from __future__ import annotations

DEVICES = ("auto", "cpu", "cuda", "hip")
DTYPES = ("auto", "float32", "float16", "bfloat16")
KV_DTYPES = (*DTYPES, "int8", "fp8")
WEIGHT_DTYPES = ("dtype", "auto", "fp8", "int8", "int4")
STATE_DTYPES = ("float32", "bfloat16", "float16")
LOAD_FORMATS = ("auto", "gguf", "safetensors", "dummy")
