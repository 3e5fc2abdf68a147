"""A model's default sampling parameters from its own files, for requests that set none.

A Hugging Face folder has them in generation_config.json, a GGUF file in `general.sampling.*`. Parameters that are not
given are off; `do_sample: false` means greedy. A model without any gets `DEFAULT_SAMPLING`: at temperature 1 a small
model produces nonsense.
"""

from __future__ import annotations

import json
import logging
from typing import Any

from kvforge.client.sampling import SamplingParams as Choice
from kvforge.protocol.errors import InvalidRequest
from kvforge.protocol.messages import MODEL_DEFAULTS, SamplingParams

from .source import Source

FILE = "generation_config.json"
GGUF_NAMES = {
    "temperature": "temp",
    "top_k": "top_k",
    "top_p": "top_p",
    "min_p": "min_p",
    "repetition_penalty": "penalty_repeat",
}
DEFAULT_SAMPLING = SamplingParams(temperature=0.6)
log = logging.getLogger("worker")


def model_sampling(source: Source) -> SamplingParams:
    """Return the model's default sampling parameters. Invalid values are logged and left out."""
    found = _of_gguf(source) if source.format == "gguf" else _of_folder(source)
    chosen: dict[str, Any] = {}
    for name, value in found.items():
        try:
            chosen[name] = getattr(Choice(**{name: value}).message(), name)
        except (InvalidRequest, TypeError, ValueError, OverflowError) as error:
            log.warning("ignoring the model's sampling default: %s", error)
    return SamplingParams(**chosen) if chosen else DEFAULT_SAMPLING


def _of_gguf(source: Source) -> dict[str, Any]:
    metadata = source.gguf_header.metadata
    keys = {name: f"general.sampling.{key}" for name, key in GGUF_NAMES.items()}
    return {name: metadata[key] for name, key in keys.items() if key in metadata}


def _of_folder(source: Source) -> dict[str, Any]:
    try:
        values = json.loads((source.folder / FILE).read_text(encoding="utf-8"))
    except FileNotFoundError:
        return {}
    except (OSError, ValueError, RecursionError) as error:
        log.warning("ignoring %s: %s", FILE, error)
        return {}
    if not isinstance(values, dict):
        log.warning("ignoring %s: not a JSON object", FILE)
        return {}
    defaults = {name: values[name] for name in MODEL_DEFAULTS if values.get(name) is not None}
    return defaults | ({"temperature": 0.0} if values.get("do_sample") is False else {})
