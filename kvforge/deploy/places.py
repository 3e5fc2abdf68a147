"""Paths of the service. A test checks that units and configuration use the same ones."""

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
    """The files of the service below `root`, which is / or the folder of a system image."""

    root: Path = Path("/")

    def of(self, path: Path | str) -> Path:
        """Return the place of an absolute path of the service, below `root`."""
        return self.root / Path(path).relative_to("/")

    @property
    def here(self) -> bool:
        """Return whether this is the running system."""
        return self.root == Path("/")

    @property
    def venv(self) -> Path:
        """Return the link to the current one of `environments`."""
        return self.of(PYTHON.parents[1])

    @property
    def environments(self) -> Path:
        """Return the folder of the environments."""
        return self.of(PYTHON.parents[2] / "environments")

    @property
    def configuration(self) -> Path:
        """Return the folder of the configuration files."""
        return self.of("/etc/kvforge")

    @property
    def units(self) -> Path:
        """Return the folder of the units."""
        return self.of("/etc/systemd/system")

    @property
    def sysusers(self) -> Path:
        """Return the file that declares the user."""
        return self.of("/etc/sysusers.d/kvforge.conf")

    @property
    def tmpfiles(self) -> Path:
        """Return the file that declares the folders."""
        return self.of("/etc/tmpfiles.d/kvforge.conf")

    @property
    def record(self) -> Path:
        """Return the record of the installation."""
        return self.of("/opt/kvforge/installed.json")

    def workers(self) -> list[tuple[str, Path]]:
        """Return the configured instances, each with its file."""
        found = sorted(self.configuration.glob(WORKER_PATTERN))
        return [(path.stem.removeprefix("worker-"), path) for path in found]
