"""Access control: [tcp] sets where a coordinator listens on a network, [access] which peers may connect.

The `ipc://` sockets always exist; `tcp://` sockets exist only if configured, and are always encrypted.
"""

from __future__ import annotations

import os
import pwd
from collections.abc import Callable, Collection
from functools import partial
from pathlib import Path
from typing import Annotated

import msgspec

from kvforge.process.installation import install_command
from kvforge.protocol import keys
from kvforge.protocol.configuration import expand
from kvforge.protocol.errors import InvalidConfiguration, NotAllowed
from kvforge.protocol.network import host_and_port
from kvforge.protocol.token import TOKEN_FILE, same
from kvforge.protocol.transport import client_endpoint, worker_endpoint

from .core.cache.tenants import NAME_LENGTH_MAX
from .core.rights import EVERY_TENANT, RIGHTS, Access
from .transport.listener import Endpoint
from .transport.outbox import PeerIdentity
from .transport.peer_credentials import LocalUsers
from .transport.rate_limit import Rate

RATE_MIN, RATE_MAX = 0.001, 1e9  # a second
NOT_LISTED = "its key is not in [access] any more"
Problem = Callable[[PeerIdentity], str]  # returns why a peer's connection must end, or ""


class TcpSection(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """[tcp]: encrypted network endpoints.

    Attributes:
        listen: `tcp://HOST:PORT` for clients; "" for none.
        listen_workers: `tcp://HOST:PORT` for workers; "" for none.
        key_file: The coordinator's keys, made by `kvforge keys server`.
    """

    listen: str = ""
    listen_workers: str = ""
    key_file: str = ""


class Rights(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """[access.local]: the rights of local clients without an entry. Entries have the same settings.

    Attributes:
        tenant: The tenant that the client acts for; "*" for any tenant that it names.
        rights: `submit`, `read`, `admin` (`core.rights.Access`).
        requests_max: Live requests at once; 0 for no limit of its own.
        tokens_per_s: Rate of tokens sent and generated, beyond which commands are refused; 0 for no limit.
        messages_per_s: Rate of messages, beyond which reading is delayed; 0 for no limit.
    """

    tenant: str = EVERY_TENANT
    rights: tuple[str, ...] = RIGHTS
    requests_max: Annotated[int, msgspec.Meta(ge=0)] = 0
    tokens_per_s: Annotated[float, msgspec.Meta(ge=0)] = 0.0
    messages_per_s: Annotated[float, msgspec.Meta(ge=0)] = 0.0

    def access(self, name: str) -> Access:
        """Return the access in the form that the core uses."""
        return Access(name, self.tenant, self.rights, self.requests_max, self.tokens_per_s, self.messages_per_s)

    def check(self, field: str) -> None:
        """Validate the table `field` of the file.

        Raises:
            InvalidConfiguration: A value is invalid.
        """
        for right in self.rights:
            if right not in RIGHTS:
                raise InvalidConfiguration(f"{field}.rights", f"must be one of {', '.join(RIGHTS)}, not {right!r}")
        for name in ("tokens_per_s", "messages_per_s"):
            value = getattr(self, name)
            if value and not RATE_MIN <= value <= RATE_MAX:
                raise InvalidConfiguration(f"{field}.{name}", f"must be 0 or {RATE_MIN} to {RATE_MAX:g}, not {value}")
        if not 0 < len(self.tenant) <= NAME_LENGTH_MAX or not self.tenant.isprintable():
            raise InvalidConfiguration(
                f"{field}.tenant", f"must be 1 to {NAME_LENGTH_MAX} printable characters; * for all tenants"
            )


class ClientEntry(Rights, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """[access.clients.NAME]: a client that may connect. `tenant` and `rights` are required.

    Attributes:
        key: Its public key for network connections, made by `kvforge keys client`.
        user: Its user on this machine, by name or number; key, user, or both are required.
    """

    tenant: str = ""
    rights: tuple[str, ...] = ()
    key: str = ""
    user: str = ""

    def user_number(self, name: str) -> int:
        """Return the uid of `user` in the entry `name`.

        Raises:
            InvalidConfiguration: There is no such user.
        """
        try:
            return int(self.user) if self.user.isdecimal() else pwd.getpwnam(self.user).pw_uid
        except KeyError:
            problem = f"there is no user {self.user!r} on this machine"
            raise InvalidConfiguration(f"access.clients.{name}.user", problem) from None


class WorkerEntry(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """[access.workers.NAME]: a worker that may connect over a network.

    Attributes:
        key: Its public key, made by `kvforge keys worker`.
    """

    key: str


class AccessSection(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """[access]: the peers that may connect, by name, and the rights of local clients without an entry (`local`)."""

    local: Rights = Rights()
    clients: dict[str, ClientEntry] = {}
    workers: dict[str, WorkerEntry] = {}


class Gate:
    """Access decisions, by the most recently loaded [access].

    Attributes:
        token: The token that workers of this boot must present; "" for none.
        client_keys: Public keys of clients that may connect over a network; shared with the listeners, updated in
            place.
        worker_keys: The same for workers.
    """

    def __init__(self, token: str = "", access: AccessSection | None = None, own_user: int | None = None) -> None:
        self.token = token
        self._own_user = os.geteuid() if own_user is None else own_user
        self.client_keys: set[bytes] = set()
        self.worker_keys: set[bytes] = set()
        self._rates: dict[str, Rate] = {}
        self._read(access or AccessSection())

    def _read(self, access: AccessSection) -> None:
        by_key = {keys.bytes_of(e.key, name): e.access(name) for name, e in access.clients.items() if e.key}
        by_user = {e.user_number(name): e.access(name) for name, e in access.clients.items() if e.user}
        worker_keys = {keys.bytes_of(entry.key, name) for name, entry in access.workers.items()}
        self._local, self._by_key, self._by_user = access.local.access(""), by_key, by_user
        for known, listed in ((self.client_keys, set(by_key)), (self.worker_keys, worker_keys)):
            known &= listed
            known |= listed

    def reread(self, access: AccessSection) -> tuple[Problem, Problem]:
        """Apply another [access].

        Connections with changed rights must end too: the client reconnects by itself, with its new rights.

        Returns:
            Functions that return why the connection of a client, and of a worker, must end; "" if it need not.

        Raises:
            InvalidConfiguration: A key or a user is invalid; nothing has changed.
        """
        by_key, by_user, local = self._by_key, self._by_user, self._local
        self._read(access)

        def of_client(peer: PeerIdentity) -> str:
            before = by_key.get(peer.key) if peer.key else by_user.get(peer.user, local)
            now = self._by_key.get(peer.key) if peer.key else self._by_user.get(peer.user, self._local)
            if now is None:
                return NOT_LISTED
            return "" if now == before else "its entry in [access] has changed"

        def of_worker(peer: PeerIdentity) -> str:
            return NOT_LISTED if peer.key and peer.key not in self.worker_keys else ""

        return of_client, of_worker

    def client(self, peer: PeerIdentity) -> Access:
        """Return a client's access.

        Raises:
            NotAllowed: Its key was removed from the list after it connected.
        """
        if not peer.key:
            return self._by_user.get(peer.user, self._local)
        if peer.key not in self._by_key:
            raise NotAllowed("connect", NOT_LISTED)
        return self._by_key[peer.key]

    def rate(self, peer: PeerIdentity) -> Rate | None:
        """Return the message rate limiter that all connections of a client's entry share; None for no limit."""
        access = self.client(peer)
        if not access.messages_per_s:
            return None
        rate = self._rates.get(access.name)
        if rate is None or rate.per_s != access.messages_per_s:
            rate = self._rates[access.name] = Rate(access.messages_per_s)
        return rate

    def check_worker(self, peer: PeerIdentity, token: str) -> None:
        """Check that a worker belongs to this coordinator.

        A worker without a token may predate tokens; it must then run as the coordinator's own user, which the kernel
        verifies and which may read the token anyway. A wrong token belongs to another coordinator, or to an earlier
        boot.

        Raises:
            NotAllowed: The worker's key or token is not valid.
        """
        if not token and not peer.key and peer.user == self._own_user:
            return
        if peer.key and peer.key not in self.worker_keys:
            raise NotAllowed("connect", NOT_LISTED)
        if self.token and not peer.key and not same(token, self.token):
            what = "another token" if token else "no token"
            where = f"the right one is in {TOKEN_FILE} of this coordinator's runtime folder"
            raise NotAllowed("worker", f"it brings {what}; {where}")


def check(tcp: TcpSection, access: AccessSection) -> None:
    """Validate [tcp] and [access].

    Raises:
        InvalidConfiguration: A field, which the error names, is invalid.
    """
    access.local.check("access.local")
    for name, entry in access.clients.items():
        if not name.isprintable():
            raise InvalidConfiguration("access.clients", f"invalid name: {name!r} (expected printable characters)")
        for field, value in (("tenant", entry.tenant), ("rights", entry.rights)):
            if not value:
                raise InvalidConfiguration(f"access.clients.{name}.{field}", "is required")
        entry.check(f"access.clients.{name}")
        if not entry.key and not entry.user:
            raise InvalidConfiguration(f"access.clients.{name}", "has neither a key nor a user")
    users = {name: entry.user_number(name) for name, entry in access.clients.items() if entry.user}
    _check_apart({f"access.clients.{name}.user": str(number) for name, number in users.items()})
    client_keys = {f"access.clients.{name}.key": entry.key for name, entry in access.clients.items() if entry.key}
    worker_keys = {f"access.workers.{name}.key": entry.key for name, entry in access.workers.items()}
    for field, key in (client_keys | worker_keys).items():
        keys.bytes_of(key, field)
    _check_apart(client_keys | worker_keys)
    for setting, endpoint, allowed in (
        ("tcp.listen", tcp.listen, client_keys),
        ("tcp.listen_workers", tcp.listen_workers, worker_keys),
    ):
        if not endpoint:
            continue
        host_and_port(endpoint, setting)
        if not tcp.key_file:
            raise InvalidConfiguration("tcp.key_file", f"is required by {setting}: `kvforge keys server` makes one")
        if not allowed:
            side = "workers" if setting.endswith("workers") else "clients"
            raise InvalidConfiguration(f"access.{side}", f"names no key, so no peer could connect to {setting}")


def _check_apart(values: dict[str, str]) -> None:
    seen: dict[str, str] = {}
    for field, value in values.items():
        if value in seen:
            raise InvalidConfiguration(field, f"must be unique, but equals {seen[value]}")
        seen[value] = field


def client_endpoints(runtime: Path, tcp: TcpSection, gate: Gate) -> list[Endpoint]:
    """Return the endpoints for clients.

    Raises:
        InvalidConfiguration: A key file or an address is invalid.
    """
    network = _network_endpoint("tcp.listen", tcp.listen, tcp, gate.client_keys) if tcp.listen else []
    return [Endpoint(client_endpoint(runtime), users=LocalUsers(runtime, with_group=True)), *network]


def worker_endpoints(runtime: Path, tcp: TcpSection, gate: Gate) -> list[Endpoint]:
    """Return the endpoints for workers.

    Raises:
        InvalidConfiguration: A key file or an address is invalid.
    """
    listen = tcp.listen_workers
    network = _network_endpoint("tcp.listen_workers", listen, tcp, gate.worker_keys) if listen else []
    return [Endpoint(worker_endpoint(runtime), users=LocalUsers(runtime, with_group=False)), *network]


def _network_endpoint(setting: str, endpoint: str, tcp: TcpSection, allowed: Collection[bytes]) -> list[Endpoint]:
    try:
        from .transport.curve import SealedReader, ServerKeys  # PyNaCl is optional
    except ImportError as error:
        raise InvalidConfiguration(setting, f"needs PyNaCl ({error}): {install_command('tcp')}") from None
    own = keys.read(expand(tcp.key_file), "tcp.key_file")
    server_keys = ServerKeys(keys.bytes_of(own.public, setting), keys.bytes_of(own.secret, setting), allowed)
    return [Endpoint(endpoint, partial(SealedReader, keys=server_keys), setting)]
