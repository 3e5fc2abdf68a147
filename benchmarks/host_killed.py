"""A worker that is killed under load: time until every stream goes on, and tokens computed again, by tier.

    python -m benchmarks.host_killed [--sequences 64] [--kv fp8]        one GPU
    python -m benchmarks.host_killed --sides with [--answers FILE]      one side of it, in less time
    python -m benchmarks.host_killed --tiny                             a tiny model, to try it

Dummy weights of Llama-3.1-8B, through coordinator and client. So many requests with random prompts decode. The worker
is killed with SIGKILL, with a tier once the host file has all full blocks of the prompts, and started again at once.
With `--caught-up` it is killed once the file has all full blocks of prompts and answers except two of each sequence, as
in a service that has run for a while: write-back begins with the prompts, and answers grow meanwhile.

The host file needs as much memory as the pool: 36 GiB for 32 sequences with answers of 900 tokens, 76 GiB for 64 with
1,536, and about half with `--kv fp8`. It must fit into /dev/shm, since a file on a disk cannot be page-locked.

Measured from the kill: until every stream has another token, and how many tokens were computed again. The run ends when
each stream has `--after` tokens more than at the kill. The tokens of both sides are compared as far as both have them;
`--answers` keeps those of one side in a file, and compares with those that are there.

Lines with the seconds since the start say how far the run is. With 64 sequences the parts that take long are a new
host file, which is zeroed (36 GiB with fp8), 524,288 tokens of prompts, twice without a tier, and write-back, which
copies 64 blocks in every second step: 32,768 blocks take about 1,000 steps.
"""

from __future__ import annotations

import argparse
import json
import signal
import sys
from collections.abc import Callable
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
LINE_S = 3.0  # between lines
MEMORY = "/dev/shm"  # noqa: S108 - folders in it are new


class Progress:
    """Prints lines with the seconds since the start, some of them every few seconds at most."""

    def __init__(self) -> None:
        self._begun, self._last = monotonic(), 0.0

    def line(self, text: str) -> None:
        """Print a line."""
        self._last = monotonic()
        print(f"{self._last - self._begun:7.1f} s  {text}", file=sys.stderr, flush=True)

    def now_and_then(self, text: Callable[[], str]) -> None:
        """Print a line, unless one was printed a short while ago."""
        if monotonic() > self._last + LINE_S:
            self.line(text())


