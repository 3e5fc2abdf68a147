"""Memory of each rank at load, and the time to start, for several ranks of one model on a CPU (gloo).

    python -m benchmarks.cpu_ranks [--ranks 1,2,4] [--plans dense,...] [--dtype bfloat16] [--json FILE]

One model for each style of plan, with random weights in a safetensors folder; a coordinator and its ranks as processes
of one thread each. With one rank the whole model is loaded.

file       bytes of the weights in the folder
weights    bytes of the rank that holds most, as `kvforge health` has them: packed for oneDNN's products
anonymous  memory of its own of the largest rank (RssAnon) once it serves: torch, KV and `weights`
peak       the most memory of any rank so far, with pages of mapped files (VmHWM)
start      seconds from the start of the processes until all ranks serve; ranks share the machine's cores
"""

from __future__ import annotations

import argparse
import os
import re
import tempfile
from pathlib import Path
from time import monotonic
from typing import Any

import torch
import transformers

from kvforge import Client
from kvforge.protocol.errors import KvforgeError

from .cpu_shapes import write_shape
from .installation import Installation
from .report import report

MIB = 1 << 20
READY_S = 240.0
LAYERS = 6
_HEADS = {"num_attention_heads": 16, "hidden_size": 1024, "intermediate_size": 2816, "head_dim": 64}
# Name: the shape, settings that differ, and whether ranks divide the experts.
PLANS: dict[str, tuple[str, dict[str, Any], bool]] = {
    "dense": ("qwen3", {**_HEADS, "num_key_value_heads": 4}, False),
    "two K and V heads": ("qwen3", {**_HEADS, "num_key_value_heads": 2}, False),
    "parts of experts": ("qwen3-moe", {}, False),
    "divided experts": ("qwen3-moe", {}, True),
}


def save_model(plan: str, folder: Path, dtype: torch.dtype) -> Path:
    """Write a model with random weights; return its folder."""
    name, fields, _ = PLANS[plan]
    made = folder / plan.replace(" ", "-")
    config = transformers.AutoConfig.from_pretrained(write_shape(name, folder, **fields, num_hidden_layers=LAYERS))
    torch.manual_seed(0)
    transformers.AutoModelForCausalLM.from_config(config, dtype=dtype).save_pretrained(made)
    return made


def measure(model: Path, ranks: int, divides: bool, dtype: str) -> dict[str, Any]:
    """Start the ranks, and measure them once all serve."""
    worker: dict[str, Any] = {"model": str(model), "load_format": "auto", "device": "cpu", "dtype": dtype}
    worker |= {"threads": 1, "blocks": 64}
    if divides and ranks > 1:
        worker["expert_parallel"] = True
    began = monotonic()
    with (
        Installation(context_tokens=256, blocks=64, schedule={}, worker=worker, ranks=ranks) as installation,
        Client(installation.endpoint, timeout_s=30.0) as kv,
    ):
        while sum(each.state == "ready" for each in _workers(kv)) != ranks:
            for child in installation.children:
                if child.ended() is not None:
                    raise RuntimeError(f"{child.name} exited: {child.last_words()}")
            if monotonic() - began > READY_S:
                raise RuntimeError(f"{ranks} ranks did not serve within {READY_S:g} s")
        took = monotonic() - began
        workers = kv.health().workers
        return {
            "ranks": ranks,
            "start_s": took,
            "weights": [worker.device_bytes["weights"] for worker in workers],
            "anonymous": [_status(worker.pid, "RssAnon") for worker in workers],
            "peak": [_status(worker.pid, "VmHWM") for worker in workers],
        }


def _workers(kv: Client) -> Any:
    try:
        return kv.health().workers
    except KvforgeError:  # the coordinator is starting
        return ()


def _status(pid: int, field: str) -> int:
    """Return a line of a process's memory, in bytes."""
    found = re.search(rf"{field}:\s+(\d+) kB", Path(f"/proc/{pid}/status").read_text(encoding="utf-8"))
    return int(found[1]) << 10 if found else 0


def main() -> None:
    """Measures all plans and prints."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", default="1,2,4")
    parser.add_argument("--plans", default=",".join(PLANS))
    parser.add_argument("--dtype", choices=("float32", "bfloat16"), default="bfloat16")
    parser.add_argument("--json", metavar="FILE", help="write the numbers here too")
    arguments = parser.parse_args()
    measured: dict[str, list[dict[str, Any]]] = {}
    rows = []
    for plan in arguments.plans.split(","):
        with tempfile.TemporaryDirectory(prefix="kvf-ranks-") as folder:
            model = save_model(plan, Path(folder), getattr(torch, arguments.dtype))
            stored = sum(file.stat().st_size for file in model.glob("*.safetensors"))
            measured[plan] = []
            for ranks in map(int, arguments.ranks.split(",")):
                found = measure(model, ranks, PLANS[plan][2], arguments.dtype) | {"file": stored}
                measured[plan].append(found)
                sizes = [stored, *(max(found[what]) for what in ("weights", "anonymous", "peak"))]
                rows.append([f"{plan}, {ranks}", *(f"{size / MIB:.0f}" for size in sizes), f"{found['start_s']:.1f}"])
                print(rows[-1], flush=True)
    title = f"ranks on {len(os.sched_getaffinity(0))} CPU cores, {arguments.dtype}, MiB of the largest rank"
    header = ["plan, ranks", "file", "weights", "anonymous", "peak", "start, s"]
    report(title, header, rows, {"dtype": arguments.dtype, "layers": LAYERS, "plans": measured}, arguments.json)


if __name__ == "__main__":
    main()
