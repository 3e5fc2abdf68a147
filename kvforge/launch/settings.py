"""The settings of `kvforge up`, and the configuration files that it writes for its children."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from datetime import datetime
from pathlib import Path
from typing import Any

import tomli_w

from kvforge.protocol.errors import InvalidConfiguration

from .host import expects_gpu

Value = str | int | float | bool
Setting = Value | list[str] | dict[str, Value | list[str]]
WORKERS_MAX = 64
DRAIN_S = 30.0
STOP_S = 10.0
WORKER_WATCHDOG_S = 120.0  # as in deploy/
STEP_TIMEOUTS = 2  # a worker feeds its watchdog between steps
BLOCK_SIZE = 16  # the coordinator's default
# As in deploy/: room for the context of most models, and on a GPU for as many requests as it needs to be busy.
CONTEXT_TOKENS_MAX = 131_072
GPU_STEP_ROWS_MAX, GPU_STEP_TOKENS_MAX = 256, 2048
GPU_SEQUENCES_MAX, GPU_QUEUE_MAX, GPU_BLOCKS_MAX = 1024, 4096, 1 << 22


@dataclass(frozen=True)
class Http:
    """The gateway.

    Attributes:
        host: The address that it listens at.
        port: Its port.
        processes: The number of its processes.
        names: The model's names in requests.
        config: Its gateway.toml, or None.
        named: The names were given as options and take precedence over those of the file.
        key_hashes: Hashes of API keys, as in `[keys.NAME]`.
    """

    host: str
    port: int
    processes: int = 1
    names: tuple[str, ...] = ()
    config: Path | None = None
    named: bool = False
    key_hashes: tuple[str, ...] = ()


@dataclass(frozen=True)
class Settings:
    """One installation in the foreground.

    `worker`, `limits`, `cache`, `schedule`, `journal`, `quotas` (by tenant), `tcp`, `access` and `kv_events` hold
    settings that differ from the children's defaults. Sequences have room for CONTEXT_TOKENS_MAX tokens, and the steps
    of workers on GPUs are those of deploy/, unless `limits` and `schedule` say otherwise.

    Attributes:
        state: state_dir and durability, if they differ from the defaults.
        fresh: The coordinator first discards the state of an earlier one.
        worker_module: The module to run as a worker, if it is not kvforge's own (`python -m kvforge.loadtest.fleet`).
        tensor_parallel: Processes of each worker (its ranks), which compute the model together.
        devices: The device index of each process in turn; empty: process i uses device i.
        threads: CPU threads of each process. None: the cores are divided; a single process counts these itself, because
            its control group may have a quota.
        drain_s: How long running requests may take to end after a stop.
        stop_s: How long the processes may take after that.
    """

    model: Path
    runtime_dir: Path
    workers: int = 1
    tensor_parallel: int = 1
    worker_module: str = "kvforge.worker"
    threads: int | None = None
    devices: tuple[int, ...] = ()
    worker: Mapping[str, Value] = field(default_factory=dict)
    limits: Mapping[str, Value] = field(default_factory=dict)
    cache: Mapping[str, Value] = field(default_factory=dict)
    schedule: Mapping[str, Value] = field(default_factory=dict)
    quotas: Mapping[str, Mapping[str, Value]] = field(default_factory=dict)
    tcp: Mapping[str, Value] = field(default_factory=dict)
    access: Mapping[str, Mapping[str, Setting]] = field(default_factory=dict)
    journal: Mapping[str, Value] = field(default_factory=dict)
    kv_events: Mapping[str, Value] = field(default_factory=dict)
    state: Mapping[str, Value] = field(default_factory=dict)
    fresh: bool = False
    http: Http | None = None
    log_level: str = "info"
    log_format: str = "text"
    log_dir: Path | None = None
    drain_s: float = DRAIN_S
    stop_s: float = STOP_S

    def coordinator_file(self) -> str:
        """Return the text of coordinator.toml.

        It turns the coordinator's own draining off: the supervisor drains, then stops the coordinator at once.
        """
        top: dict[str, Value] = {
            "runtime_dir": _path(self.runtime_dir),
            **self.state,
            "log_level": self.log_level,
            "log_format": self.log_format,
            "drain_s": 0.0,
        }
        sections = {
            "limits": self._limits(),
            "cache": self.cache,
            "schedule": self._schedule(),
            "journal": self.journal,
        }
        others = {"quotas": self.quotas, "tcp": self.tcp, "access": self.access, "kv_events": self.kv_events}
        return toml(top, {**sections, **others})

    def _limits(self) -> Mapping[str, Value]:
        """Return [limits], with room for long sequences and, on GPUs, for many, unless the file says otherwise.

        Wrong values are left to the children, which name them.
        """
        limits: dict[str, Value] = {}
        tokens, size = self.worker.get("context_tokens_max", 0), self.cache.get("block_size", BLOCK_SIZE)
        if isinstance(tokens, int) and isinstance(size, int) and size > 0:
            limits["blocks_per_sequence_max"] = -(-max(tokens, CONTEXT_TOKENS_MAX) // size)
        if self._on_gpus:
            # Twice what runs at once, so that clients can keep sequences too.
            rows = self._schedule()["step_rows_max"]
            if isinstance(rows, int):
                limits["sequences_max"] = max(GPU_SEQUENCES_MAX, 2 * self.workers * rows)
            limits |= {"queue_max": GPU_QUEUE_MAX, "blocks_max": GPU_BLOCKS_MAX}
        return {**limits, **self.limits}

    def _schedule(self) -> Mapping[str, Value]:
        """Return [schedule], with steps for a GPU where the workers have GPUs, unless the file says otherwise."""
        steps = {"step_tokens_max": GPU_STEP_TOKENS_MAX, "step_rows_max": GPU_STEP_ROWS_MAX}
        return {**(steps if self._on_gpus else {}), **self.schedule}

    @property
    def _on_gpus(self) -> bool:
        return expects_gpu(str(self.worker.get("device", "auto")))

    @property
    def processes(self) -> int:
        """Return the number of processes of all workers."""
        return self.workers * self.tensor_parallel

    @property
    def worker_watchdog_s(self) -> float:
        """Return after how many seconds without a report a worker hangs: later than the coordinator ends it."""
        step_timeout_s = self.schedule.get("step_timeout_s", 0)
        assert isinstance(step_timeout_s, int | float), "checked by the parser"
        return max(WORKER_WATCHDOG_S, STEP_TIMEOUTS * step_timeout_s)

    def worker_of(self, process: int) -> str:
        """Return the name of the worker that a process belongs to."""
        return f"worker-{process // self.tensor_parallel}"

    def process_name(self, process: int) -> str:
        """Return the name of a process in messages and log files."""
        rank = f".{process % self.tensor_parallel}" if self.tensor_parallel > 1 else ""
        return f"{self.worker_of(process)}{rank}"

    def worker_file(self, process: int) -> str:
        """Return the text of the configuration of one worker process."""
        shared = max(1, len(os.sched_getaffinity(0)) // self.processes) if self.processes > 1 else 0
        ranks: dict[str, Value] = {"ranks": self.tensor_parallel, "rank": process % self.tensor_parallel}
        top: dict[str, Value] = {
            "name": self.worker_of(process),
            **(ranks if self.tensor_parallel > 1 else {}),
            "runtime_dir": _path(self.runtime_dir),
            "model": str(self.model),
            "device_index": self.devices[process % len(self.devices)] if self.devices else process,
            "threads": self.threads if self.threads is not None else shared,
            "log_level": self.log_level,
            "log_format": self.log_format,
            **self.worker,
        }
        return toml(top, {})


def toml(top: Mapping[str, Value], tables: Mapping[str, Mapping[str, Any]]) -> str:
    """Return a TOML document of scalars and lists, in nested tables; empty tables are left out.

    Raises:
        InvalidConfiguration: TOML cannot hold a text.
    """
    document = _filled({**top, **tables})
    _check_texts(document)
    return tomli_w.dumps(document)


def toml_value(key: str, value: Value | list[str] | datetime) -> str:
    """Return a scalar or a list in TOML.

    Raises:
        InvalidConfiguration: TOML cannot hold a text. Names `key`.
    """
    _check_texts({key: value})
    return tomli_w.dumps({"key": value}).removeprefix("key = ").removesuffix("\n")


def _filled(table: Mapping[str, Any]) -> dict[str, Any]:
    """Return a table without the empty tables in it."""
    found = {key: _filled(value) if isinstance(value, Mapping) else value for key, value in table.items()}
    return {key: value for key, value in found.items() if value != {}}


def _check_texts(table: Mapping[str, Any]) -> None:
    for key, value in table.items():
        if isinstance(value, Mapping):
            _check_texts(value)
        for text in (key, *(value if isinstance(value, list) else [value])):
            try:
                str(text).encode()
            except UnicodeEncodeError:
                raise InvalidConfiguration(ascii(key)[1:-1], f"{text!r} is not valid Unicode") from None


def _path(path: Path) -> str:
    # Children expand $VARIABLES and ~ in folders, so a folder's name must not look like one.
    text = str(path.absolute())
    if os.path.expandvars(text) != text:
        raise InvalidConfiguration(
            "runtime_dir", f"{text} contains the name of an environment variable; choose another folder"
        )
    return text
