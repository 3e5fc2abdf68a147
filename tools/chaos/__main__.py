"""Kill and stop real processes for some minutes, and check that no work is lost.

    python -m tools.chaos --minutes 10 --seed 1

Runs a coordinator, two workers with a tiny model, a gateway, and twenty clients in five processes, four clients over
HTTP. A seed fixes the faults and the requests; their relative timing depends on the machine. Prints a report as JSON
and exits with status 1 if the report has faults.
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path

from kvforge.loadtest.machine import machine, versions
from tools.cluster.running import FAMILIES

from .driver import DRAFTERS, Driver
from .interruptions import PAUSE_S, PAUSE_S_MIN
from .planted import FAULTS

HOST_BYTES, DISK_BYTES = 2 << 20, 64 << 20
TITLE = "chaos: requests lost, duplicated, changed or left behind while processes were killed and stopped"


def main() -> int:
    """Run the chaos test; return exit status 1 if it found a fault."""
    parser = argparse.ArgumentParser(prog="python -m tools.chaos", description=__doc__)
    parser.add_argument(
        "--minutes", type=float, default=1.0, help="minutes of process faults; start and end add half a minute"
    )
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--json", type=Path, help="also write the report to this file")
    parser.add_argument("--quiet", action="store_true", help="do not log each process fault")
    parser.add_argument(
        "--plant", choices=sorted(FAULTS), default="", help="plant this bug in the product; the run must detect it"
    )
    parser.add_argument("--device", default="cpu", help="the workers' device: cpu, cuda, hip or auto [cpu]")
    parser.add_argument(
        "--dtype", default="float32", help="the workers' dtype; tokens must match for every dtype [float32]"
    )
    parser.add_argument(
        "--ranks",
        type=int,
        nargs="?",
        default=1,
        const=2,
        help="run this many processes as ranks of one worker in place of two workers [2 if no number]",
    )
    parser.add_argument(
        "--pause",
        type=float,
        default=PAUSE_S,
        help=f"mean seconds between two faults; many ranks on GPUs need as long as they take to start [{PAUSE_S}]",
    )
    parser.add_argument("--family", choices=sorted(FAMILIES), default="llama", help="family of the tiny model [llama]")
    parser.add_argument(
        "--drafts", type=int, default=0, help="schedule.drafts_max; answers must be those without drafts [0]"
    )
    parser.add_argument(
        "--drafter",
        choices=DRAFTERS,
        default=DRAFTERS[0],
        help="with --drafts: lookup alone, the model itself as its draft model, or a random MTP module [lookup]",
    )
    parser.add_argument(
        "--host",
        type=int,
        nargs="?",
        default=0,
        const=HOST_BYTES,
        help=f"host_bytes of each worker, with write-back; answers must be those without a host tier [{HOST_BYTES}]",
    )
    parser.add_argument(
        "--disk",
        type=int,
        nargs="?",
        default=0,
        const=DISK_BYTES,
        help=f"disk_bytes of each worker, with --host; the processes that copy are killed too [{DISK_BYTES}]",
    )
    options = parser.parse_args()
    if options.pause <= PAUSE_S_MIN:
        parser.error(f"--pause: {options.pause:g} is not above {PAUSE_S_MIN:g}, the least pause")
    if options.disk and not options.host:
        parser.error("--disk: blocks go to the disk through the host tier, add --host")
    if options.drafter != DRAFTERS[0] and not options.drafts:
        parser.error(f"--drafter {options.drafter}: no drafts are verified, add --drafts 4")
    log = _silent if options.quiet else _print
    computing = (options.device, options.dtype)
    others = {"ranks": options.ranks, "pause_s": options.pause, "family": options.family, "drafts": options.drafts}
    others |= {"host_bytes": options.host, "disk_bytes": options.disk, "drafter": options.drafter}
    report = Driver(options.minutes, options.seed, log, options.plant, *computing, **others).run()
    print(json.dumps(report, indent=1))
    if options.json is not None:
        document = {"title": TITLE, "machine": machine(), "versions": versions(), "results": report}
        options.json.write_text(json.dumps(document, indent=2) + "\n", encoding="utf-8")
    return 1 if report["faults"] else 0


def _print(words: str) -> None:
    print(words, file=sys.stderr, flush=True)


def _silent(_words: str) -> None: ...


if __name__ == "__main__":
    sys.exit(main())
