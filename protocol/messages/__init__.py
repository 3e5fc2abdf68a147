"""Every wire message: one frozen struct each, a stable tag, and defaults for fields that came later.

A message is a MessagePack map (its scalar fields and the tag `t`) and one binary frame with its array fields one after
the other. `FRAMES` lists them in that order with their little-endian dtype. There is a file for each direction, and one
for what several share; all are imported from here (`from kvforge.protocol.messages import Submit`).

Every command carries `rid`, chosen by its sender; the reply to it carries the same `rid`. Times are integers with the
unit in the name. Ids are integers below 2^53 and are never reused, not by a later boot either.

A new message goes into the file of its direction, and into the union at that file's end: the decoder at the other end
takes nothing else. A new field has a default, so that who does not send it is understood; who does not know it skips
it, if it is no array that is not empty and not in Sampling. Version 1 is frozen in `tests/data/protocol_v1/`.
"""

from .client_to_coordinator import *  # noqa: F403
from .coordinator_to_client import *  # noqa: F403
from .coordinator_to_worker import *  # noqa: F403
from .shared import *  # noqa: F403
from .worker_to_coordinator import *  # noqa: F403
