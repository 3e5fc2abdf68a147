"""A cluster with workers that draft with each result, whatever their steps take."""

from __future__ import annotations

import os
from pathlib import Path

from tools.cluster.cluster import Cluster
from tools.cluster.fork_server import WORKER, fork_server


class DraftingCluster(Cluster):
    """A cluster with workers that draft with each result; see `drafting_worker`."""

    def _start(self, name: str, module: str, config: Path) -> None:
        if module != "worker":
            super()._start(name, module, config)
            return
        environment = {**os.environ, "OMP_NUM_THREADS": "1"}
        arguments, log = ["--config", str(config)], self.folder / f"{name}.log"
        whole = "tests.integration.drafting_worker"
        self._processes[name] = fork_server(WORKER).start(arguments, log, environment, whole)
