"""Cost of the exchange between two products where several GPUs compute one model: the sum over all ranks and its norm.

    python -m benchmarks.gpu_exchange [--ranks 2] [--hidden 4096] [--tokens 1,16,64,256,2048] [--json FILE]

Each rank is a process with a GPU. All ranks replay a graph of calls together; each figure is the median over the
replays of the slowest rank. Compared are: what the worker does, which reads the parts from all ranks' memory, in one
launch or in two by their size (`worker.kernels.exchange`), and each of the two for all sizes; the
library's (NCCL, RCCL) all-gather followed by the kernel that sums and norms, which must give the same bits; and its
all-reduce alone, which sums in another order. The exchanged numbers are bfloat16. "the norm alone" works on local
numbers; the differences to it are the cost of the exchange.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

from .report import report

CALLS, REPEATS, WARM = 64, 15, 3
RANK_S = 300
WAYS = ("read of peers", "one launch", "two launches", "gathered", "all-reduce alone", "norm alone")


def measured(rank: int, count: int, hidden: int, tokens: list[int], place: Path) -> dict[str, Any]:
    """Return this rank's microseconds of a call, by number of tokens and way."""
    import torch
    import torch.distributed as dist

    from kvforge.worker.device.device import open_device
    from kvforge.worker.device.queue import DeviceEvent
    from kvforge.worker.device.ranks import Ranks
    from kvforge.worker.device.targets import current_target
    from kvforge.worker.kernels import norm
    from kvforge.worker.kernels.exchange import DirectExchange, add_norm_of_ranks, norm_of_shares, sum_share
    from kvforge.worker.kernels.launching import LaunchSettings

    device = open_device("auto", rank)
    ranks = Ranks(rank, count, device)
    ranks.meet(place)
    target = current_target(device)
    launch = LaunchSettings(target, target.chained)
    size = max(tokens) * hidden * 2
    buffers = ranks.exchange((size, size, 16))
    shared = DirectExchange(buffers, launch)
    memory = device.graph_memory()
    found: dict[str, Any] = {"device": device.name, "us": {}}
    for n in tokens:
        calls = CALLS if n <= 512 else 8
        weight = torch.ones(hidden, dtype=torch.bfloat16, device=device.torch_device)
        residual = torch.zeros((n, hidden), dtype=torch.bfloat16, device=device.torch_device)
        part = torch.randn((n, hidden), device=device.torch_device).bfloat16()
        owned = [shared.place(which, (n, hidden), torch.bfloat16) for which in (0, 1)]
        places = [each for each in owned if each is not None]
        assert len(places) == 2, "the buffers are made for the largest number of tokens"
        for each in places:
            each.copy_(part)

        def read(index: int) -> None:
            shared.add_norm(index % 2, residual, weight, 1e-5)  # noqa: B023 - called before the next one

        def once(index: int) -> None:
            add_norm_of_ranks(launch, buffers.peers(index % 2), residual, weight, 1e-5)  # noqa: B023

        def twice(index: int) -> None:
            sum_share(launch, buffers.peers(index % 2), places[index % 2], residual)  # noqa: B023
            norm_of_shares(launch, buffers.peers(index % 2), residual, weight, 1e-5)  # noqa: B023

        def gathered(_index: int) -> None:
            norm.add_norm(launch, ranks.gather(part), residual, weight, 1e-5)  # noqa: B023

        def reduced(_index: int) -> None:
            dist.all_reduce(part)  # noqa: B023

        def alone(_index: int) -> None:
            norm.add_norm(launch, part[None], residual, weight, 1e-5)  # noqa: B023

        ways: dict[str, Callable[[int], None]] = dict(
            zip(WAYS, (read, once, twice, gathered, reduced, alone), strict=True)
        )
        for name, call in ways.items():
            if name == "all-reduce alone":
                part.zero_()  # keep the sum bounded

            def run(call: Callable[[int], None] = call, calls: int = calls) -> None:
                for index in range(calls):
                    call(index)

            graph = device.capture(run, memory)
            times = []
            for _ in range(WARM + REPEATS):
                ranks.agreed(True)  # all begin together
                begin = DeviceEvent(device, timed=True)
                graph.replay()
                end = DeviceEvent(device, timed=True)
                end.wait()
                times.append(end.ms_since(begin) * 1e3 / calls)
            found["us"].setdefault(str(n), {})[name] = statistics.median(times[WARM:])
        if rank == 0:
            print(f"{n} tokens: {found['us'][str(n)]}", file=sys.stderr, flush=True)
    torch.cuda.synchronize()
    ranks.close()
    return found


def main() -> int:
    """Measures and prints."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--hidden", type=int, default=4096)
    parser.add_argument("--tokens", default="1,4,16,64,256,512,2048,8192")
    parser.add_argument("--json", help="write the results here too")
    parser.add_argument("--rank", type=int, default=-1, help=argparse.SUPPRESS)
    parser.add_argument("--place", help=argparse.SUPPRESS)
    options = parser.parse_args()
    tokens = [int(each) for each in options.tokens.split(",")]
    if options.rank >= 0:
        found = measured(options.rank, options.ranks, options.hidden, tokens, Path(options.place) / "meeting")
        (Path(options.place) / f"{options.rank}.json").write_text(json.dumps(found), encoding="utf-8")
        return 0
    with tempfile.TemporaryDirectory(prefix="kvf-exchange-") as folder:
        command = [sys.executable, "-m", "benchmarks.gpu_exchange", *sys.argv[1:], "--place", folder, "--rank"]
        children = [subprocess.Popen([*command, str(rank)]) for rank in range(options.ranks)]
        try:
            if any([child.wait(RANK_S) for child in children]):  # noqa: C419 - all are waited for
                return 1
        finally:
            for child in children:
                child.kill()
        each = [json.loads((Path(folder) / f"{rank}.json").read_text()) for rank in range(options.ranks)]
    slowest = {n: {way: max(found["us"][n][way] for found in each) for way in WAYS} for n in map(str, tokens)}
    rows = [[n, f"{int(n) * options.hidden / 512:.0f}", *(f"{slowest[n][way]:.1f}" for way in WAYS)] for n in slowest]
    title = f"sum over {options.ranks} ranks and norm, hidden size {options.hidden}, microseconds, {each[0]['device']}"
    report(title, ["tokens", "KiB", *WAYS], rows, {"device": each[0]["device"], "us": slowest}, options.json)
    return 0


if __name__ == "__main__":
    sys.exit(main())
