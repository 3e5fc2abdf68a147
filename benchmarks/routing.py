"""Routing of requests to eight replicas without a model: round robin against the gateway's router.

    python -m benchmarks.routing [--seconds 60] [--seeds 0,1] [--json benchmarks/results/routing.json]

Three loads through the harness (`kvforge loadtest --no-model --replicas 8 --policy P`): agents' sessions, where each
turn extends the previous one; one prefix that all requests share; and prompts that share nothing. Coordinators, their
clients and the router are the real ones, and each replica is a separate process. Steps take SLOWER times as long as on
an H200, so that eight replicas fit on two cores; sessions and the memory for their KV are a twentieth of the real size.
Goodput is the harness's: requests a second that finished within the objective.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from kvforge.routing import POLICIES

from .report import report

REPLICAS, SLOWER = 8, 8.0
BLOCKS = 2656  # 0.05 of an H200's blocks, scaled as the sessions' lengths
OBJECTIVE = "ttft=2s,itl=200ms"
LOADS = {
    "agents": "--trace claude-code --rate 10 --requests 96 --length-scale 0.05 --think-scale 0.05",
    "one hot prefix": "--rate 40 --prefix 6000 --input 6050:6350 --output 64",
    "one hot prefix, busy": "--rate 32 --prefix 6000 --input 6500:7500 --output 64",
    "no sharing": "--rate 18 --input lognormal:1000,1.0 --output 64",
}
HEADER = ("load", "seed", "policy", "goodput/s", "finished/s", "ttft p50", "ttft p99", "itl p99", "cached")


def run(load: str, policy: str, seed: int, seconds: float) -> dict[str, Any]:
    """Run the harness once; return a summary of its document."""
    with tempfile.TemporaryDirectory() as folder:
        command = [
            sys.executable,
            "-m",
            "kvforge.loadtest",
            *LOADS[load].split(),
            "--no-model",
            "h200-8b",
            "--policy",
            policy,
        ]
        command += ["--replicas", str(REPLICAS), "--time-scale", str(SLOWER), "--blocks", str(BLOCKS)]
        command += ["--duration", str(seconds), "--slo", OBJECTIVE, "--timeout", str(seconds), "--seed", str(seed)]
        command += ["--no-proof", "--quiet", "--out", folder]
        ended = subprocess.run(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, check=False)
        file = Path(folder) / "result.json"
        assert file.exists(), ended.stdout
        document = json.loads(file.read_text())
    everything, latency = document["all"], document["all"]["latency_ms"]
    return {
        "load": load,
        "policy": policy,
        "seed": seed,
        "requests": everything["requests"],
        "throughput": everything["throughput"],
        "goodput": everything["goodput"],
        "latency_ms": {name: {p: latency[name].get(p) for p in ("mean", "p50", "p99")} for name in latency},
        "cached": document["prefix"]["share"],
        "options": document["options"],
        "notes": [*document["verdict"]["why"], *document["verdict"]["notes"]],
    }


def main() -> None:
    """Run each load with each policy, and report."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seconds", type=float, default=60.0)
    parser.add_argument("--seeds", default="0")
    parser.add_argument("--loads", default=";".join(LOADS))
    parser.add_argument("--json")
    options = parser.parse_args()
    results, rows = [], []
    for seed in map(int, options.seeds.split(",")):
        for load in options.loads.split(";"):
            for policy in reversed(POLICIES):
                result = run(load, policy, seed, options.seconds)
                results.append(result)
                rows.append(row(result))
                print(rows[-1], flush=True)
    report(f"routing over {REPLICAS} replicas, steps {SLOWER:g} times as long", HEADER, rows, results, options.json)


def row(result: dict[str, Any]) -> tuple[object, ...]:
    """One line of the table."""
    latency = result["latency_ms"]
    return (
        *(result[name] for name in ("load", "seed", "policy")),
        round(result["goodput"]["requests_per_s"], 2),
        round(result["throughput"]["requests_per_s"], 2),
        *(round(latency[name][p]) for name, p in (("ttft", "p50"), ("ttft", "p99"), ("itl", "p99"))),
        f"{result['cached']:.1%}",
    )


if __name__ == "__main__":
    main()