def killed(
    installation: Installation, options: argparse.Namespace, saved_blocks: int, progress: Progress
) -> dict[str, Any]:
    """Run requests, kill the worker, and return what was measured, with the tokens of all answers."""
    from kvforge import Client, SamplingParams

    rng, worker = np.random.default_rng(0), installation.children[1]
    caught_up = bool(saved_blocks and options.caught_up)
    sampling = SamplingParams(temperature=0.0, ignore_eos=True)
    with Client(installation.endpoint, timeout_s=60.0, stream_timeout_s=SIDE_S) as kv:
        wait_ready(kv, installation)
        progress.line(f"the worker is ready: {ready_line(installation)}")
        prompts = [rng.integers(0, VOCABULARY, options.tokens).astype(np.int32) for _ in range(options.sequences)]
        running = [kv.submit(prompt, max_tokens=options.answer, sampling=sampling) for prompt in prompts]
        waiting, streams, saved = set(running), kv.merge(*running), 0
        for request, token in streams:
            if token.offset >= 16:
                waiting.discard(request)
            if waiting:
                progress.now_and_then(lambda: f"{len(running) - len(waiting)} of {len(running)} decode")
            elif request is running[-1] and token.offset % 16 == 0:
                saved = kv.stats().pools[0].host_saved_total
                progress.now_and_then(lambda: f"{saved} blocks saved, {len(running[-1].tokens)} tokens")  # noqa: B023
                if saved >= saved_blocks + (behind(running) if caught_up else 0):
                    break
        at_kill = [len(request.tokens) for request in running]
        assert max(at_kill) + options.after <= options.answer, "answers ended before the file had all blocks"
        before = kv.stats()
        progress.line(f"killed with {sum(at_kill)} tokens of answers and {saved} saved blocks")
        killed_at = monotonic()
        worker.send(signal.SIGKILL)
        assert worker.wait(killed_at + 30), "the worker outlives its kill"
        worker.start()
        # A stream goes on with the token behind its longest silence.
        last, silence, resumed = (dict.fromkeys(running, at) for at in (killed_at, 0.0, killed_at))
        ends = {request: count + options.after for request, count in zip(running, at_kill, strict=True)}
        for request, _ in streams:
            now = monotonic()
            if now - last[request] > silence[request]:
                silence[request], resumed[request] = now - last[request], now
            last[request] = now
            if len(request.tokens) >= ends.get(request, options.answer + 1):
                del ends[request]
                if not ends:
                    break
            going = sum(resumed[each] > killed_at for each in running)
            progress.now_and_then(lambda: f"{going} streams go on, {len(ends)} need tokens")  # noqa: B023
        answers = [list(request.tokens) for request in running]
        after = kv.stats()
        progress.line("all streams went on")
        for request in running:
            if not request.done:
                kv.cancel(request.id)
    return {
        "tokens_at_kill": sum(at_kill) + options.sequences * options.tokens,
        "saved_blocks": before.pools[0].host_saved_total,
        "resumed_s": max(resumed.values()) - killed_at,
        "recomputed_tokens": after.requests.recomputed_tokens_total - before.requests.recomputed_tokens_total,
        "start": ready_line(installation),
        "answers": answers,
    }


def ready_line(installation: Installation) -> str:
    """Return what the worker's log says about its last start."""
    ready = [line for line in installation.log_of("worker").splitlines() if "registered: blocks" in line]
    return ready[-1].partition("; ")[2] if ready else ""


def changed_answers(one: list[list[int]], other: list[list[int]]) -> int:
    """Return how many answers differ as far as both have tokens."""
    pairs = [zip(ours, theirs, strict=False) for ours, theirs in zip(one, other, strict=True)]
    return sum(any(mine != yours for mine, yours in pair) for pair in pairs)


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
    parser.add_argument("--after", type=int, default=32, help="tokens of each stream behind the kill")
    parser.add_argument("--sides", default="without,with", help="what to run: without a tier, with it, or both")
    parser.add_argument("--answers", help="compare with the answers in this file, or keep them there")
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
    progress = Progress()
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
        for side in options.sides.split(","):
            host, cache, saved = sides[side]
            worker = tuple({"blocks": held, **host}.items())
            plan = Plan(model, (options.sequences,), options.tokens, 8, 8192, options.tiny, kv, worker=worker)
            progress.line(f"{side}: starting")
            with open_served(plan, 1, options.tokens + options.answer + 16, cache=cache) as installation:
                found[side] = killed(installation, options, saved, progress)
            progress.line(f"{side}: stopped")
    answers = [found[side].pop("answers") for side in found]
    kept = Path(options.answers) if options.answers else None
    if kept is not None and kept.exists():
        answers.append(json.loads(kept.read_text()))
    elif kept is not None:
        kept.write_text(json.dumps(answers[0]))
    changed = [changed_answers(answers[0], other) for other in answers[1:]]
    results = {"sequences": options.sequences, "tokens": options.tokens, "changed_answers": changed, **found}
    rows = [
        [side, str(one["tokens_at_kill"]), f"{one['resumed_s']:.1f}", str(one["recomputed_tokens"])]
        for side, one in found.items()
    ]
    compared = f"{max(changed)} answers changed" if changed else "answers not compared"
    title = f"a worker killed with {options.sequences} x {options.tokens} tokens, {compared}"
    report(title, ["tier", "tokens at the kill", "all go on after s", "computed again"], rows, results, options.json)


if __name__ == "__main__":
    main()
