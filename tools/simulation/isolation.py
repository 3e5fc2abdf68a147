"""Checks that a client of one tenant neither learns of nor changes another tenant's resources."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from kvforge.coordinator.core.cache.groups import Group
from kvforge.coordinator.core.events import ClientCame, FromClient
from kvforge.coordinator.core.machine import Machine
from kvforge.coordinator.core.reporting.explain import Explainer
from kvforge.coordinator.core.requests.request import Request
from kvforge.coordinator.core.rights import READ, SUBMIT, Access
from kvforge.coordinator.transport.outbox import PeerIdentity
from kvforge.protocol.errors import KvforgeError
from kvforge.protocol.messages import (
    Accepted,
    Attached,
    BlockInfo,
    Done,
    Drain,
    Ended,
    Explain,
    Explanation,
    Message,
    PurgeFinished,
    Refused,
    RequestInfo,
    RequestList,
    SequenceInfo,
    Stats,
    Step,
    Stream,
    TenantWiped,
    UnrefBlock,
)
from tools.simulation.settings import Settings, tenant_of
from tools.simulation.workers import Violation

if TYPE_CHECKING:
    from tools.simulation.ledger import BookedSequence

REQUESTS_MAX = 5
CLEAN, UNSEEN = 0, -1
NAMED = re.compile(r"(?<!has )\b(request|sequence) (\d+)")
BY_NAME = re.compile(r"'([^']+)' holds")


class Isolation:
    """The coordinator's access gate, and the checks of its rules; `known` returns the core's request of an id."""

    def __init__(
        self, settings: Settings, known: Callable[[int], Request | None], sequences: Mapping[int, BookedSequence]
    ) -> None:
        self._tenants, self._known, self._sequences = settings.bound, known, sequences
        self._of: dict[int, str] = {}  # the tenant of each restricted connection
        self._others: list[int] = []

    # --------------------------------------------------------------------------------------------- the access gate

    def client(self, who: PeerIdentity) -> Access:
        """Return the rights of a client, identified by its user number."""
        name = f"c{who.user}"
        tenant = self._tenants.get(name)
        return Access(name) if tenant is None else Access(name, tenant, (SUBMIT, READ), REQUESTS_MAX)

    def check_worker(self, who: PeerIdentity, token: str) -> None:
        """Accept every worker."""

    # ---------------------------------------------------------------------------------------------------------- checks

    def came(self, event: ClientCame) -> None:
        """Record a client's handshake."""
        if not event.access.unlimited:
            self._of[event.client] = event.access.tenant

    def restricts(self, client: int) -> bool:
        """Return whether the client acts for one tenant."""
        return client in self._of

    def hides(self, client: int, tenant: str) -> bool:
        """Return whether this tenant's resources must look nonexistent to the client."""
        return self._of.get(client, tenant) != tenant

    def before(self, event: Any, finished: Mapping[int, Request]) -> None:
        """Record what an event must not change."""
        self._others = []
        if type(event) is FromClient and type(event.message) is PurgeFinished:
            self._others = [i for i, request in finished.items() if self.hides(event.client, request.tenant_name)]

    def replied(self, event: FromClient, reply: Message) -> None:
        """Check the reply to a command."""
        tenant = self._of.get(event.client)
        if tenant is None:
            return
        gone = [request_id for request_id in self._others if self._known(request_id) is None]
        if gone:
            raise Violation(f"a client of {tenant} purged requests {gone} of others")
        if isinstance(event.message, Drain) and isinstance(reply, Done):
            raise Violation(f"a client of {tenant} drained the coordinator without the right")
        if isinstance(reply, TenantWiped):
            raise Violation(f"a client of {tenant} wiped {event.message!r} without the right")
        if isinstance(reply, Refused):
            return
        for request_id in _ids(event.message, "request_id"):
            self._own_request(tenant, request_id, event.message)
        for sequence_id in _ids(event.message, "sequence_id") + _ids(event.message, "sequence_ids"):
            self._own_sequence(tenant, sequence_id, event.message)
        if isinstance(event.message, UnrefBlock) and tenant_of(event.message.holder) != tenant:
            raise Violation(f"a client of {tenant} removed another tenant's holder: {event.message!r}")

    def explained(self, explainer: Explainer, live: Mapping[int, Request]) -> None:
        """Check that the explanation of a tenant's waiting request names only this tenant's resources."""
        for request in live.values():
            if request.tenant_name in self._tenants.values():
                reply = explainer.explain(request.tenant_name, Explain(rid=0, request_id=request.id))
                assert isinstance(reply, Explanation)
                self._own_words(request.tenant_name, reply.sentences, reply)

    def failed(self, request: Request, error: KvforgeError) -> None:
        """Check that the error of a failed request, which the core keeps for later queries, names no other tenant."""
        self._own_words(request.tenant_name, [error.message], error)

    def check_message(self, client: int, message: Message) -> None:
        """Check a message for a client."""
        tenant = self._of.get(client)
        if tenant is None:
            return
        if isinstance(message, Stream):
            named = [*message.request_ids.tolist(), *(ended.request_id for ended in message.ended), *message.paused]
        elif isinstance(message, Accepted):
            named = list(range(message.request_id, message.request_id + message.count))
        elif isinstance(message, RequestInfo | Attached):
            named = [message.request_id]
        elif isinstance(message, RequestList):
            named = [row.request_id for row in message.requests]
        else:
            named = []
            self._check_rows(tenant, message)
        for request_id in named:
            self._own_request(tenant, request_id, message)
        self._own_words(tenant, _errors(message), message)

    def _check_rows(self, tenant: str, message: Message) -> None:
        if isinstance(message, SequenceInfo) and message.tenant != tenant:
            raise Violation(f"a client of {tenant} received {message!r}")
        if isinstance(message, Stats) and (message.pools or {row.tenant for row in message.tenants} - {tenant}):
            raise Violation(f"a client of {tenant} received statistics of other tenants: {message!r}")
        if isinstance(message, Explanation):
            self._own_words(tenant, message.sentences, message)
        if isinstance(message, BlockInfo):
            self._own_block(tenant, message)

    def _own_block(self, tenant: str, block: BlockInfo) -> None:
        if not block.holders and block.tenant != tenant:
            raise Violation(f"a client of {tenant} received a block of another tenant: {block!r}")
        for holder in block.holders:
            if holder.kind == "request":
                self._own_request(tenant, holder.id, block)
            elif holder.kind == "sequence":
                self._own_sequence(tenant, holder.id, block)
            elif tenant_of(holder.name) != tenant:
                raise Violation(f"a client of {tenant} received a name of another tenant: {block!r}")

    def _own_words(self, tenant: str, sentences: Iterable[str], message: object) -> None:
        for sentence in sentences:
            for kind, number in NAMED.findall(sentence):
                own = self._own_request if kind == "request" else self._own_sequence
                own(tenant, int(number), message)
            for name in BY_NAME.findall(sentence):
                if tenant_of(name) != tenant:
                    raise Violation(f"a client of {tenant} received a name of another tenant: {sentence}")

    def _own_request(self, tenant: str, request_id: int, message: object) -> None:
        request = self._known(request_id)
        if request is not None and request.tenant_name != tenant:
            raise Violation(f"a client of {tenant} got request {request_id} of {request.tenant_name}: {message!r}")

    def _own_sequence(self, tenant: str, sequence_id: int, message: object) -> None:
        sequence = self._sequences.get(sequence_id)
        if sequence is not None and sequence.tenant != tenant:
            raise Violation(f"a client of {tenant} got sequence {sequence_id} of {sequence.tenant}: {message!r}")


