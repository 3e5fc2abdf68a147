"""What is to be done with a fleet: from what it is and what is wanted to actions.

Its law: the same input gives the same output. It imports no clock, no randomness, no Ray and no operating system; times
and names come in. It remembers nothing but since when the queue is long or short: a controller that starts anew decides
as the one before it would, and is at most slower to grow or shrink.

From outside: `decide`, with `View`, `Wanted`, `Memory`; `carried`, `words` of an action, and `reason_for_no_room`.
"""

from .decide import decide
from .room import reason_for_no_room
from .scaling import Memory, carried
from .views import Action, Create, Decision, Drain, Gateway, Remove, Replica, Stop, View, Wanted, words

__all__ = [
    "Action",
    "Create",
    "Decision",
    "Drain",
    "Gateway",
    "Memory",
    "Remove",
    "Replica",
    "Stop",
    "View",
    "Wanted",
    "carried",
    "decide",
    "reason_for_no_room",
    "words",
]
