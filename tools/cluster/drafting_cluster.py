"""A cluster with workers that draft with each result, whatever their steps take."""

from __future__ import annotations

from .cluster import Cluster


class DraftingCluster(Cluster):
    """A cluster with workers that draft with each result; see `drafting_worker`."""

    worker_module = "tools.cluster.drafting_worker"
