"""Decides what to do with a fleet, from its present and its wanted state.

The same input gives the same output: the package imports no clock, randomness, Ray or operating system; times and names
are arguments. Its only memory is since when the queue has been long or short. A restarted controller therefore decides
like its predecessor, and is at most slower to scale.

Other code uses `decide`, with `View`, `Wanted`, `Memory`; `carried`, `words` of an action, and `reason_for_no_room`.
"""

from .decide import decide
from .room import reason_for_no_room
from .scaling import Memory, carried
from .views import (
    Action,
    CreateAction,
    Decision,
    DrainAction,
    Gateway,
    RemoveAction,
    Replica,
    StopAction,
    View,
    Wanted,
    words,
)

__all__ = [
    "Action",
    "CreateAction",
    "Decision",
    "DrainAction",
    "Gateway",
    "Memory",
    "RemoveAction",
    "Replica",
    "StopAction",
    "View",
    "Wanted",
    "carried",
    "decide",
    "reason_for_no_room",
    "words",
]
