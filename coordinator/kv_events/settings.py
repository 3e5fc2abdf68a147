"""[kv_events]: where changes of the prefix cache are published."""

from __future__ import annotations

from typing import Annotated

from kvforge.protocol.errors import InvalidConfiguration
from kvforge.protocol.network import host_and_port, is_network

from ..core.cache.tenants import NAME_LENGTH_MAX
from ..core.limits import Count, Range, Section

ENCODINGS = ("array", "map")
IPC, IPC_PATH_BYTES_MAX = "ipc://", 107
TOPIC_LENGTH_MAX = 256
REPLAY_BYTES_MIN = 1 << 16


class KvEventsSection(Section, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """[kv_events]: blocks stored, removed and cleared, in vLLM's format (docs/kv-events.md).

    Attributes:
        publish: Endpoint for subscribers, `ipc://PATH` or `tcp://HOST:PORT`; "" disables the stream.
        replay: Endpoint at which subscribers request missed batches; "" for none.
        topic: Topic of every message.
        encoding: Encoding of events: "array" is that of vLLM up to 0.23, which all routers read, "map" that of later
            versions.
        tenant: The tenant with blocks that routers find by their tokens alone; blocks of other tenants, and of prompts
            with a `cache_salt`, carry a distinguishing name.
        unencrypted_tcp: Allow `tcp://`; any process that can connect there can read the tokens of all prompts.
        replay_batches_max: Batches kept for replay.
        replay_bytes_max: Bytes of batches kept for replay.
        subscriber_batches_max: Batches queued for one subscriber; a slow consumer misses the next ones.
    """

    publish: str = ""
    replay: str = ""
    topic: str = ""
    encoding: str = "array"
    tenant: str = "default"
    unencrypted_tcp: bool = False
    replay_batches_max: Count = 10_000
    replay_bytes_max: Annotated[int, Range(REPLAY_BYTES_MIN)] = 64 << 20
    subscriber_batches_max: Count = 10_000

    def check(self, section: str) -> None:
        """Validate the section.

        Raises:
            InvalidConfiguration: A value is invalid.
        """
        super().check(section)
        if self.encoding not in ENCODINGS:
            problem = f"must be one of {', '.join(ENCODINGS)}, not {self.encoding!r}"
            raise InvalidConfiguration(f"{section}.encoding", problem)
        if not 0 < len(self.tenant) <= NAME_LENGTH_MAX or not self.tenant.isprintable():
            raise InvalidConfiguration(f"{section}.tenant", f"must be 1 to {NAME_LENGTH_MAX} printable characters")
        if len(self.topic) > TOPIC_LENGTH_MAX:
            raise InvalidConfiguration(f"{section}.topic", f"must be at most {TOPIC_LENGTH_MAX} characters")
        for name in ("publish", "replay"):
            if getattr(self, name):
                self._check_endpoint(f"{section}.{name}", getattr(self, name))
        if self.replay and not self.publish:
            raise InvalidConfiguration(f"{section}.replay", f"needs {section}.publish, which is not set")
        if self.replay and self.replay == self.publish:
            raise InvalidConfiguration(f"{section}.replay", f"must differ from {section}.publish")

    def _check_endpoint(self, field: str, endpoint: str) -> None:
        if is_network(endpoint):
            host_and_port(endpoint, field)
            if not self.unencrypted_tcp:
                problem = (
                    f"{endpoint} is not encrypted: any process that can connect, on this machine too, can read the "
                    "tokens of all prompts: use ipc://, or set kv_events.unencrypted_tcp = true to allow it"
                )
                raise InvalidConfiguration(field, problem)
            return
        path = endpoint.removeprefix(IPC)
        if not endpoint.startswith(IPC) or not path.startswith("/"):
            raise InvalidConfiguration(field, f"{endpoint!r} is neither ipc:///PATH nor tcp://HOST:PORT")
        if len(path.encode()) > IPC_PATH_BYTES_MAX:
            raise InvalidConfiguration(field, f"the path of a socket has at most {IPC_PATH_BYTES_MAX} bytes")
