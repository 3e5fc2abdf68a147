"""python -m tests.chaos --minutes 10 --seed 1: real processes that are killed and stopped; nothing is lost.

A coordinator, two workers with a tiny model, a gateway, twenty clients in five processes, four of them over
HTTP. The same seed draws the same misfortunes and requests; when what meets what is the machine's. Prints a report as
JSON, and exits with 1 where it has faults.
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path

from loadtest.machine import machine, versions

from .driver import Driver
from .planted import FAULTS

TITLE = "chaos: what was lost, doubled, changed or left behind while processes were killed and stopped"


def main() -> int:
    """Exit status 1 where anything was lost, doubled, changed or left behind."""
    parser = argparse.ArgumentParser(prog="python -m tests.chaos", description=__doc__)
    parser.add_argument("--minutes", type=float, default=1.0, help="of misfortunes; about half a minute comes on top")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--json", type=Path, help="write the report there too")
    parser.add_argument("--quiet", action="store_true", help="say nothing of each misfortune")
    parser.add_argument("--plant", choices=sorted(FAULTS), default="", help="a fault of the product, to see it found")
    parser.add_argument("--device", default="cpu", help="of the workers: cpu, cuda, hip or auto [cpu]")
    parser.add_argument(
        "--dtype", default="float32", help="in which they compute: the promise is one for all [float32]"
    )
    parser.add_argument("--ranks", action="store_true", help="the workers are the ranks of one, each with its part")
    options = parser.parse_args()
    tell = _silent if options.quiet else _say
    computing = (options.device, options.dtype)
    report = Driver(options.minutes, options.seed, tell, options.plant, *computing, together=options.ranks).run()
    print(json.dumps(report, indent=1))
    if options.json is not None:
        document = {"title": TITLE, "machine": machine(), "versions": versions(), "results": report}
        options.json.write_text(json.dumps(document, indent=2) + "\n", encoding="utf-8")
    return 1 if report["faults"] else 0


def _say(words: str) -> None:
    print(words, file=sys.stderr, flush=True)


def _silent(_words: str) -> None: ...


if __name__ == "__main__":
    sys.exit(main())
