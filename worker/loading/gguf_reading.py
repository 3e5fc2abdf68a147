"""transformers' reading of a GGUF file, without repeated work and without the parts that no model needs."""

from __future__ import annotations

import contextlib
import functools
import sys
from collections.abc import Iterator
from typing import Any

import numpy as np
import numpy.typing as npt

# One entry a token: of the vocabulary, transformers' models need the size alone.
OF_THE_TOKENIZER = frozenset(("tokenizer.ggml.merges", "tokenizer.ggml.scores", "tokenizer.ggml.token_type"))
# gguf converts 16 rows at a time; narrow rows are joined until these have so many values.
GROUP_VALUES = 1 << 17
GROUP_ROWS = 16


@contextlib.contextmanager
def gguf_read_once() -> Iterator[None]:
    """Make transformers parse a GGUF file once. Wrap `read_config` and `build` with it.

    transformers reads the file for the configuration and again for the weights, and rebuilds the table of tensor names
    for every module, which takes longer the more layers there are.
    """
    try:
        import gguf
    except ImportError:  # only GGUF files need it
        yield
        return

    array, string = gguf.GGUFValueType.ARRAY, gguf.GGUFValueType.STRING

    class Reader(gguf.GGUFReader):
        data: Any

        def _build_fields(self, *arguments: Any) -> Any:
            # Parsing slices the vocabulary into pieces; slices of a memmap are slow memmaps again.
            self.data = np.asarray(self.data)
            return super()._build_fields(*arguments)

        def _push_field(self, field: Any, *arguments: Any, **keywords: Any) -> Any:
            if field.name in OF_THE_TOKENIZER:
                field.data.clear()  # transformers would parse each entry, in both of its passes
            return super()._push_field(field, *arguments, **keywords)

        def _get_field_parts(self, offset: int, kind: int) -> Any:
            if kind != array:
                return super()._get_field_parts(offset, kind)
            of, count = self._get(offset, np.uint32), self._get(offset + 4, np.uint64)
            entries, total = gguf.GGUFValueType(of[0]), int(count[0])
            if entries == string:
                # A model needs only the size of the vocabulary. An array per string takes 85 MB: all are read as empty.
                end, octets = offset + 12, memoryview(self.data)
                for _ in range(total):
                    end += 8 + int.from_bytes(octets[end : end + 8], sys.byteorder)
                return end - offset, [np.empty(0, np.uint8)], [0] * total, [array, string]
            kept = self.gguf_scalar_to_np.get(entries)
            if kept is None or not total:
                return super()._get_field_parts(offset, kind)
            values = self._get(offset + 12, kept, total)
            parts = [of, count, *values.reshape(total, 1)]
            return 12 + values.nbytes, parts, [*range(2, 2 + total)], [array, entries]

    made = {
        "GGUFReader": functools.cache(Reader),
        "get_tensor_name_map": functools.cache(gguf.get_tensor_name_map),
        "dequantize": functools.partial(dequantise, gguf.dequantize),
    }
    kept = {name: getattr(gguf, name) for name in made}
    vars(gguf).update(made)
    try:
        yield
    finally:
        vars(gguf).update(kept)


def dequantise(convert: Any, data: npt.NDArray[Any], kind: Any) -> npt.NDArray[Any]:
    """Convert a tensor of a GGUF file in larger pieces than gguf, whose time goes into calls where rows are short.

    Args:
        convert: `gguf.dequantize`.
        data: [..., bytes or values of a row], its blocks as in the file. A block has no part of two rows.
        kind: a GGMLQuantizationType.

    Returns:
        [..., values of a row] float32, the bits of `convert(data, kind)`.
    """
    import gguf

    block_values, block_bytes = gguf.GGML_QUANT_SIZES[kind]
    rows = data.size // data.shape[-1] if data.size else 0
    if block_values == 1 or rows <= GROUP_ROWS or data.dtype != np.uint8:
        return convert(data, kind)
    values = data.shape[-1] // block_bytes * block_values
    joined = 1
    while rows % (2 * joined) == 0 and 2 * joined * values * GROUP_ROWS <= GROUP_VALUES:
        joined *= 2
    found: npt.NDArray[Any] = convert(np.asarray(data).reshape(rows // joined, -1), kind)
    return found.reshape(*data.shape[:-1], values)
