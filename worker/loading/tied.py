"""Parameters that are another one, such as a head that is the embedding table, in files that kvforge reads itself.

A configuration can be wrong about this: Mistral Small 3.2 names no `tie_word_embeddings`, its default is true, and its
files have a head of their own. Files win, as they do in transformers.
"""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import torch

from .slices import stored_names
from .source import Source
from .streamed_files import part_by_tensor

ROWS = 4096  # compared at once: some ten MB


def tied_weights(module: Any, source: Source) -> dict[str, str]:
    """Return the names of parameters that are another one, and that one's.

    Args:
        module: The model.
        source: Its files. What has other numbers there is not tied.
    """
    tied = _configured(module)
    if source.format == "dummy" or not tied:
        return tied
    with part_by_tensor(source) as of:
        return {copy: original for copy, original in tied.items() if not _differs(copy, original, of)}


def _configured(module: Any) -> dict[str, str]:
    """Return what the configuration ties."""
    config = module.config
    if not getattr(config, "tie_word_embeddings", False) and not getattr(
        config.get_text_config(decoder=True), "tie_word_embeddings", False
    ):
        return {}
    table = next(name for name, part in module.named_modules() if part is module.get_input_embeddings())
    head = module.get_output_embeddings()
    found = [name for name, part in module.named_modules() if part is head and head is not None]
    return {f"{name}.weight": f"{table}.weight" for name in found}


def _differs(copy: str, original: str, of: dict[str, Any]) -> bool:
    """Return whether both are in the files, with different numbers."""
    places = [next((each for each in stored_names(name) if each in of), None) for name in (copy, original)]
    if None in places:
        return False
    head, table = (of[place].get_slice(place) for place in places if place is not None)
    if head.get_shape() != table.get_shape() or head.get_dtype() != table.get_dtype():
        return True
    borders = [*range(0, head.get_shape()[0], ROWS), head.get_shape()[0]]
    return not all(torch.equal(head[first:end], table[first:end]) for first, end in pairwise(borders))
