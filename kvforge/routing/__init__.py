"""Which of several coordinators a request goes to: decided from what they said a moment ago, without input or output.

`router` chooses by what each holds and has before it, `seeds` fixes a request's draws before anybody has them. The
gateway and the load harness use the same.
"""

from .router import POLICIES, PREFIX, ROUND_ROBIN, Offer, Router
from .seeds import seed_of

__all__ = ["POLICIES", "PREFIX", "ROUND_ROBIN", "Offer", "Router", "seed_of"]
