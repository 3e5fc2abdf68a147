"""python -m tools.simulation --seeds 1000: runs simulated worlds, shows progress, and shrinks the first failure."""

from __future__ import annotations

import argparse
import gc
import sys
import time
import traceback
from concurrent.futures import ProcessPoolExecutor, as_completed
from multiprocessing import get_context

from tools.simulation.runner import Outcome, collected_at_their_end, digest_seed, run_seed, shrunk_text, trace_seed
from tools.simulation.settings import BATCHES_SHARE, DRAFTS_SHARE
from tools.simulation.world import FULL_CHECK_EVERY


def parse(arguments: list[str] | None = None) -> argparse.Namespace:
    """Parse the command line."""
    parser = argparse.ArgumentParser(prog="python -m tools.simulation", description=__doc__)
    parser.add_argument("--seeds", type=int, default=100, help="number of seeds")
    parser.add_argument("--start", type=int, default=0, help="the first seed")
    parser.add_argument("--events", type=int, default=2000, help="events per seed before the calm end")
    parser.add_argument("--jobs", type=int, default=1, help="processes")
    parser.add_argument(
        "--check-every", type=int, default=FULL_CHECK_EVERY, help="events between two full invariant checks"
    )
    parser.add_argument("--drafts", type=float, default=DRAFTS_SHARE, help="share of worlds with drafts")
    parser.add_argument("--batches", type=float, default=BATCHES_SHARE, help="share of worlds full of batches")
    parser.add_argument("--seed", type=int, help="run only this seed")
    parser.add_argument("--digests", action="store_true", help="print a digest of the core's output for each seed")
    parser.add_argument("--trace", action="store_true", help="print every event with digests; needs --seed")
    return parser.parse_args(arguments)


def main() -> int:
    """Run the command and return exit status 1 if a seed failed."""
    options = parse()
    if options.seed is not None and options.trace:
        print("\n".join(trace_seed(options.seed, options.events)))
        return 0
    with collected_at_their_end():
        return play_seeds(options)


def play_seeds(options: argparse.Namespace) -> int:
    """Run the seeds and return exit status 1 if one failed."""
    seeds = [options.seed] if options.seed is not None else range(options.start, options.start + options.seeds)
    if options.digests:
        for seed in seeds:
            print(seed, digest_seed(seed, options.events), flush=True)
            gc.collect()
        return 0
    began = time.perf_counter()
    events = 0
    failed: Outcome | None = None
    amounts = (options.events, options.check_every)
    shares = {"drafts": options.drafts, "batches": options.batches}
    if options.jobs > 1:
        pool = ProcessPoolExecutor(options.jobs, get_context("spawn"), gc.disable)
        tasks = [pool.submit(run_seed, seed, *amounts, **shares) for seed in seeds]
        outcomes = (task.result() for task in as_completed(tasks))
    else:
        pool = None
        outcomes = (run_seed(seed, *amounts, **shares) for seed in seeds)
    done = 0
    for outcome in outcomes:
        done, events = done + 1, events + outcome.events
        seconds = time.perf_counter() - began
        if done % 10 == 0 or done == len(seeds):
            rate = f"{events / seconds:8.0f} events/s {60 * done / seconds:7.0f} seeds/min"
            print(f"\r{done}/{len(seeds)} seeds {events} events {rate} {seconds:6.1f} s", end="", flush=True)
        if outcome.error:
            failed = outcome
            break
    print()
    if pool is not None:
        pool.shutdown(cancel_futures=True)
    if failed is None:
        return 0
    print(f"seed {failed.seed} failed after {failed.events} events: {failed.error}\n")
    print(shrunk_text(failed, options.events))
    print(f"\nto repeat: python -m tools.simulation --seed {failed.seed} --events {options.events}")
    return 1


if __name__ == "__main__":
    try:
        sys.exit(main())
    except KeyboardInterrupt:
        traceback.print_exc(limit=0)
        sys.exit(130)