class Writers:
    """Tracks the last tenant that wrote each block, by the planned steps.

    No row may get a block with another tenant's KV. Rows with an explicit salt share their blocks and are left out. For
    a pool that ran steps before it was first seen, blocks become known as rows write them.
    """

    def __init__(self, machine: Machine) -> None:
        self._cache = machine.cache
        self._of: dict[int, npt.NDArray[np.int64]] = {}
        self._numbers: dict[str, int] = {}
        self._salts: dict[str, int] = {}  # default salts

    def planned(self, group: Group, step: Step) -> None:
        """Check a planned step, which will find the current tables."""
        s, pool = self._cache.sequences, group.pool
        writers = self._of.get(group.epoch)
        if writers is None:
            writers = self._of[group.epoch] = np.full(pool.count, UNSEEN if step.step_id == 1 else CLEAN)
        writers[step.zeros - pool.base] = CLEAN
        for slot, end in zip(step.slots.tolist(), (step.starts + step.counts).tolist(), strict=True):
            name = self._cache.tenants.names[int(s.tenant[slot])]
            if name not in self._salts:
                self._salts[name] = self._cache.hasher.salt(f"tenant:{name}")
            if s.salt[slot] != self._salts[name]:
                continue
            tenant = self._numbers.setdefault(name, len(self._numbers) + 1)
            ids = s.blocks_of(slot)[: s.blocks_for(end)] - pool.base
            foreign = ids[(writers[ids] != CLEAN) & (writers[ids] != tenant)]
            if foreign.size:
                raise Violation(
                    f"step {step.step_id}: {name} is given block {foreign[0] + pool.base} with another's KV"
                )
            writers[ids] = tenant


def _errors(message: Message) -> list[str]:
    """Return the error texts of the requests in a message."""
    requests: tuple[RequestInfo | Ended, ...] = (message,) if isinstance(message, RequestInfo) else ()
    if isinstance(message, Stream):
        requests = message.ended
    return [request.error.message for request in requests if request.error is not None]


def _ids(command: Any, field: str) -> list[int]:
    """Return the ids in a field of a command."""
    value = getattr(command, field, 0)
    ids = [value] if isinstance(value, int) else value.tolist()
    return [number for number in ids if number > 0]
