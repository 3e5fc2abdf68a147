"""Run a coordinator with simulated workers in the foreground: `python -m kvforge.loadtest.fleet TABLE`.

The coordinator is the real one, as with `kvforge up`; the steps take the times of the table.
"""

from __future__ import annotations

import sys

if sys.platform != "linux":
    from kvforge.protocol.platforms import leave

    leave("the simulated fleet")

import argparse
import tomllib
from pathlib import Path

from kvforge.launch.supervisor import run_up
from kvforge.process.ending import Interrupted, Stopped
from kvforge.process.signals import Signals
from kvforge.protocol.errors import InvalidRequest, KvforgeError
from kvforge.protocol.exits import status_of
from kvforge.protocol.transport import default_runtime_dir

from .settings import Sections, settings
from .step_times import names


def main(arguments: list[str] | None = None) -> int:
    """Serve until a signal and return the exit status."""
    parser = argparse.ArgumentParser(prog="python -m kvforge.loadtest.fleet", description=__doc__)
    parser.add_argument("table", help=f"{', '.join(names())}, or a file with step times")
    parser.add_argument("--workers", type=int, default=1, metavar="N", help="[1]")
    parser.add_argument(
        "--blocks", type=int, default=0, metavar="N", help="KV blocks of each worker [as many as its memory holds]"
    )
    parser.add_argument("--time-scale", type=float, default=1.0, metavar="X", help="scale the step times by X [1]")
    parser.add_argument(
        "--kinds", action="store_true", help="workers compute prompts and generated tokens differently, as GPUs do"
    )
    parser.add_argument("--runtime-dir", type=Path, default=default_runtime_dir(), metavar="DIR")
    parser.add_argument(
        "--config", type=Path, metavar="FILE", help="TOML with [limits], [cache], [schedule] of the coordinator"
    )
    parser.add_argument("--log-level", default="info")
    options = parser.parse_args(arguments)
    try:
        chosen = settings(
            options.table,
            options.runtime_dir,
            workers=options.workers,
            blocks=options.blocks,
            time_scale=options.time_scale,
            kinds=options.kinds,
            coordinator=_sections(options.config),
            log_level=options.log_level,
        )
        with Signals() as signals:
            return run_up(chosen, signals, lambda _: None, "kvforge stats")
    except Stopped as end:
        print(f"fleet: {end}", file=sys.stderr)
        return end.status
    except Interrupted as end:
        return end.status
    except KvforgeError as error:
        print(f"fleet: {error}", file=sys.stderr)
        return status_of(error)


def _sections(path: Path | None) -> Sections | None:
    try:
        return None if path is None else tomllib.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise InvalidRequest("--config", f"cannot read {path}: {error}") from None


if __name__ == "__main__":
    sys.exit(main())
