"""python -m worker --config FILE.toml [--check]

Exit status: as `protocol.exits` has it: 0 stopped as asked; 1 the device failed, or the coordinator has no room for
this worker at present (a new start may help); 2 wrong configuration or no such model; 3 could not start, and would not
again (model not supported, a kernel that is wrong here or does not compile, no torch, refused by the coordinator); 4 no
coordinator in time. Whoever restarts workers does so after 1 and 4.
"""

from __future__ import annotations

import faulthandler
import json
import logging
import os
import signal
import sys
import traceback
from contextlib import closing
from pathlib import Path
from typing import NoReturn

from kvforge.models.store import default_cache_dir
from kvforge.process.installation import install_command
from kvforge.process.parser import Parser
from kvforge.protocol import logs
from kvforge.protocol.errors import (
    CapacityExceeded,
    Conflict,
    CoordinatorUnavailable,
    InternalError,
    KvforgeError,
    Unavailable,
    WorkerError,
)
from kvforge.protocol.exits import FAILED, OK, TIMED_OUT, UNAVAILABLE, status_of

from .config import WorkerConfig, load_config
from .cores import Place, choose
from .model_path import find_model


def main(arguments: list[str] | None = None) -> int:
    """Runs a worker until it is told to stop. Returns the exit status."""
    parser = Parser(prog="python -m worker", description=__doc__)
    parser.add_argument("--config", type=Path, required=True, help="TOML file")
    parser.add_argument("--check", action="store_true", help="see whether model and device are there, and end")
    options = parser.parse_args(arguments)
    try:
        config = load_config(options.config)
        logs.configure(config.name, config.log_level, config.log_format)
        # torch makes this folder as soon as it is imported, in /tmp unless it is told where compiled code may stay.
        os.environ.setdefault("TORCHINDUCTOR_CACHE_DIR", str(default_cache_dir() / "inductor"))
        model = find_model(config)
        if options.check:
            return _check(config, model)
        with closing(Place(config.runtime_path, config.name)) as place:
            cores = choose(place, config.threads, os.environ)  # before torch, whose OpenMP reads it
            from .step.loop import (
                Worker,  # torch takes seconds to import: what is wrong with settings and files is told before
            )

            Worker(config, cores, place).run()
    except ImportError as error:
        problem = f"a worker needs torch and transformers ({error}): {install_command('worker')}"
        return _fail(Unavailable(problem))
    except KvforgeError as error:
        return _fail(error)
    return OK


def _check(config: WorkerConfig, model: str) -> int:
    """Imports what a worker needs and opens its device, and says as JSON what it found. Nothing is loaded.

    Raises ImportError, InvalidConfiguration.
    """
    import torch
    import transformers

    from .device.device import open_device

    device = open_device(config.device, config.device_index)
    versions = {"torch": torch.__version__, "transformers": transformers.__version__}
    place = {"name": config.name, "rank": config.rank, "ranks": config.ranks, "runtime_dir": str(config.runtime_path)}
    print(json.dumps({**place, **device.described, "model": model, **versions}))
    return OK


def leave(status: int) -> NoReturn:
    """Ends this process."""
    ranks = sys.modules.get("worker.device.ranks")  # torch takes seconds to import
    if ranks is not None and ranks.must_leave_at_once():
        logging.shutdown()
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(status)
    sys.exit(status)


# What may be over when this worker is started again: a device, or which other workers are connected.
PASSING = WorkerError, InternalError, Conflict, CapacityExceeded


def _fail(error: KvforgeError) -> int:
    print(f"worker: {error}", file=sys.stderr)
    if isinstance(error, CoordinatorUnavailable):
        return TIMED_OUT
    status = status_of(error)
    # What is no fault of this machine is a coordinator's refusal: it would refuse a new start too.
    return UNAVAILABLE if status == FAILED and not isinstance(error, PASSING) else status


if __name__ == "__main__":
    # A coordinator that finds this worker hung asks for its stack before it kills it.
    faulthandler.register(signal.SIGUSR1, all_threads=True, chain=False)
    try:
        status = main()
    except Exception:  # noqa: BLE001 - told as Python tells it
        traceback.print_exc()
        status = FAILED
    leave(status)
