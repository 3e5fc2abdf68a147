"""The cluster of `tools.cluster.drafting_cluster`, for the tests of this folder."""

from tools.cluster.drafting_cluster import DraftingCluster

__all__ = ["DraftingCluster"]
