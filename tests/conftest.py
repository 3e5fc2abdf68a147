"""Fixtures shared by the tests of several packages."""

from __future__ import annotations

import atexit
import faulthandler
import gc
import logging
import math
import mmap
import os
import shutil
import signal
import sys
import tempfile
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from time import monotonic
from typing import Any

import pytest
from _pytest.logging import catching_logs
from hypothesis import settings

from kvforge.models import store
from kvforge.process.collector import keep_all
from tests import amount, fresh, tiers
from tools.cluster.cluster import Cluster
from tools.cluster.fork_server import SharedForkServers

ROOT = Path(__file__).parents[1]
INDUCTOR = "TORCHINDUCTOR_CACHE_DIR"
_made: list[str] = []
if INDUCTOR not in os.environ:
    # torch creates a folder for compiled code on import, which other conftest files trigger: the end removes it.
    _made.append(tempfile.mkdtemp(prefix="kvforge-inductor-"))
    os.environ[INDUCTOR] = _made[0]

# As `worker.device.products` sets it: oneDNN reads it at its first product, which may be that of another test.
os.environ.setdefault("ONEDNN_MAX_CPU_ISA", "AVX512_CORE_FP16")

# Examples are the same in every run, and without deadlines, which mean nothing on a busy machine.
settings.register_profile("suite", deadline=None, derandomize=True)
settings.load_profile("suite")

COLLECT_AFTER = 20_000, 10, 10  # new objects; Python's own first number is 700
GROWTH_BYTES = 512 << 20
STATM = Path("/proc/self/statm")
HANG_S, WATCH_EVERY_S = 300, 60  # a test that hangs for both shows where it is
_terminal, _watch_began = [2], [-math.inf]  # pytest points descriptor 2 elsewhere while a test runs
_collected_at = [0]
_loggers = [0]
_shared: list[SharedForkServers] = []
# Collection imports torch and transformers and makes ten thousand tests: nothing here is garbage, now or at the end.
gc.disable()
atexit.register(keep_all)

# Background jobs of a shell ignore SIGINT; the processes that tests interrupt would inherit that.
signal.signal(signal.SIGINT, signal.default_int_handler)


def pytest_configure(config: pytest.Config) -> None:
    """Choose the seeds and cases of the day, once for all processes of a run, and the number of examples."""
    fresh.choose_day(config)
    amount.choose(config)
    assert sys.__stderr__ is not None
    _terminal[:] = [os.dup(sys.__stderr__.fileno())]
    _report_less(config)
    whole = not (config.getoption("file_or_dir") or config.getoption("keyword") or config.getoption("collectonly"))
    if whole and sys.platform == "linux" and config.getoption("numprocesses", None):  # the controller of xdist
        _shared.append(SharedForkServers())


def pytest_report_header() -> str:
    """Print the seeds and cases of the day and how to repeat them."""
    return fresh.headline()


def pytest_pycollect_makemodule(module_path: Path) -> None:
    """Refuse files in folders without a tier."""
    folder = module_path.parent.relative_to(ROOT).as_posix()
    if tiers.tier_of(f"{folder}/{module_path.name}::") is None:
        raise pytest.Collector.CollectError(f"no tier: {folder} (add it to FOLDERS in tests/tiers.py)")


@pytest.hookimpl(tryfirst=True)  # before `-m` selects
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Mark each test with its tier, put long files first, and keep all tests for the checks of `test_tiers.py`."""
    items.sort(key=lambda item: item.nodeid.partition("::")[0] not in tiers.LONG)
    for item in items:
        tier = tiers.tier_of(item.nodeid)
        assert tier is not None, item.nodeid
        if item.get_closest_marker("soak") is None:  # single cases of a test may have the mark
            item.add_marker(tier)
    config.stash[tiers.COLLECTED] = [*items]


@pytest.hookimpl(tryfirst=True)
def pytest_runtestloop() -> None:
    """Let the collector run while tests do, though less often: it took a twentieth of many files' time."""
    keep_all()
    gc.set_threshold(*COLLECT_AFTER)
    gc.enable()


