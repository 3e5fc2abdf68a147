"""The file of `kvforge up --config`: what the command's options say, and every setting of the processes it starts."""

from __future__ import annotations

from pathlib import Path

import msgspec

from kvforge.protocol.configuration import load
from kvforge.protocol.errors import InvalidConfiguration

from .settings import Setting, Value

# What `up` gives each worker itself.
OURS = ("name", "runtime_dir", "endpoint", "server_key", "key_file", "ranks", "rank", "log_level", "log_format")


class UpFile(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """At the top what the options of the same names say, which go before it. [worker]: settings of every worker, as in
    worker.toml. [limits], [cache], [schedule], [quotas.TENANT], [tcp], [access]: the coordinator's, as in
    coordinator.toml.
    """

    model: str | None = None
    model_config: str | None = None
    workers: int | None = None
    tensor_parallel: int | None = None
    devices: tuple[int, ...] | None = None
    threads: int | None = None
    drain_s: float | None = None
    stop_s: float | None = None
    log_dir: str | None = None
    log_level: str | None = None
    log_format: str | None = None
    worker: dict[str, Value] = {}
    limits: dict[str, Value] = {}
    cache: dict[str, Value] = {}
    schedule: dict[str, Value] = {}
    quotas: dict[str, dict[str, Value]] = {}
    tcp: dict[str, Value] = {}
    access: dict[str, dict[str, Setting]] = {}


def load_up_file(path: Path | None) -> UpFile:
    """Reads the file. Raises InvalidConfiguration naming the file or the key."""
    if path is None:
        return UpFile()
    found = load(path, UpFile)
    for name in OURS:
        if name in found.worker:
            raise InvalidConfiguration(f"worker.{name}", "is given to each worker by `kvforge up`")
    return found
