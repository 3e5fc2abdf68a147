"""How a model wants its tokens drawn, as its own files say: what a request gets that names nothing.

A Hugging Face folder says it in generation_config.json, a GGUF file in `general.sampling.*`. What is said of a field is
taken, the others are off; `do_sample: false` is greedy. A model of which nothing is said gets `UNSAID`: at temperature
1 a small model answers nonsense.
"""

from __future__ import annotations

import json
import logging
from typing import Any

from kvforge.client.sampling import Sampling as Choice
from kvforge.protocol.errors import InvalidRequest
from kvforge.protocol.messages import MODEL_DEFAULTS, Sampling

from .source import Source

FILE = "generation_config.json"
GGUF_NAMES = {
    "temperature": "temp",
    "top_k": "top_k",
    "top_p": "top_p",
    "min_p": "min_p",
    "repetition_penalty": "penalty_repeat",
}
UNSAID = Sampling(temperature=0.6)
log = logging.getLogger("worker")


def model_sampling(source: Source) -> Sampling:
    """What the model's files say; a value that cannot be is left out, with a line in the log."""
    said = _of_gguf(source) if source.format == "gguf" else _of_folder(source)
    chosen: dict[str, Any] = {}
    for name, value in said.items():
        try:
            chosen[name] = getattr(Choice(**{name: value}).message(), name)
        except (InvalidRequest, TypeError, ValueError, OverflowError) as error:
            log.warning("what the model says of its sampling is ignored: %s", error)
    return Sampling(**chosen) if chosen else UNSAID


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
        log.warning("%s is ignored: %s", FILE, error)
        return {}
    if not isinstance(values, dict):
        log.warning("%s is ignored: it is no object", FILE)
        return {}
    said = {name: values[name] for name in MODEL_DEFAULTS if values.get(name) is not None}
    return said | ({"temperature": 0.0} if values.get("do_sample") is False else {})
