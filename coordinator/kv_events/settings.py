"""[kv_events]: where what the prefix cache holds is told, and to whom it may be."""

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
    """[kv_events]: blocks stored, removed and cleared, as vLLM publishes them (docs/kv-events.md).

    publish: where subscribers connect, `ipc://PATH` or `tcp://HOST:PORT`; "": nothing is told. replay: where they ask
    for batches that they missed, another such address; "": nowhere. topic: of every message.
    encoding: of an event: "array", as vLLM had it up to 0.23 and routers of before and after that read, or "map", as it
    has it since. tenant: whose blocks routers find by their tokens alone; those of others, and of prompts with a
    `cache_salt`, carry a name that sets them apart.
    unencrypted_tcp: `tcp://` is allowed: everybody who can connect there reads the tokens of all prompts.
    replay_batches_max, replay_bytes_max: so much is kept for those who missed it. subscriber_batches_max: wait for one
    subscriber; one that reads more slowly misses the next ones.
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
        """Raises InvalidConfiguration naming what is wrong."""
        super().check(section)
        if self.encoding not in ENCODINGS:
            problem = f"must be one of {', '.join(ENCODINGS)}, not {self.encoding!r}"
            raise InvalidConfiguration(f"{section}.encoding", problem)
        if not 0 < len(self.tenant) <= NAME_LENGTH_MAX or not self.tenant.isprintable():
            raise InvalidConfiguration(f"{section}.tenant", f"1 to {NAME_LENGTH_MAX} printable characters")
        if len(self.topic) > TOPIC_LENGTH_MAX:
            raise InvalidConfiguration(f"{section}.topic", f"at most {TOPIC_LENGTH_MAX} characters")
        for name in ("publish", "replay"):
            if getattr(self, name):
                self._check_endpoint(f"{section}.{name}", getattr(self, name))
        if self.replay and not self.publish:
            raise InvalidConfiguration(f"{section}.replay", f"{section}.publish is not set: nothing is told")
        if self.replay and self.replay == self.publish:
            raise InvalidConfiguration(f"{section}.replay", f"is {section}.publish: it needs an address of its own")

    def _check_endpoint(self, field: str, endpoint: str) -> None:
        if is_network(endpoint):
            host_and_port(endpoint, field)
            if not self.unencrypted_tcp:
                problem = (
                    f"{endpoint} is not encrypted, and everybody who can connect there, on this machine too, reads the "
                    "tokens of all prompts: use ipc://, or set kv_events.unencrypted_tcp = true where that is meant"
                )
                raise InvalidConfiguration(field, problem)
            return
        path = endpoint.removeprefix(IPC)
        if not endpoint.startswith(IPC) or not path.startswith("/"):
            raise InvalidConfiguration(field, f"{endpoint!r} is neither ipc:///PATH nor tcp://HOST:PORT")
        if len(path.encode()) > IPC_PATH_BYTES_MAX:
            raise InvalidConfiguration(field, f"the path of a socket has at most {IPC_PATH_BYTES_MAX} bytes")