def _let_records_reach_the_root() -> None:
    """Let all loggers pass their records on to the root, where pytest has its handlers."""
    loggers = logging.getLogger().manager.loggerDict
    if len(loggers) != _loggers[0]:
        _loggers[0] = len(loggers)
        for logger in [*loggers.values()]:
            if isinstance(logger, logging.Logger):
                logger.propagate = True


def _attach_to_root(catching: catching_logs[Any]) -> Any:
    """Begin to catch logs as pytest does, at the root alone.

    pytest looks for loggers that pass no records on, six times a test. Each module of transformers has a logger: a look
    took a fifth of a millisecond.
    """
    root = logging.getLogger()
    root.addHandler(catching.handler)
    catching.attached_loggers.append(root)
    if catching.level is not None:
        catching.handler.setLevel(catching.level)
        catching.orig_level = root.level
        root.setLevel(min(root.level, catching.level))
    return catching.handler


setattr(catching_logs, "__enter__", _attach_to_root)  # noqa: B010 - mypy allows no assignment


def _report_less(config: pytest.Config) -> None:
    """Let a process of xdist report no start of a test, and no set-up or teardown that passed without output.

    A report takes the process and the controller half a millisecond, and six were sent for each test.
    """
    if config.getoption("durations", None) or config.getoption("xmlpath", None):  # these show set-up and teardown
        return
    for plugin in config.pluginmanager.get_plugins():
        if type(plugin).__name__ == "WorkerInteractor":
            plugin.sendevent = partial(_send, plugin.sendevent)


def _send(send: Callable[..., None], name: str, **values: Any) -> None:
    report = values.get("data", {})
    silent = report.get("outcome") == "passed" and report.get("when") != "call" and not report.get("sections")
    if name != "logstart" and not (name == "testreport" and silent):
        send(name, **values)


def pytest_runtest_logstart() -> None:
    """Watch for a hang. pytest's own watch starts and ends a thread for each test, which took a millisecond."""
    _let_records_reach_the_root()
    if _watch_began[0] + WATCH_EVERY_S < monotonic():
        _watch_began[0] = monotonic()
        faulthandler.dump_traceback_later(HANG_S + WATCH_EVERY_S, file=_terminal[0])


@pytest.hookimpl(trylast=True)
def pytest_runtest_teardown() -> None:
    """Collect when the process has grown: few objects may hold much memory, and the collector counts objects."""
    if _resident_bytes() > _collected_at[0] + GROWTH_BYTES:
        gc.collect()
        _collected_at[0] = _resident_bytes()


def _resident_bytes() -> int:
    """Return this process's memory. Linux only: elsewhere 0."""
    if not STATM.exists():
        return 0
    return int(STATM.read_text(encoding="ascii").split()[1]) * mmap.PAGESIZE


def pytest_unconfigure() -> None:
    """End the watch and the fork servers, and remove the temporary folders."""
    faulthandler.cancel_dump_traceback_later()
    while _shared:
        _shared.pop().close()
    for folder in _made:
        os.environ.pop(INDUCTOR, None)
        shutil.rmtree(folder, ignore_errors=True)
    _made.clear()


@pytest.fixture(scope="session")
def smollm2_path() -> Path:
    """The SmolLM2-135M-Instruct GGUF file, fetched into the user's cache folder on first use. For `model` tests."""
    return store.pull("smollm2-135m")


@pytest.fixture(scope="session")
def smollm2_cluster(smollm2_path: Path) -> Iterator[Cluster]:
    """A cluster with the real model on w0, for the tests that kill none of its processes: a load takes seconds."""
    with Cluster(model=smollm2_path, blocks=512) as cluster:
        cluster.start("w0")
        yield cluster
