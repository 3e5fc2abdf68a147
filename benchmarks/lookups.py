"""The host's time for drafts by lookup, in microseconds for each row of a step.

    python -m benchmarks.lookups [--rows 16 63 256] [--prompt 1024] [--shared] [--json FILE]

Requests with random prompts get one random token with each step, as where nothing is ever found: the search is then the
longest. Measured are, for each row,

| column | what it is |
|---|---|
| begin | a request takes the slot |
| keep | its token is kept, and nothing is looked up, as where a step has no room for drafts |
| look up | its token is kept and indexed, and the last tokens are looked up |
| the first | the first lookup after steps without any, of all rows, in ms: it indexes as much as it may |

Medians of all steps, and of each column the best of TRIES. `--shared`: the requests are of one tenant, and eight
others are searched too.
"""

from __future__ import annotations

import argparse
import gc
import sys
from random import Random
from time import perf_counter_ns

import numpy as np

from kvforge.protocol.messages import NO_INT32
from kvforge.worker.drafts.lookup import LookupDrafter

from .report import report

VOCABULARY, CONTEXT, MOST = 50_000, 8192, 16
CAUGHT_UP, TRIES = 256, 3  # lookups until everything is indexed


def measure(rows: int, prompt: int, steps: int, shared: int) -> dict[str, float]:
    """Return the columns for a number of rows, as in the table."""
    random, drafter, slots = Random(rows), LookupDrafter(rows, CONTEXT), range(rows)
    prompts = [np.array([random.randrange(VOCABULARY) for _ in range(prompt)], np.int32) for _ in slots]
    begun = []
    for slot in slots:
        started = perf_counter_ns()
        drafter.begin(slot, prompts[slot], NO_INT32, MOST, shared)
        begun.append(perf_counter_ns() - started)

    def step() -> int:
        tokens = [[random.randrange(VOCABULARY)] for _ in slots]
        started = perf_counter_ns()
        for slot in slots:
            drafter.append(slot, tokens[slot])
        return perf_counter_ns() - started

    def look_up() -> int:
        kept, started = step(), perf_counter_ns()
        drafter.propose(slots)
        return kept + perf_counter_ns() - started

    kept = [step() for _ in range(steps)]
    first = look_up()
    for _ in range(CAUGHT_UP):
        look_up()
    looked_up = [look_up() for _ in range(steps)]
    each: dict[str, list[float]] = {
        "begin": [*begun],
        "keep": [ns / rows for ns in kept],
        "look up": [ns / rows for ns in looked_up],
    }
    return {name: float(np.median(ns)) / 1e3 for name, ns in each.items()} | {"the first": first / 1e6}


def main() -> int:
    """Measure and print."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.lookups", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rows", type=int, nargs="+", default=[16, 63, 256], help="requests [16 63 256]")
    parser.add_argument("--prompt", type=int, default=1024, help="tokens of a prompt [1024]")
    parser.add_argument("--steps", type=int, default=300, help="steps of each kind [300]")
    parser.add_argument("--shared", action="store_true", help="the requests are of one tenant")
    parser.add_argument("--json", help="write the results here too")
    options = parser.parse_args()
    gc.disable()
    results, table = [], list[list[object]]()
    for rows in options.rows:
        tried = [measure(rows, options.prompt, options.steps, int(options.shared)) for _ in range(TRIES)]
        found = {name: min(each[name] for each in tried) for name in tried[0]}
        results.append({"rows": rows, "prompt": options.prompt, "shared": options.shared} | found)
        table.append([rows, *(f"{found[name]:.2f}" for name in ("begin", "keep", "look up", "the first"))])
    header = ["rows", "begin, us", "keep, us a row", "look up, us a row", "the first, ms"]
    report(f"lookups, prompts of {options.prompt} tokens", header, table, results, options.json)
    return 0


if __name__ == "__main__":
    sys.exit(main())
