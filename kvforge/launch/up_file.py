"""The file of `kvforge up --config`: options by name, and every setting of the processes it starts."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import msgspec

from kvforge.protocol.configuration import convert, read_toml
from kvforge.protocol.errors import InvalidConfiguration

from .settings import Setting, Value

# Settings of workers that `up` sets itself.
OURS = ("name", "runtime_dir", "endpoint", "server_key", "key_file", "ranks", "rank", "log_level", "log_format")
# Options that belong to a section, by section; the command line has these without their section.
IN_SECTIONS = {
    "worker": (
        "device",
        "dtype",
        "weight_dtype",
        "expert_parallel",
        "kv_dtype",
        "kv_bytes",
        "blocks",
        "memory_share",
        "load_format",
        "attention",
        "kernels",
        "graphs",
        "context_tokens_max",
    ),
    "limits": ("sequences_max", "queue_max"),
    "cache": ("block_size",),
}
# Spellings of options in other servers.
ALIASES = {
    "tensor_parallel_size": "tensor_parallel",
    "max_model_len": "context_tokens_max",
    "max_num_seqs": "sequences_max",
    "kv_cache_dtype": "kv_dtype",
    "gpu_memory_utilization": "memory_share",
    "served_model_name": "name",
}


class UpFile(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The file of `kvforge up --config`.

    At the top stand the options of the command by name (tensor_parallel = 2); the command line takes precedence.
    [worker] holds settings of every worker, as in worker.toml. [limits], [cache], [schedule], [journal],
    [quotas.TENANT], [tcp], [access] and [kv_events] hold the coordinator's, as in coordinator.toml.
    """

    runtime_dir: str | None = None
    state_dir: str | None = None
    durability: str | None = None
    fresh: bool | None = None
    model: str | None = None
    model_config: str | None = None
    workers: int | None = None
    tensor_parallel: int | None = None
    devices: tuple[int, ...] | None = None
    threads: int | None = None
    device: str | None = None
    dtype: str | None = None
    weight_dtype: str | None = None
    expert_parallel: bool | None = None
    kv_dtype: str | None = None
    kv_bytes: int | None = None
    blocks: int | None = None
    memory_share: float | None = None
    load_format: str | None = None
    attention: str | None = None
    kernels: str | None = None
    graphs: str | None = None
    context_tokens_max: int | None = None
    sequences_max: int | None = None
    queue_max: int | None = None
    block_size: int | None = None
    http: str | int | None = None
    host: str | None = None
    port: int | None = None
    http_processes: int | None = None
    gateway: str | None = None
    name: str | tuple[str, ...] | None = None
    api_key: str | tuple[str, ...] | None = None
    drain_s: float | None = None
    stop_s: float | None = None
    log_dir: str | None = None
    log_level: str | None = None
    log_format: str | None = None
    worker: dict[str, Value] = {}
    limits: dict[str, Value] = {}
    cache: dict[str, Value] = {}
    schedule: dict[str, Value] = {}
    journal: dict[str, Value] = {}
    quotas: dict[str, dict[str, Value]] = {}
    tcp: dict[str, Value] = {}
    access: dict[str, dict[str, Setting]] = {}
    kv_events: dict[str, Value] = {}

    def __post_init__(self) -> None:
        """Move options that belong to a section into it. Raises InvalidConfiguration for one given twice."""
        for section, names in IN_SECTIONS.items():
            given = {name: getattr(self, name) for name in names if getattr(self, name) is not None}
            inside: Mapping[str, Value] = getattr(self, section)
            for name in given:
                if name in inside:
                    raise InvalidConfiguration(name, f"is given at the top of the file and in [{section}]; keep one")
                msgspec.structs.force_setattr(self, name, None)
            if given:
                msgspec.structs.force_setattr(self, section, {**inside, **given})


def load_up_file(path: Path | None) -> UpFile:
    """Read the file.

    Raises:
        InvalidConfiguration: Names the file or the key.
    """
    if path is None:
        return UpFile()
    found = convert(_named(read_toml(path)), UpFile)
    for name in OURS:
        if name in found.worker:
            raise InvalidConfiguration(f"worker.{name}", "is set by `kvforge up`")
    return found


def _named(values: dict[str, Any]) -> dict[str, Any]:
    """Return the values with the option names of `UpFile`: kv-bytes and max_model_len are accepted, too."""
    named: dict[str, Any] = {}
    for key, value in values.items():
        name = key.replace("-", "_") if key.replace("-", "_") in UpFile.__struct_fields__ else key
        name = ALIASES.get(key.replace("-", "_"), name)
        if name in named:
            raise InvalidConfiguration(key, f"is given twice, as {name} too")
        named[name] = value
    return named
