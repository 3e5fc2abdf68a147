"""All wire messages: frozen structs with stable tags, and defaults for fields added later.

A message is a MessagePack map (its scalar fields and the tag `t`) and one binary frame with its array fields one after
the other. `FRAMES` lists the arrays in that order with their little-endian dtype. Each direction has its own file, and
`shared` holds the common parts; all are imported from here (`from kvforge.protocol.messages import Submit`).

Every command has a `rid` that its sender chooses; the reply has the same `rid`. Times are integers with the unit in the
name. Ids are integers below 2^53 and are never reused, not even after a restart.

To add a message, define it in the file of its direction and add it to the union at the end of that file: the decoder
accepts only the messages of the union. A new field needs a default, so that messages of older senders stay valid. Older
receivers skip unknown fields, except non-empty arrays and fields of SamplingParams. Version 1 is frozen in
`tests/data/protocol_v1/`.
"""

from .client_to_coordinator import *  # noqa: F403
from .coordinator_to_client import *  # noqa: F403
from .coordinator_to_worker import *  # noqa: F403
from .shared import *  # noqa: F403
from .worker_to_coordinator import *  # noqa: F403
