"""The cluster of `tools.cluster.drafting_cluster`, for the tests of this folder."""

from tools.cluster.drafting_cluster import NO_DRAFTS, DraftingCluster

__all__ = ["NO_DRAFTS", "DraftingCluster"]
