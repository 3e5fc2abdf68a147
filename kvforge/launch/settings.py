"""What `kvforge up` starts: its settings, and the configuration files it writes for its children."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from datetime import datetime
from pathlib import Path
from typing import Any

from kvforge.protocol.errors import InvalidConfiguration

Value = str | int | float | bool
Setting = Value | list[str] | dict[str, Value | list[str]]
WORKERS_MAX = 64
DRAIN_S = 30.0
STOP_S = 10.0


@dataclass(frozen=True)
class Http:
    """A gateway beside them.

    names: what requests may call the model; named: they were asked for, and go before those of its file. key_hashes: of
    API keys, as `[keys.NAME]` has them. config: its gateway.toml, or None.
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
    """One installation in the foreground. worker, limits, cache, schedule, journal, quotas (by tenant), tcp, access,
    kv_events: settings that differ from the children's defaults. state: state_dir and durability, where they do.
    fresh: the coordinator first discards what an earlier one left.

    worker_module: what is run as a worker, where it is another one than kvforge's own (`python -m
    kvforge.loadtest.fleet`). tensor_parallel: processes of each worker, its ranks, which compute the model together.
    devices: the device index of each process in turn; empty: process i takes device i. threads: CPU threads of each
    process; None: the cores, shared out; one alone counts them itself, for a control group may have a quota.
    drain_s: how long running requests may take to end when asked to stop; stop_s: how long the processes may take after
    that.
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
        """Text of coordinator.toml. The supervisor drains by itself: told to end, the coordinator ends at once."""
        top: dict[str, Value] = {
            "runtime_dir": _path(self.runtime_dir),
            **self.state,
            "log_level": self.log_level,
            "log_format": self.log_format,
            "drain_s": 0.0,
        }
        sections = {"limits": self.limits, "cache": self.cache, "schedule": self.schedule, "journal": self.journal}
        others = {"quotas": self.quotas, "tcp": self.tcp, "access": self.access, "kv_events": self.kv_events}
        return toml(top, {**sections, **others})

    @property
    def processes(self) -> int:
        """Of all workers together."""
        return self.workers * self.tensor_parallel

    def worker_of(self, process: int) -> str:
        """The name of the worker that a process is, or is a rank of."""
        return f"worker-{process // self.tensor_parallel}"

    def process_name(self, process: int) -> str:
        """What it is called in what is said of it, and its log."""
        rank = f".{process % self.tensor_parallel}" if self.tensor_parallel > 1 else ""
        return f"{self.worker_of(process)}{rank}"

    def worker_file(self, process: int) -> str:
        """Text of the configuration of one process of the workers."""
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
    """A TOML document of scalars and lists, in tables of tables. Raises InvalidConfiguration for text that TOML cannot
    hold."""
    lines = [f"{key} = {toml_value(key, value)}" for key, value in top.items()]
    for name, table in tables.items():
        lines += _table(name, table)
    return "\n".join(lines) + "\n"


def _table(name: str, table: Mapping[str, Any]) -> list[str]:
    """The lines of a table and of those in it; of one that is empty none."""
    plain = [f"{key} = {toml_value(key, value)}" for key, value in table.items() if not isinstance(value, Mapping)]
    lines = ["", f"[{name}]", *plain] if plain else []
    for key, value in table.items():
        if isinstance(value, Mapping):
            lines += _table(f"{name}.{toml_value(name, key)}", value)
    return lines


def toml_value(key: str, value: Value | list[str] | datetime) -> str:
    """A scalar or a list as TOML has it. Raises InvalidConfiguration naming `key` for text that TOML cannot hold."""
    if isinstance(value, list):
        return f"[{', '.join(toml_value(key, item) for item in value)}]"
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, datetime):
        return value.isoformat()
    if not isinstance(value, str):
        return repr(value)
    try:
        value.encode()
    except UnicodeEncodeError:
        raise InvalidConfiguration(key, f"{value!r} is not valid Unicode") from None
    # JSON's escapes are TOML's; only DEL, which JSON leaves as it is, may not stand in a TOML string.
    return json.dumps(value, ensure_ascii=False).replace("\x7f", "\\u007f")


def _path(path: Path) -> str:
    # Children expand $VARIABLES and ~ in folders, so the name of a folder must not look like one.
    text = str(path.absolute())
    if os.path.expandvars(text) != text:
        raise InvalidConfiguration("runtime_dir", f"{text} holds the name of an environment variable; choose another")
    return text
