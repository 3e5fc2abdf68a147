"""A cluster with workers that draft with each result, whatever their steps take."""

from __future__ import annotations

from .cluster import Cluster

NO_DRAFTS = "[schedule]\ndrafts_max = 0\n"  # of a coordinator


class DraftingCluster(Cluster):
    """A cluster with workers that draft with each result; see `drafting_worker`."""

    worker_module = "tools.cluster.drafting_worker"
