"""Run a worker: `python -m kvforge.worker --config FILE.toml [--check]`.

Exit status (see `protocol.exits`):

    0  stopped on request
    1  the device failed, or the coordinator has no room for this worker at present: a restart may help
    2  invalid configuration, or the model was not found
    3  cannot start, and a restart would not help: unsupported model, a kernel that does not compile or gives wrong
       results on this device, torch missing, or rejected by the coordinator
    4  no coordinator answered in time

A supervisor restarts a worker after 1 and 4.
"""

from __future__ import annotations

import sys

if sys.platform != "linux":
    from kvforge.protocol.platforms import leave

    leave("the worker")

import atexit
import faulthandler
import json
import logging
import os
import signal
import traceback
from contextlib import closing, suppress
from pathlib import Path
from typing import NoReturn

from kvforge.models.store import default_cache_dir
from kvforge.process.collector import collector_paused, keep_all
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

from .bytecode import keep_bytecode
from .config import WorkerConfig, load_config
from .cores import CoreShare, choose
from .model_path import find_draft_model, find_model
from .page_cache import PageCacheReader
from .startup import StartupTimeline


def main(arguments: list[str] | None = None) -> int:
    """Run a worker until it is stopped, and return its exit status."""
    parser = Parser(prog="python -m kvforge.worker", description=__doc__)
    parser.add_argument("--config", type=Path, required=True, help="TOML file")
    parser.add_argument("--check", action="store_true", help="check the model and the device, then exit")
    options = parser.parse_args(arguments)
    try:
        timeline = StartupTimeline()
        config = load_config(options.config)
        logs.configure(config.name, config.log_level, config.log_format)
        # torch creates this folder on import, in /tmp by default. Compiled code belongs in kvforge's cache.
        os.environ.setdefault("TORCHINDUCTOR_CACHE_DIR", str(default_cache_dir() / "inductor"))
        model = find_model(config)
        find_draft_model(config)
        if options.check:
            return _check(config, model)
        with closing(CoreShare(config.runtime_path, config.name)) as place:
            cores = choose(place, config.threads, os.environ)  # before OpenMP reads it, on torch's import
            if config.rank == 0 and config.load_format != "dummy":
                reader = PageCacheReader(Path(model))
                reader.start()
                timeline.at_end(reader.stop)
            timeline.enter("imports")
            if keep_bytecode():
                logging.getLogger("worker").info(
                    "bytecode of torch is kept in the cache folder: it has none of its own"
                )
            with collector_paused():
                from .step.loop import Worker  # slow: imports torch, so settings and files are checked first

            keep_all()
            Worker(config, cores, place, timeline).run()
    except ImportError as error:
        problem = f"a worker needs torch and transformers ({error}): {install_command('worker')}"
        return _fail(Unavailable(problem))
    except KvforgeError as error:
        return _fail(error)
    return OK


def _check(config: WorkerConfig, model: str) -> int:
    """Import the dependencies, open the device and print a JSON description. Load no model.

    Raises:
        ImportError: torch or transformers is missing.
        InvalidConfiguration: The configured device is not available.
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
    """End this process with an exit status, without the interpreter's teardown.

    The teardown frees the objects of torch and transformers one by one, which takes up to half a second.
    """
    keep_all()  # functions that run at exit collect nothing of these objects either
    ranks = sys.modules.get("kvforge.worker.device.ranks")  # None before the worker has imported torch
    if ranks is None or not ranks.must_leave_at_once():
        atexit._run_exitfuncs()
    logging.shutdown()
    for stream in (sys.stdout, sys.stderr):
        with suppress(OSError, ValueError):  # its reader has gone, or it is closed
            stream.flush()
    os._exit(status)


# Errors that a restart may clear: the device failed, or the set of connected workers has changed.
PASSING = WorkerError, InternalError, Conflict, CapacityExceeded


def _fail(error: KvforgeError) -> int:
    print(f"worker: {error}", file=sys.stderr)
    if isinstance(error, CoordinatorUnavailable):
        return TIMED_OUT
    status = status_of(error)
    # Any other error that is not this machine's is a rejection by the coordinator, which would reject a restart too.
    return UNAVAILABLE if status == FAILED and not isinstance(error, PASSING) else status


if __name__ == "__main__":
    # The coordinator requests a stack dump from a hung worker before it kills the process.
    faulthandler.register(signal.SIGUSR1, all_threads=True, chain=False)
    try:
        status = main()
    except Exception:  # noqa: BLE001 - a bug: print the traceback
        traceback.print_exc()
        status = FAILED
    leave(status)
