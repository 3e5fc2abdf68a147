"""Routing of requests to one of several coordinators, based on their answers of a moment ago.

`router` chooses by each replica's cache and load, without input or output. `asking` queries the replicas. `seeds` fixes
a request's draws before it is placed. The gateway and the load harness use all three.
"""

from .replica_query import Chosen, choose_replica
from .router import POLICIES, PREFIX, ROUND_ROBIN, Offer, Router
from .seeds import seed_of

__all__ = ["POLICIES", "PREFIX", "ROUND_ROBIN", "Chosen", "Offer", "Router", "choose_replica", "seed_of"]
