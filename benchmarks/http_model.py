"""HTTP serving by all of kvforge on one core, beside llama-server: the same small model, the same requests.

    python -m benchmarks.http_model --llama-server PATH [--rounds 3] [--json benchmarks/results/http_model.json]

`benchmarks.gateway` measures the gateway alone, over a null server; llama-server has HTTP and its engine in one
process. Here both servers are complete: `kvforge up --http` (a gateway, a coordinator, a worker) and llama-server, one
after the other, with all their processes on one core, and the driver of the load harness on another one. The model, one
GGUF file for both, has two layers of 64 and a vocabulary of bytes, so that transport and sampling cost more than the
products. 32 clients in a closed loop request streamed answers of 16 tokens behind prompts of 64 token ids. Medians over
the rounds.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import socket
import statistics
import sys
import tempfile
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import gguf
import numpy as np
from tokenizers import pre_tokenizers

from kvforge.loadtest.drive.spec import HTTP

from .cpu_served import Server
from .gateway import Case, driven, result_of, served
from .load_driver import pinned
from .report import report

HIDDEN, LAYERS, HEADS, INNER, CONTEXT = 64, 2, 2, 128, 512
CASE = Case(clients=32, tokens=16, pace=0, warm_s=3, vocab=250)
HEADER = ("", "requests/s", "tokens/s", "first ms p50", "p99", "late ms p99", "failed")


def write_model(path: Path) -> None:
    """A file of llama's architecture with random weights, and a tokenizer of bytes."""
    rng = np.random.default_rng(1)
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    words = ["<|endoftext|>", *alphabet, "Ġt"]  # one merge: the loader refuses a file without merges
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_context_length(CONTEXT)
    writer.add_embedding_length(HIDDEN)
    writer.add_block_count(LAYERS)
    writer.add_feed_forward_length(INNER)
    writer.add_head_count(HEADS)
    writer.add_head_count_kv(HEADS)
    writer.add_rope_dimension_count(HIDDEN // HEADS)
    writer.add_rope_freq_base(10_000.0)
    writer.add_layer_norm_rms_eps(1e-6)
    writer.add_vocab_size(len(words))
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("gpt-2")
    writer.add_token_list(words)
    writer.add_token_types([gguf.TokenType.CONTROL, *[gguf.TokenType.NORMAL] * (len(words) - 1)])
    writer.add_token_merges(["Ġ t"])
    writer.add_bos_token_id(0)
    writer.add_eos_token_id(0)
    writer.add_add_bos_token(False)
    shapes = {"attn_q": (HIDDEN, HIDDEN), "attn_k": (HIDDEN, HIDDEN), "attn_v": (HIDDEN, HIDDEN)}
    shapes |= {"attn_output": (HIDDEN, HIDDEN), "ffn_gate": (INNER, HIDDEN), "ffn_up": (INNER, HIDDEN)}
    shapes |= {"ffn_down": (HIDDEN, INNER)}
    named: dict[str, tuple[int, ...]] = {"token_embd": (len(words), HIDDEN), "output_norm": (HIDDEN,)}
    for layer in range(LAYERS):
        named |= {f"blk.{layer}.{name}": shape for name, shape in shapes.items()}
        named |= {f"blk.{layer}.{name}": (HIDDEN,) for name in ("attn_norm", "ffn_norm")}
    for name, shape in named.items():
        array = np.ones(shape) if "norm" in name else rng.standard_normal(shape) / 8
        writer.add_tensor(f"{name}.weight", array.astype(np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def commands(folder: Path, model: Path, port: int, llama: Path | None) -> dict[str, list[str]]:
    """Return each server's command line. Both compute with one thread."""
    ours = [sys.executable, "-m", "kvforge", "--runtime-dir", str(folder / "r"), "up", "--model", str(model)]
    ours += ["--device", "cpu", "--http", str(port), "--blocks", "1024"]
    found = {"kvforge": ours}
    if llama is not None:
        slots = str(CASE.clients)
        found["llama-server"] = [
            *(str(llama), "-m", str(model), "--port", str(port), "-t", "1", "-tb", "1"),
            *("-np", slots, "-c", str(CASE.clients * CONTEXT // 2), "--no-webui"),
        ]
    return found


async def run(command: list[str], folder: Path, port: int, name: str, cores: Sequence[int]) -> dict[str, Any]:
    """One server: started, loaded, stopped."""
    with ExitStack() as stack:
        with pinned(cores[0]):
            server = stack.enter_context(Server(command, folder / name, Path.cwd()))
        assert server.process is not None, "the server is not started"
        await served(f"http://127.0.0.1:{port}")
        where = {"http": {"url": f"http://127.0.0.1:{port}/v1", "model": "small"}}
        outcomes, drove, _, _ = await driven(CASE, HTTP, where, cores[1], server.process.pid)
        return result_of(name, CASE, outcomes, drove, 1.0, [])


def main() -> None:
    """Print a table and write the requested file."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--llama-server", type=Path, help="the binary; without it kvforge is measured alone")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--json", metavar="FILE")
    options = parser.parse_args()
    cores = sorted(os.sched_getaffinity(0))
    if len(cores) < 2:
        parser.error("two cores required: one for the server, one for the driver")
    found: dict[str, list[dict[str, Any]]] = {}
    with tempfile.TemporaryDirectory(prefix="kvf-", dir="/tmp") as made:
        folder = Path(made)
        write_model(folder / "small.gguf")
        for _ in range(options.rounds):
            with socket.socket() as free:
                free.bind(("127.0.0.1", 0))
                port = free.getsockname()[1]
            for name, command in commands(folder, folder / "small.gguf", port, options.llama_server).items():
                found.setdefault(name, []).append(asyncio.run(run(command, folder, port, name, cores)))
    rows = {}
    for name, results in found.items():
        median = {key: statistics.median(r[key] for r in results) for key in ("requests_per_s", "tokens_per_s")}
        for at, key in enumerate(("first_p50_ms", "first_p99_ms")):
            median[key] = statistics.median(r["first_ms"][at] for r in results)
        late = max(r["late_ms"][1] for r in results)
        rows[name] = median | {"late_p99_ms": late, "failed": sum(r["failed"] for r in results), "rounds": results}
    table = [
        (
            name,
            *(
                row[key]
                for key in ("requests_per_s", "tokens_per_s", "first_p50_ms", "first_p99_ms", "late_p99_ms", "failed")
            ),
        )
        for name, row in rows.items()
    ]
    report("A small model over HTTP on one core", HEADER, table, rows, options.json)


if __name__ == "__main__":
    main()
