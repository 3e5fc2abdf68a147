"""A worker that is killed under load: time until every stream goes on, and tokens computed again, by tier.

    python -m benchmarks.host_killed [--sequences 64] [--kv fp8]        one GPU
    python -m benchmarks.host_killed --tiny                             a tiny model, to try it

Dummy weights of Llama-3.1-8B, through coordinator and client. So many requests with random prompts decode. The worker
is killed with SIGKILL, with a tier once the host file has all full blocks of the prompts, and started again at once.
With `--caught-up` it is killed once the file has all full blocks of prompts and answers except two of each sequence, as
in a service that has run for a while: write-back begins with the prompts, and answers grow meanwhile.

The host file needs as much memory as the pool: 36 GiB for 32 sequences with answers of 900 tokens, 76 GiB for 64 with
1,536, and about half with `--kv fp8`. It must fit into /dev/shm, since a file on a disk cannot be page-locked.

Measured from the kill: until every stream has another token, and how many tokens were computed again. The tokens of
both sides are compared.
"""

from __future__ import annotations

import argparse
import signal
import sys
from pathlib import Path
from time import monotonic
from typing import Any

import numpy as np

from kvforge.worker.attention.pool import KvGeometry, LayerShape

from .gpu_step import tiny_model
from .host_tier import BUSY_BLOCKS, HEAD, HEADS, LAYERS, MODEL, host_folder
from .installation import Installation
from .report import report
from .step_plan import BLOCK_SIZE, VOCABULARY, Plan
from .step_served import open_served, wait_ready

WRITEBACK = 64  # blocks of a step
TINY = {"sequences": 3, "tokens": 200}
TINY_BYTES = 2 * 2 * 2 * BLOCK_SIZE * 16 * 4  # of a block: layers, K and V, heads, tokens, numbers of a head
SIDE_S = 300.0
MEMORY = "/dev/shm"  # noqa: S108 - folders in it are new


def killed(installation: Installation, options: argparse.Namespace, saved_blocks: int) -> dict[str, Any]:
    """Run requests, kill the worker, and return what was measured, with the tokens of all answers."""
    from kvforge import Client, SamplingParams

    rng, worker = np.random.default_rng(0), installation.children[1]
    caught_up = bool(saved_blocks and options.caught_up)
    sampling = SamplingParams(temperature=0.0, ignore_eos=True)
    with Client(installation.endpoint, timeout_s=60.0, stream_timeout_s=SIDE_S) as kv:
        wait_ready(kv, installation)
        prompts = [rng.integers(0, VOCABULARY, options.tokens).astype(np.int32) for _ in range(options.sequences)]
        running = [kv.submit(prompt, max_tokens=options.answer, sampling=sampling) for prompt in prompts]
        waiting, streams = set(running), kv.merge(*running)
        for request, token in streams:
            if token.offset >= 16:
                waiting.discard(request)
            asks = not waiting and request is running[-1] and token.offset % 16 == 0
            if asks and kv.stats().pools[0].host_saved_total >= saved_blocks + (behind(running) if caught_up else 0):
                break
        at_kill = [len(request.tokens) for request in running]
        assert max(at_kill) < options.answer, "answers ended before the file had all blocks"
        before = kv.stats()
        killed_at = monotonic()
        worker.send(signal.SIGKILL)
        assert worker.wait(killed_at + 30), "the worker outlives its kill"
        worker.start()
        # A stream goes on with the token behind its longest silence.
        last, silence, resumed = (dict.fromkeys(running, at) for at in (killed_at, 0.0, killed_at))
        for request, _ in streams:
            now = monotonic()
            if now - last[request] > silence[request]:
                silence[request], resumed[request] = now - last[request], now
            last[request] = now
        answers = [request.result(SIDE_S).tokens for request in running]
        after = kv.stats()
    ready = [line for line in installation.log_of("worker").splitlines() if "registered: blocks" in line]
    return {
        "tokens_at_kill": sum(at_kill) + options.sequences * options.tokens,
        "saved_blocks": before.pools[0].host_saved_total,
        "resumed_s": max(resumed.values()) - killed_at,
        "recomputed_tokens": after.requests.recomputed_tokens_total - before.requests.recomputed_tokens_total,
        "start": ready[-1].partition("; ")[2] if ready else "",
        "answers": answers,
    }


def behind(running: list[Any]) -> int:
    """Return the full blocks of the answers so far, except two of each sequence."""
    return sum(max(0, len(request.tokens) // BLOCK_SIZE - 2) for request in running)


def main() -> None:
    """Measure both sides and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sequences", type=int, default=64)
    parser.add_argument("--tokens", type=int, default=8192, help="of each prompt")
    parser.add_argument("--answer", type=int, default=1536, help="tokens of each answer")
    parser.add_argument("--kv", default="bfloat16", help="dtype of K and V [bfloat16]")
    parser.add_argument("--caught-up", action="store_true", help="kill once the file has the answers too")
    parser.add_argument("--tiny", action="store_true", help="a small model on a CPU")
    parser.add_argument("--json", help="write the results here too")
    options = parser.parse_args()
    each, model = KvGeometry((LayerShape(HEADS, HEAD),) * LAYERS, BLOCK_SIZE, options.kv).bytes_per_block, MODEL
    kv = "auto" if options.tiny or options.kv == "bfloat16" else options.kv
    if options.tiny:
        vars(options).update(TINY)
        each, model = TINY_BYTES, ""
    held = options.sequences * ((options.tokens + options.answer) // BLOCK_SIZE + 2) + BUSY_BLOCKS
    full = options.sequences * (options.tokens // BLOCK_SIZE)
    found: dict[str, dict[str, Any]] = {}
    with host_folder(held * each) as folder:
        if not folder.startswith(MEMORY) and not options.tiny:
            gib = held * each / (1 << 30)
            parser.error(f"{MEMORY} has no room for a host file of {gib:.0f} GiB: fewer --sequences, or --kv fp8")
        if options.tiny:
            model = tiny_model(Path(folder), options.tokens + options.answer)
        sides: dict[str, tuple[dict[str, Any], dict[str, int], int]] = {
            "without": ({}, {}, 0),
            "with": ({"host_bytes": held * each, "host_dir": folder}, {"host_writeback_blocks": WRITEBACK}, full),
        }
        for side, (host, cache, saved) in sides.items():
            worker = tuple({"blocks": held, **host}.items())
            plan = Plan(model, (options.sequences,), options.tokens, 8, 8192, options.tiny, kv, worker=worker)
            with open_served(plan, 1, options.tokens + options.answer + 16, cache=cache) as installation:
                found[side] = killed(installation, options, saved)
                print(f"{side}: {found[side]['start']}", file=sys.stderr)
    answers = [found[side].pop("answers") for side in found]
    changed = sum(one != other for one, other in zip(*answers, strict=True))
    results = {"sequences": options.sequences, "tokens": options.tokens, "changed_answers": changed, **found}
    rows = [
        [side, str(one["tokens_at_kill"]), f"{one['resumed_s']:.1f}", str(one["recomputed_tokens"])]
        for side, one in found.items()
    ]
    title = f"a worker killed with {options.sequences} x {options.tokens} tokens, {changed} answers changed"
    report(title, ["tier", "tokens at the kill", "all go on after s", "computed again"], rows, results, options.json)


if __name__ == "__main__":
    main()
