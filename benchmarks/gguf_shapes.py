"""GGUF files of a known model's shape with random weights, to measure what no package carries.

    python -m benchmarks.gguf_shapes FILE [--stored Q8_0] [--layers N]

The shape is Gemma 3 270M's (google/gemma-3-270m, config.json): 18 layers of 640 numbers, 4 query heads and one KV head
of 256, 2,048 numbers in the feed-forward, 262,144 tokens, every sixth layer without a window of 512. Tensors have
llama.cpp's names; matrices are stored as `--stored` names, the embedding too, vectors in float32. Speed does not
depend on the weights' values. The vocabulary is made up: four special tokens, the 256 bytes, and a word for each
further id.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from pathlib import Path

import gguf
import numpy as np

HIDDEN, LAYERS, HEADS, HEAD_SIZE, FEED_FORWARD, VOCABULARY = 640, 18, 4, 256, 2048, 262_144
CONTEXT, WINDOW, PATTERN = 32_768, 512, 6
ROWS_AT_A_TIME = 1 << 15
SPECIAL = (b"<pad>", b"<eos>", b"<bos>", b"<unk>")
CONTROL, UNKNOWN, BYTE, NORMAL = 3, 2, 6, 1  # llama.cpp's types of tokens


def vocabulary() -> tuple[list[bytes], list[float], list[int]]:
    """Return the tokens, their scores and their types."""
    bytes_of = [b"<0x%02X>" % value for value in range(256)]
    words = [b"\xe2\x96\x81w%d" % number for number in range(VOCABULARY - len(SPECIAL) - 256)]
    tokens = [*SPECIAL, *bytes_of, *words]
    types = [CONTROL, CONTROL, CONTROL, UNKNOWN] + [BYTE] * 256 + [NORMAL] * len(words)
    return tokens, [-float(number) for number in range(len(tokens))], types


def tensors(layers: int, rng: np.random.Generator) -> Iterator[tuple[str, np.ndarray]]:
    """Yield the tensors by their names in the file, as float32: a matrix [rows, columns], or a vector."""
    yield "token_embd.weight", _matrix(rng, VOCABULARY, HIDDEN)
    yield "output_norm.weight", np.ones(HIDDEN, np.float32)
    for layer in range(layers):
        norms = {"attn_norm": HIDDEN, "post_attention_norm": HIDDEN, "ffn_norm": HIDDEN, "post_ffw_norm": HIDDEN}
        norms |= {"attn_q_norm": HEAD_SIZE, "attn_k_norm": HEAD_SIZE}
        matrices = {
            "attn_q": (HEADS * HEAD_SIZE, HIDDEN),
            "attn_k": (HEAD_SIZE, HIDDEN),
            "attn_v": (HEAD_SIZE, HIDDEN),
            "attn_output": (HIDDEN, HEADS * HEAD_SIZE),
            "ffn_gate": (FEED_FORWARD, HIDDEN),
            "ffn_up": (FEED_FORWARD, HIDDEN),
            "ffn_down": (HIDDEN, FEED_FORWARD),
        }
        for name, size in norms.items():
            yield f"blk.{layer}.{name}.weight", np.ones(size, np.float32)
        for name, (rows, columns) in matrices.items():
            yield f"blk.{layer}.{name}.weight", _matrix(rng, rows, columns)


def _matrix(rng: np.random.Generator, rows: int, columns: int) -> np.ndarray:
    return rng.standard_normal((rows, columns), np.float32) * np.float32(0.02)


def write_file(path: Path, stored: gguf.GGMLQuantizationType, layers: int = LAYERS) -> None:
    """Write the file.

    Args:
        path: Where to.
        stored: The type of its matrices.
        layers: How many layers; fewer make a smaller file for tests.

    Raises:
        OSError: It cannot be written.
    """
    writer = gguf.GGUFWriter(path, "gemma3")
    writer.add_name("Gemma 3 270M's shape, random weights")
    writer.add_context_length(CONTEXT)
    writer.add_embedding_length(HIDDEN)
    writer.add_block_count(layers)
    writer.add_feed_forward_length(FEED_FORWARD)
    writer.add_head_count(HEADS)
    writer.add_head_count_kv(1)
    writer.add_key_length(HEAD_SIZE)
    writer.add_value_length(HEAD_SIZE)
    writer.add_layer_norm_rms_eps(1e-6)
    writer.add_rope_freq_base(1e6)
    writer.add_sliding_window(WINDOW)
    writer.add_file_type(0)
    tokens, scores, types = vocabulary()
    writer.add_tokenizer_model("llama")
    writer.add_token_list(tokens)
    writer.add_token_scores(scores)
    writer.add_token_types(types)
    writer.add_bos_token_id(2)
    writer.add_eos_token_id(1)
    writer.add_pad_token_id(0)
    writer.add_unk_token_id(3)
    for name, array in tensors(layers, np.random.default_rng(0)):
        kind = stored if array.ndim == 2 else gguf.GGMLQuantizationType.F32
        writer.add_tensor(name, _quantised(array, kind), raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def _quantised(array: np.ndarray, kind: gguf.GGMLQuantizationType) -> np.ndarray:
    if array.ndim == 1:
        return array
    parts = range(0, len(array), ROWS_AT_A_TIME)
    return np.concatenate([gguf.quantize(array[first : first + ROWS_AT_A_TIME], kind) for first in parts])


def main() -> int:
    """Write the file that the arguments name."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.gguf_shapes",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("file", type=Path)
    parser.add_argument("--stored", default="Q8_0", help="a type of GGUF that its package can write [Q8_0]")
    parser.add_argument("--layers", type=int, default=LAYERS)
    options = parser.parse_args()
    write_file(options.file, gguf.GGMLQuantizationType[options.stored], options.layers)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
