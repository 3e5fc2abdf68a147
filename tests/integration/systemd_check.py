"""Runs inside the sandboxed systemd of test_systemd.py: serves requests, stops everything, writes what it saw.

Argument: the file for its findings (JSON). Exit status: 0 when it came to its end.
"""

from __future__ import annotations

import json
import subprocess
import sys
import traceback
from pathlib import Path
from typing import Any

UNITS = ["kvforge-coordinator.service", "kvforge-worker@a.service", "kvforge-drain.service", "kvforge.target"]
PROPERTIES = "Id,ActiveState,SubState,Result,ExecMainCode,ExecMainStatus,NRestarts"


def systemctl(*arguments: str) -> str:
    return subprocess.run(["systemctl", *arguments], check=True, capture_output=True, text=True, timeout=90).stdout


def states() -> dict[str, dict[str, str]]:
    blocks = systemctl("show", "--property", PROPERTIES, *UNITS).strip().split("\n\n")
    rows = [dict(line.split("=", 1) for line in block.splitlines()) for block in blocks]
    return {row["Id"]: row for row in rows}


def look(found: dict[str, Any]) -> None:
    from kvforge import Client, Sampling

    sampling = Sampling(temperature=0.0, ignore_eos=True)
    with Client() as client:
        client.wait_ready(timeout_s=90)
        found["tokens"] = list(client.submit([1, 2, 3], max_tokens=8, sampling=sampling).result(timeout_s=30).tokens)
        found["serving"] = states()
        found["runtime_files"] = sorted(path.name for path in Path("/run/kvforge").iterdir())
        # One more request is running when everything is told to stop: it must be finished, not dropped.
        last = client.submit([4, 5, 6], max_tokens=480, sampling=sampling)
        tokens = iter(last)
        next(tokens)
        systemctl("stop", "--no-block", "kvforge.target")
        found["drained_tokens"] = 1 + sum(1 for _ in tokens)
        found["drained_reason"] = last.result(timeout_s=30).reason
    systemctl("stop", *UNITS)  # waits for each
    found["stopped"] = states()
    found["runtime_dir_left"] = Path("/run/kvforge").exists()


def main() -> None:
    found: dict[str, Any] = {}
    try:
        look(found)
    except Exception:  # noqa: BLE001 - whatever went wrong is what the test reports
        found["error"] = traceback.format_exc()
        found["states"] = states()
    Path(sys.argv[1]).write_text(json.dumps(found, indent=1))
    sys.exit("error" in found)


if __name__ == "__main__":
    main()
