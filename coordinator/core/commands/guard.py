"""Authorisation: the commands of restricted clients are checked here first.

Objects of other tenants are answered as if they did not exist. The same holds for a block that the tenant neither pays
for nor holds. Both are refused here with the same text and before any other check, so that the order of checks reveals
nothing. A missing right is reported before any object is looked up.
"""

from __future__ import annotations

from typing import Any

import msgspec

from kvforge.protocol.errors import BlockNotFound, NotAllowed, NotFound, QueueFull
from kvforge.protocol.messages import (
    Accepted,
    Append,
    Attach,
    Cancel,
    CreateSequence,
    Drain,
    Explain,
    FindPrefix,
    FinishAt,
    Fork,
    GetBlock,
    GetRequest,
    GetSequence,
    GetStats,
    GetTokens,
    KeepSequence,
    ListRequests,
    Message,
    PurgeFinished,
    RefBlock,
    RemoveSequences,
    Rewind,
    Submit,
    UnrefBlock,
    WipeTenant,
)

from ..requests.table import RequestTable
from ..rights import ADMIN, EVERY_TENANT, READ, SUBMIT, Access
from ..scheduling.admission import Admission
from .blocks import BlockCommands
from .sequences import SequenceCommands
from .spending import Spending, is_costly
from .validate import tenant_salt

# Commands that are not listed here need no right.
RIGHT_FOR: dict[type[Message], str] = {
    Submit: SUBMIT,
    FindPrefix: SUBMIT,
    Cancel: SUBMIT,
    FinishAt: SUBMIT,
    PurgeFinished: SUBMIT,
    CreateSequence: SUBMIT,
    Append: SUBMIT,
    Fork: SUBMIT,
    Rewind: SUBMIT,
    KeepSequence: SUBMIT,
    RemoveSequences: SUBMIT,
    RefBlock: SUBMIT,
    UnrefBlock: SUBMIT,
    Attach: READ,
    GetRequest: READ,
    ListRequests: READ,
    GetStats: READ,
    GetSequence: READ,
    GetTokens: READ,
    GetBlock: READ,
    Explain: READ,
    Drain: ADMIN,
    WipeTenant: ADMIN,
}
UNNAMED = "default"  # the tenant in a message that names none


class Guard:
    """Checks commands of restricted clients."""

    def __init__(
        self,
        requests: RequestTable,
        admission: Admission,
        sequences: SequenceCommands,
        blocks: BlockCommands,
        spending: Spending,
    ) -> None:
        self._requests, self._admission, self._sequences, self._blocks = requests, admission, sequences, blocks
        self._spending = spending
        self._alive: dict[str, set[int]] = {}  # requests by access entry, pruned when one is accepted

    def check(self, access: Access, message: Any) -> Any:
        """Check a command and return it as it may be carried out.

        Raises:
            NotAllowed: The client lacks a right, or may not act for the tenant.
            NotFound: The command names an object of another tenant.
            QueueFull: The access entry has too many live requests.
            RateExceeded: The access entry has used up its tokens.
        """
        right = RIGHT_FOR.get(type(message))
        if right is not None and right not in access.rights and ADMIN not in access.rights:
            raise NotAllowed(right, f"{type(message).__name__} asks for it")
        if isinstance(message, Submit | FindPrefix | CreateSequence | RefBlock):
            message = self._for_its_tenant(access, message)
        if access.sees:
            self._check_named(access.sees, message)
            if isinstance(message, Submit | FindPrefix | CreateSequence) and message.salt:
                # Otherwise, a client could guess a salt and learn from a hit that another tenant had the same text.
                message = msgspec.structs.replace(message, salt=tenant_salt(access.sees, message.salt))
        if is_costly(message) and (access.requests_max or access.tokens_per_s):
            self._check_limits(access, message)
        return message

    def done(self, access: Access, message: Any, reply: Message) -> None:
        """Account a command that was carried out to its access entry."""
        if access.tokens_per_s and is_costly(message):
            self._spending.done(access, message, reply)
        if access.requests_max and isinstance(reply, Accepted):
            made = range(reply.request_id, reply.request_id + reply.count)
            self._alive[access.name] = (self._alive.get(access.name, set()) & self._requests.live.keys()).union(made)

    def _for_its_tenant(self, access: Access, message: Any) -> Any:
        if access.tenant == EVERY_TENANT or message.tenant == access.tenant:
            return message
        if message.tenant == UNNAMED:
            return msgspec.structs.replace(message, tenant=access.tenant)
        if access.sees:
            raise NotAllowed(ADMIN, f"{access.owner} acts for tenant {access.tenant!r}, not for {message.tenant!r}")
        return message

    def _check_limits(self, access: Access, message: Any) -> None:
        if isinstance(message, Submit):
            if self._requests.keys.find(message.tenant, message) is not None:
                return  # a repeated command creates no requests
            if access.requests_max:
                self._check_room(access, message)
        if access.tokens_per_s:
            self._spending.check(access)

    def _check_room(self, access: Access, message: Submit) -> None:
        alive = len(self._alive.get(access.name, set()) & self._requests.live.keys())
        if alive + message.count > access.requests_max:
            raise QueueFull(access.requests_max, self._admission.waiting.retry_after_ms(), access.owner)

    # --------------------------------------------------------------------------------------------------- named objects

    def _check_named(self, tenant: str, message: Any) -> None:
        """Raise NotFound if the command names an object of another tenant."""
        if isinstance(message, Attach | Cancel | FinishAt | GetRequest):
            self._check_request(tenant, message.request_id)
        elif isinstance(message, GetSequence | GetTokens | Fork | Rewind | KeepSequence):
            self._sequences.find(message.sequence_id, tenant)
        elif isinstance(message, Append | RemoveSequences):
            self._sequences.check_all(message.sequence_ids, tenant)
        elif isinstance(message, GetBlock | RefBlock | UnrefBlock):
            self._check_block(tenant, message.block_id)
        elif isinstance(message, Submit) and message.sequence_id:
            self._sequences.find(message.sequence_id, tenant)
        elif isinstance(message, Explain):
            self._check_subject(tenant, message)

    def _check_subject(self, tenant: str, message: Explain) -> None:
        if message.request_id >= 0:
            self._check_request(tenant, message.request_id)
        if message.sequence_id >= 0:
            self._sequences.find(message.sequence_id, tenant)
        if message.block_id >= 0:
            self._check_block(tenant, message.block_id)
        if message.tenant not in ("", tenant):
            raise NotFound(f"there is no tenant {message.tenant!r}", tenant=message.tenant)

    def _check_request(self, tenant: str, request_id: int) -> None:
        request = self._requests.known(request_id)
        if request is None or request.tenant_name != tenant:
            raise self._requests.not_found(request_id)

    def _check_block(self, tenant: str, block: int) -> None:
        if not self._blocks.concerns(block, tenant):
            raise BlockNotFound(block)
