"""Where the service lives. Units, configuration and this file must say the same: a test compares them."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

FILES = Path(__file__).parent / "files"
UNITS = (
    "kvforge.target",
    "kvforge-coordinator.service",
    "kvforge-worker@.service",
    "kvforge-group@.target",
    "kvforge-drain.service",
    "kvforge-gateway.service",
)
USER = "kvforge"
GPU_GROUPS = ("render", "video")
PYTHON = Path("/opt/kvforge/.venv/bin/python")
CACHE_DIR, STATE_DIR, RUNTIME_DIR = Path("/var/cache/kvforge"), Path("/var/lib/kvforge"), Path("/run/kvforge")
WORKER_PATTERN = "worker-*.toml"


@dataclass(frozen=True)
class Places:
    """The files of the service below `root`, which is / or the folder of a system that is being made."""

    root: Path = Path("/")

    def of(self, path: Path | str) -> Path:
        """Where an absolute path of the service is, seen from here."""
        return self.root / Path(path).relative_to("/")

    @property
    def here(self) -> bool:
        """Whether this is the system that runs."""
        return self.root == Path("/")

    @property
    def venv(self) -> Path:
        """A link to one of `environments`."""
        return self.of(PYTHON.parents[1])

    @property
    def environments(self) -> Path:
        return self.of(PYTHON.parents[2] / "environments")

    @property
    def configuration(self) -> Path:
        return self.of("/etc/kvforge")

    @property
    def units(self) -> Path:
        return self.of("/etc/systemd/system")

    @property
    def sysusers(self) -> Path:
        return self.of("/etc/sysusers.d/kvforge.conf")

    @property
    def tmpfiles(self) -> Path:
        return self.of("/etc/tmpfiles.d/kvforge.conf")

    @property
    def record(self) -> Path:
        return self.of("/opt/kvforge/installed.json")

    def workers(self) -> list[tuple[str, Path]]:
        """The instances that have a configuration, with its file."""
        found = sorted(self.configuration.glob(WORKER_PATTERN))
        return [(path.stem.removeprefix("worker-"), path) for path in found]
