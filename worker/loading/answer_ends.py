"""The tokens that end an answer, from `eos_token_id` in generation_config.json, else in config.json."""

from __future__ import annotations

import json
import logging
from typing import Any

from kvforge.protocol.errors import UnsupportedModel

from .sampling_defaults import FILE
from .source import Source

FIELD = "eos_token_id"
TOKENS_MAX = 256
log = logging.getLogger("worker")


def eos_tokens(source: Source, config: Any, module: Any) -> tuple[int, ...]:
    """Return the ids after which an answer ends.

    Args:
        source: The model's files.
        config: Its transformers configuration; for a composite model, the whole.
        module: The loaded model.

    Returns:
        Distinct ids below the size of the vocabulary. Others are logged and left out: no model generates them.

    Raises:
        UnsupportedModel: `eos_token_id` is neither a number nor a list of numbers.
    """
    found = getattr(getattr(module, "generation_config", None), FIELD, None)
    where = FILE
    for each in (module.config.get_text_config(decoder=True), config):
        if found is None:
            found, where = getattr(each, FIELD, None), "config.json"
    check_eos(found, where, source.name)
    ids = [] if found is None else found if isinstance(found, list | tuple) else [found]
    vocabulary = module.get_input_embeddings().num_embeddings
    kept = tuple(dict.fromkeys(each for each in ids if 0 <= each < vocabulary))
    if len(kept) < len(set(ids)):
        log.warning("%s: %s holds ids outside of the vocabulary of %d: %s", source.name, FIELD, vocabulary, ids)
    return kept


def check_folder(source: Source) -> None:
    """Check a folder's files before the model is built, because transformers rewrites odd values.

    Raises:
        UnsupportedModel: `eos_token_id` is neither a number nor a list of numbers.
    """
    for name in (FILE, "config.json"):
        try:
            values = json.loads((source.folder / name).read_text(encoding="utf-8"))
        except (OSError, ValueError, RecursionError):  # the code that needs the file reports it
            continue
        if isinstance(values, dict):
            check_eos(values.get(FIELD), name, source.name)


def check_eos(value: Any, where: str, model: str) -> None:
    """Check that `value` is None, a token id, or a list of token ids.

    Raises:
        UnsupportedModel: It is not.
    """
    ids = value if isinstance(value, list | tuple) else [] if value is None else [value]
    if len(ids) > TOKENS_MAX:
        raise UnsupportedModel(model, f"its {FIELD} in {where} has {len(ids)} ids; at most {TOKENS_MAX}")
    odd = [each for each in ids if type(each) is not int]
    if odd:
        problem = f"its {FIELD} in {where} is {repr(value)[:100]}: expected a token id or a list of token ids"
        raise UnsupportedModel(model, problem)
