"""The settings of a simulated fleet: a coordinator with room for all workers, and the workers."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from kvforge.launch.settings import WORKERS_MAX, Settings, Value, toml
from kvforge.protocol.errors import InvalidRequest

from .step_times import load

BLOCK_SIZE = 16
CONTEXT_TOKENS = 8192
ROWS_MAX, STEP_TOKENS_MAX = 256, 8192
SECTIONS = ("limits", "cache", "schedule", "quotas")
Sections = Mapping[str, Mapping[str, Any]]


@dataclass(frozen=True)
class FleetSettings(Settings):
    """Settings of a fleet with workers that need a name, a folder and a table only."""

    def worker_file(self, index: int) -> str:
        """Return the configuration of worker `index` as TOML (`worker.Config`)."""
        top: dict[str, Value] = {"name": f"worker-{index}", "runtime_dir": str(self.runtime_dir.absolute())}
        return toml({**top, "log_level": self.log_level, "log_format": self.log_format, **self.worker}, {})


def settings(
    table: str,
    runtime: Path,
    *,
    workers: int = 1,
    blocks: int = 0,
    time_scale: float = 1.0,
    kinds: bool = False,
    coordinator: Sections | None = None,
    log_level: str = "info",
) -> FleetSettings:
    """Return the settings of a coordinator and its workers.

    Defaults: steps of up to 256 rows and 8,192 tokens, sequences of up to 8,192 tokens, and twice as many sequences as
    rows.

    Args:
        table: A name or a file, as for `step_times.load`.
        runtime: The runtime directory.
        workers: The number of workers.
        blocks: KV blocks of each worker; 0 for as many as the table's memory holds.
        time_scale: The factor of the step times.
        kinds: Workers compute prompts and generated tokens differently.
        coordinator: SECTIONS of coordinator.toml (quotas by tenant), which override the defaults.
        log_level: The log level of all processes.

    Raises:
        InvalidRequest: Names the option.
    """
    if not 1 <= workers <= WORKERS_MAX:
        raise InvalidRequest("--workers", f"is {workers}; it must be 1 to {WORKERS_MAX}")
    if blocks < 0:
        raise InvalidRequest("--blocks", f"is {blocks}; it must be 1 or more, or 0 for as many as the memory holds")
    if not 0 <= time_scale < float("inf"):
        raise InvalidRequest("--time-scale", f"is {time_scale:g}; it must be 0 or more")
    times, chosen = load(table), coordinator or {}
    if unknown := [name for name in chosen if name not in SECTIONS]:
        raise InvalidRequest("--config", f"unknown section {unknown[0]!r} (expected {', '.join(SECTIONS)})")
    schedule = {"step_rows_max": ROWS_MAX, "step_tokens_max": STEP_TOKENS_MAX, **chosen.get("schedule", {})}
    cache = {"block_size": BLOCK_SIZE, **chosen.get("cache", {})}
    each = blocks or times.blocks(int(cache["block_size"]))
    running = 2 * workers * int(schedule["step_rows_max"])
    limits: dict[str, Value] = {
        "sequences_max": running,
        "blocks_max": workers * each,
        "blocks_per_sequence_max": min(CONTEXT_TOKENS // int(cache["block_size"]), each),
        "queue_max": max(1024, 4 * running),
        **chosen.get("limits", {}),
    }
    return FleetSettings(
        model=Path(table),
        runtime_dir=runtime,
        workers=workers,
        worker_module="kvforge.loadtest.fleet.worker",
        worker={"table": _table(table), "blocks": each, "time_scale": float(time_scale), "kinds": kinds},
        limits=limits,
        cache=cache,
        schedule=schedule,
        quotas=chosen.get("quotas", {}),
        log_level=log_level,
        drain_s=0.0,
    )


def _table(name: str) -> str:
    """Return the table such that a worker in any directory finds it."""
    path = Path(name)
    return str(path.absolute()) if path.suffix or path.exists() else name
