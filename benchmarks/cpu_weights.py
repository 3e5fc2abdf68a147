"""Speed and accuracy of weights of 16, 8 and 4 bits beside float32 on a CPU, in one process.

    python -m benchmarks.cpu_weights [--model PATH] [--tokens 24] [--repeats 3] [--text-tokens 256] [--json FILE]

Each kind of weights (`dtype`, `weight_dtype`) is the same model loaded once. Speed: greedy decode of 1 and of 8 prompts
(as in cpu_generate) and the prefill of one prompt of 512 tokens, all kinds in turn; medians. Accuracy: next-token
logits of two texts of this repository (LICENSE, ARCHITECTURE.md), each computed in one prefill, and its last 16 also
token by token: the Kullback-Leibler divergence from float32's distribution (nats, mean and the worst token), how often
the likeliest token is the same, and the texts' perplexity. `auto` keeps the types of a GGUF file, so float32 here means
the file's dequantised numbers.
"""

from __future__ import annotations

import argparse
import statistics
import time
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import torch

from benchmarks.cpu_steps import BLOCK_SIZE, default_model, prompts_of, run_kvforge
from benchmarks.report import report
from kvforge.worker.attention import PagedBatch
from kvforge.worker.attention.pool import KvPool
from kvforge.worker.device.device import open_device
from kvforge.worker.loading.load import load_model
from kvforge.worker.loading.model import LoadedModel
from kvforge.worker.loading.weight_bytes import weight_bytes

KINDS = (("float32", "dtype"), ("bfloat16", "dtype"), ("float32", "int8"), ("bfloat16", "int8"), ("bfloat16", "auto"))
TEXTS = ("LICENSE", "ARCHITECTURE.md")
PREFILL_TOKENS, DECODED_TOKENS = 512, 16


@dataclass
class Times:
    """Seconds of each repeat: decode of 1 and of 8 prompts, prefill."""

    one: list[float] = field(default_factory=list)
    eight: list[float] = field(default_factory=list)
    prefill: list[float] = field(default_factory=list)


def logits_of(model: LoadedModel, tokens: list[int], decoded: int = 0, sampled: int = 0) -> torch.Tensor:
    """Return the logits [sampled, vocab] float32 of the last tokens (0: all tokens); the last `decoded` are computed
    one by one."""
    blocks = -(-len(tokens) // BLOCK_SIZE)
    tables = np.arange(blocks, dtype=np.int32)[None]
    pool = KvPool(model.geometry, blocks, model.device)
    found, done = [], 0
    for count in (len(tokens) - decoded, *([1] * decoded)):
        batch = PagedBatch.build(
            tables, np.array([done], np.int32), np.array([count], np.int32), BLOCK_SIZE, model.device
        )
        places = np.arange(done, done + count)
        wanted = torch.arange(max(0, count - sampled) if sampled else 0, count)
        ids = torch.from_numpy(np.array(tokens)[places])
        found.append(model.forward(ids, torch.from_numpy(places), wanted, batch, pool).clone())
        done += count
    pool.close()
    return torch.cat(found)


def accuracy(exact: list[torch.Tensor], got: list[torch.Tensor], texts: list[list[int]]) -> dict[str, float]:
    """Return the accuracy over all tokens of all texts."""
    apart, same, loss = [], [], []
    for wanted, logits, text in zip(exact, got, texts, strict=True):
        log_wanted, log_got = wanted.log_softmax(-1), logits.log_softmax(-1)
        apart.append((log_wanted.exp() * (log_wanted - log_got)).sum(-1))
        same.append((wanted.argmax(-1) == logits.argmax(-1)).float())
        loss.append(torch.nn.functional.cross_entropy(logits[:-1], torch.tensor(text[1:]), reduction="none"))
    return {
        "divergence_mean": float(torch.cat(apart).mean()),
        "divergence_max": float(torch.cat(apart).max()),
        "same_token": float(torch.cat(same).mean()),
        "perplexity": float(torch.cat(loss).mean().exp()),
    }


def main() -> None:
    """Measures and prints."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", help="GGUF file or folder (default: smollm2-135m from the cache folder)")
    parser.add_argument("--tokens", type=int, default=24, help="tokens to decode for each prompt")
    parser.add_argument("--repeats", type=int, default=3, help="repeats of each measurement; medians are compared")
    parser.add_argument("--text-tokens", type=int, default=256, help="tokens of each text")
    parser.add_argument("--json", metavar="FILE", help="write the numbers here too")
    arguments = parser.parse_args()

    from kvforge.text.tokenizer import Tokenizer

    source = arguments.model or default_model()
    tokenizer = Tokenizer.load(source)
    texts = [tokenizer.encode(Path(name).read_text(encoding="utf-8"))[: arguments.text_tokens] for name in TEXTS]
    models = {
        kind: load_model(source, dtype=kind[0], weight_dtype=kind[1], device=open_device("cpu"), block_size=BLOCK_SIZE)
        for kind in KINDS
    }
    exact: list[torch.Tensor] = []
    quality = {}
    for kind, model in models.items():
        got = [logits_of(model, text, DECODED_TOKENS) for text in texts]
        exact = exact or got
        quality[kind] = accuracy(exact, got, texts)
    times = {kind: Times() for kind in models}
    prompt = np.random.default_rng(0).integers(3, models[KINDS[0]].vocab_size, PREFILL_TOKENS).tolist()
    for repeat in range(-1, arguments.repeats):  # the first one warms up
        for kind, model in models.items():
            _, one, _ = run_kvforge(model, prompts_of(model, 8)[-1:], arguments.tokens)
            _, eight, _ = run_kvforge(model, prompts_of(model, 8), arguments.tokens)
            began = time.perf_counter()
            logits_of(model, prompt, sampled=1)
            if repeat >= 0:
                times[kind].one.append(one)
                times[kind].eight.append(eight)
                times[kind].prefill.append(time.perf_counter() - began)

    rows, results = [], []
    for kind, model in models.items():
        seconds, good = times[kind], quality[kind]
        rate = {
            "decode_1": (arguments.tokens - 1) / statistics.median(seconds.one),
            "decode_8": 8 * (arguments.tokens - 1) / statistics.median(seconds.eight),
            "prefill": PREFILL_TOKENS / statistics.median(seconds.prefill),
        }
        size = weight_bytes(model)
        results.append({"dtype": kind[0], "weight_dtype": kind[1], "weight_bytes": size, **rate, **good})
        rows.append(
            [
                f"{kind[0]}, {model.info.weight_dtype}" if kind[1] != "dtype" else kind[0],
                f"{size / 1e6:.0f}",
                *(f"{value:.1f}" for value in rate.values()),
                f"{good['divergence_mean']:.1e} ({good['divergence_max']:.1e})",
                f"{100 * good['same_token']:.1f}",
                f"{good['perplexity']:.2f}",
            ]
        )
    header = ["weights", "MB", "decode 1", "decode 8", "prefill", "KL mean (max)", "same token %", "perplexity"]
    title = f"{models[KINDS[0]].info.name}, tokens/s on {torch.get_num_threads()} threads, accuracy beside float32"
    report(title, header, rows, results, arguments.json)


if __name__ == "__main__":
    main()
