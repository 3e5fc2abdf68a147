"""Which of several coordinators a request goes to: decided from what they said a moment ago.

`router` chooses by what each holds and has before it, without input or output; `asking` puts the question to them;
`seeds` fixes a request's draws before anybody has them. The gateway and the load harness use the same.
"""

from .asking import Chosen, ask_and_choose
from .router import POLICIES, PREFIX, ROUND_ROBIN, Offer, Router
from .seeds import seed_of

__all__ = ["POLICIES", "PREFIX", "ROUND_ROBIN", "Chosen", "Offer", "Router", "ask_and_choose", "seed_of"]
