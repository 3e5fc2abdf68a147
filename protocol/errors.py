"""The error tree. Every error has a stable wire code; a peer that receives it raises the same class.

KvforgeError
 ├─ ProtocolError             protocol_error         the bytes are not an accepted message
 │   └─ VersionMismatch       version_mismatch       the two sides share no protocol version
 ├─ InvalidConfiguration      invalid_configuration  a setting is wrong; names the field
 ├─ InvalidRequest            invalid_request        an argument is wrong; names the field
 │   └─ MessageRefused        message_refused        coordinators died while handling it; carries deaths
 ├─ NotAllowed                not_allowed            the caller lacks a right; carries right
 ├─ NotFound                  not_found
 │   ├─ SequenceNotFound      sequence_not_found     carries sequence_id
 │   ├─ BlockNotFound         block_not_found        carries block_id
 │   ├─ RequestNotFound       request_not_found      carries request_id
 │   └─ ModelNotFound         model_not_found        carries model
 ├─ Conflict                  conflict               the object exists but its state forbids the command
 │   ├─ InvalidTransition     invalid_transition     carries request_id, state, event
 │   ├─ AlreadyFinished       already_finished       carries request_id, state
 │   ├─ SequenceBusy          sequence_busy          a request is running on the sequence
 │   ├─ KeyReused             key_reused             this idempotency key named another command; carries key
 │   ├─ AlreadyHolder         already_holder         this holder already holds the block
 │   ├─ NotAHolder            not_a_holder           no holder of this name and tenant holds the block
 │   ├─ StateLost             state_lost             the coordinator lost its state; carries boot, its new id
 │   ├─ BlockNotHeld          block_not_held         the block has no holder: it cannot be freed again
 │   └─ StaleGeneration       stale_generation       the block was recycled since its id was read
 ├─ CapacityExceeded          capacity_exceeded      a pool, table or limit is full; carries resource
 │   ├─ QueueFull             queue_full             carries retry_after_ms
 │   │   └─ RateExceeded      rate_exceeded          token rate of an entry of [access]; the same
 │   └─ QuotaExceeded         quota_exceeded         the tenant's ceiling; carries tenant
 ├─ Unavailable               unavailable            cannot be served now
 │   ├─ CoordinatorUnavailable coordinator_unavailable
 │   ├─ CoordinatorInUse      coordinator_in_use     another coordinator uses this runtime or state folder
 │   ├─ Draining              draining               admission has stopped
 │   ├─ JournalFailed         journal_failed         the disk refuses to read or write the journal; carries path, reason
 │   ├─ StateRemoved          state_removed          the folder of the journal was removed under a coordinator
 │   ├─ JournalFull           journal_full           no room for the journal when the process had to stop
 │   ├─ StorageFailed         storage_failed         the gateway's database fails; carries place, reason
 │   └─ NotReady              not_ready              no worker is ready to serve
 ├─ DeadlineExceeded          deadline_exceeded      the wait or the request ran out of time
 ├─ JournalCorrupt            journal_corrupt        the journal in state_dir is damaged; carries file, offset
 ├─ UnsupportedModel          unsupported_model      refused at load, by name
 ├─ WorkerError               worker_error           a worker failed while running a request
 │   ├─ GpuError              gpu_error              the device failed (out of memory, fault)
 │   └─ KernelError           kernel_error           a kernel is wrong on this device, or does not compile for it
 └─ InternalError             internal_error         a bug in kvforge
"""

from __future__ import annotations

from typing import Any, ClassVar

Field = str | int | float | bool | None


class KvforgeError(Exception):
    """Base of all errors that kvforge raises deliberately.

    Attributes:
        code: The stable wire code of the class.
        message: The text for people.
        fields: Values for programs (ids, limits). Each is an attribute too.
    """

    code: ClassVar[str] = "error"

    def __init__(self, message: str, **fields: Field) -> None:
        super().__init__(message)
        self.message = message
        self.fields: dict[str, Field] = fields

    def __getattr__(self, name: str) -> Any:
        fields = self.__dict__.get("fields", {})
        if name in fields:
            return fields[name]
        raise AttributeError(f"{type(self).__name__} has no attribute {name!r}")

    def __reduce__(self) -> tuple[Any, ...]:
        return (restore, (self.code, self.message, self.fields))


class ProtocolError(KvforgeError):
    """The bytes are not an accepted message."""

    code = "protocol_error"


class VersionMismatch(ProtocolError):
    """The two sides share no protocol version."""

    code = "version_mismatch"


class InvalidConfiguration(KvforgeError):
    """A setting is wrong. `field` is its full name as written in the configuration."""

    code = "invalid_configuration"

    def __init__(self, field: str, problem: str) -> None:
        super().__init__(f"{field}: {problem}", field=field)


class InvalidRequest(KvforgeError):
    """An argument of a request is wrong. `field` names it; `more` are numbers for programs."""

    code = "invalid_request"

    def __init__(self, field: str, problem: str, **more: Field) -> None:
        super().__init__(f"{field}: {problem}", field=field, **more)


class MessageRefused(InvalidRequest):
    """Several coordinators in a row died while handling this message. `deaths` is their number."""

    code = "message_refused"

    def __init__(self, size: int, deaths: int) -> None:
        problem = f"{deaths} coordinators died while handling this message of {size} bytes: send a smaller one"
        KvforgeError.__init__(self, f"message: {problem}, or restart with --fresh", field="message", deaths=deaths)


class NotAllowed(KvforgeError):
    """The caller lacks the right that `right` names; `connect` is the right to be served at all."""

    code = "not_allowed"

    def __init__(self, right: str, problem: str) -> None:
        super().__init__(f"the right {right!r} is missing: {problem}", right=right)


class NotFound(KvforgeError):
    """The object does not exist."""

    code = "not_found"


class SequenceNotFound(NotFound):
    """There is no such sequence."""

    code = "sequence_not_found"

    def __init__(self, sequence_id: int, why: str = "") -> None:
        message = f"there is no sequence {sequence_id}" + (f": {why}" if why else "")
        super().__init__(message, sequence_id=sequence_id)


class BlockNotFound(NotFound):
    """There is no such block."""

    code = "block_not_found"

    def __init__(self, block_id: int) -> None:
        super().__init__(f"there is no block {block_id}", block_id=block_id)


class RequestNotFound(NotFound):
    """There is no such request."""

    code = "request_not_found"

    def __init__(self, request_id: int, why: str = "") -> None:
        problem = f"there is no request {request_id}"
        text = f"{problem}: {why}" if why else f"{problem} (never submitted, or finished and purged)"
        super().__init__(text, request_id=request_id)


class ModelNotFound(NotFound):
    """The model cannot be found."""

    code = "model_not_found"

    def __init__(self, model: str, problem: str) -> None:
        super().__init__(f"model {model}: {problem}", model=model)


class Conflict(KvforgeError):
    """The object exists, but its state forbids the command."""

    code = "conflict"


class InvalidTransition(Conflict):
    """The request's state does not allow the event."""

    code = "invalid_transition"

    def __init__(self, request_id: int, state: str, event: str) -> None:
        super().__init__(
            f"request {request_id} is {state}: {event!r} is not allowed there",
            request_id=request_id,
            state=state,
            event=event,
        )


class AlreadyFinished(Conflict):
    """The request has already ended."""

    code = "already_finished"

    def __init__(self, request_id: int, state: str) -> None:
        super().__init__(f"request {request_id} has already ended ({state})", request_id=request_id, state=state)


class SequenceBusy(Conflict):
    """A request is running on the sequence."""

    code = "sequence_busy"

    def __init__(self, sequence_id: int, request_id: int) -> None:
        super().__init__(
            f"sequence {sequence_id} is being extended by request {request_id}: cancel it or wait for its end",
            sequence_id=sequence_id,
            request_id=request_id,
        )


class KeyReused(Conflict):
    """The idempotency key belongs to another command."""

    code = "key_reused"

    def __init__(self, key: str, request_id: int) -> None:
        super().__init__(
            f"the idempotency key {key!r} was used for request {request_id}, which asked for something else: "
            "use a new key for a new request",
            key=key,
            request_id=request_id,
        )


class AlreadyHolder(Conflict):
    """The holder already holds the block."""

    code = "already_holder"

    def __init__(self, block_id: int, holder: str) -> None:
        super().__init__(f"{holder!r} already holds block {block_id}", block_id=block_id, holder=holder)


class NotAHolder(Conflict):
    """The holder does not hold the block."""

    code = "not_a_holder"

    def __init__(self, block_id: int, holder: str) -> None:
        super().__init__(f"{holder!r} does not hold block {block_id}", block_id=block_id, holder=holder)


class BlockNotHeld(Conflict):
    """The block has no holder, so it cannot be freed."""

    code = "block_not_held"

    def __init__(self, block_id: int) -> None:
        super().__init__(f"block {block_id} has no holder: it is already free", block_id=block_id)


class StateLost(Conflict):
    """The boot id belongs to an earlier coordinator, and its state is lost."""

    code = "state_lost"

    def __init__(self, named: str, boot: str) -> None:
        problem = f"the coordinator started without its earlier state: boot is {boot[:8]!r}, not {named[:8]!r}"
        super().__init__(f"{problem}; earlier requests, sequences and blocks are lost: submit again", boot=boot)


class StaleGeneration(Conflict):
    """The block was recycled since its id was read."""

    code = "stale_generation"

    def __init__(self, block_id: int, generation: int, current: int) -> None:
        super().__init__(
            f"block {block_id} was recycled: generation {generation} was named, {current} is current",
            block_id=block_id,
            generation=generation,
            current=current,
        )


class CapacityExceeded(KvforgeError):
    """A limited resource is full. `resource` names it; `needed` and `available` are counts."""

    code = "capacity_exceeded"

    def __init__(self, resource: str, needed: int, available: int, hint: str = "") -> None:
        message = f"{resource}: {needed} needed, {available} available" + (f"; {hint}" if hint else "")
        super().__init__(message, resource=resource, needed=needed, available=available)


class QueueFull(CapacityExceeded):
    """The queue is full. `retry_after_ms` is when to try again."""

    code = "queue_full"

    def __init__(self, limit: int, retry_after_ms: int, owner: str = "") -> None:
        full = (
            f"{owner} has its limit of {limit} requests at once"
            if owner
            else f"the queue holds its limit of {limit} requests"
        )
        KvforgeError.__init__(
            self,
            f"{full}; try again in {retry_after_ms} ms",
            limit=limit,
            retry_after_ms=retry_after_ms,
        )


class RateExceeded(QueueFull):
    """The token rate of an entry of [access] is used up."""

    code = "rate_exceeded"

    def __init__(self, per_s: float, retry_after_ms: int, owner: str) -> None:
        KvforgeError.__init__(
            self,
            f"{owner} has used more than its {per_s:g} tokens a second; try again in {retry_after_ms} ms",
            limit=per_s,
            retry_after_ms=retry_after_ms,
        )


class QuotaExceeded(CapacityExceeded):
    """The tenant's ceiling of blocks is reached."""

    code = "quota_exceeded"

    def __init__(self, tenant: str, needed: int, ceiling: int, hint: str = "") -> None:
        problem = f"tenant {tenant!r} would hold {needed} blocks; its ceiling is {ceiling}"
        KvforgeError.__init__(
            self,
            f"{problem}; {hint}" if hint else problem,
            tenant=tenant,
            needed=needed,
            ceiling=ceiling,
        )


class Unavailable(KvforgeError):
    """The request cannot be served now."""

    code = "unavailable"


class CoordinatorUnavailable(Unavailable):
    """The coordinator cannot be reached."""

    code = "coordinator_unavailable"


class CoordinatorInUse(Unavailable):
    """Another coordinator uses this runtime or state folder."""

    code = "coordinator_in_use"


class JournalFull(Unavailable):
    """There was no room for the journal when the process had to stop."""

    code = "journal_full"

    def __init__(self, folder: str) -> None:
        problem = f"no room for the journal in {folder}: all records written so far are kept"
        super().__init__(f"{problem}; free some space, then start again", folder=folder)


class StorageFailed(Unavailable):
    """The gateway's database of stored objects cannot be read or written. Nothing of the call was done.

    Attributes:
        place: The file or server.
        reason: The database's error text.
    """

    code = "storage_failed"

    def __init__(self, place: str, reason: str, remedy: str) -> None:
        super().__init__(f"storage {place}: {reason}; {remedy}", place=place, reason=reason)


class JournalFailed(Unavailable):
    """The journal cannot be read or written.

    Attributes:
        path: The file or folder.
        reason: The system's error text.
    """

    code = "journal_failed"

    def __init__(self, path: str, reason: str, remedy: str) -> None:
        super().__init__(
            f"the journal cannot be read or written at {path}: {reason}. All acknowledged commands are in "
            f"the journal; {remedy}, then start again",
            path=path,
            reason=reason,
        )


class StateRemoved(Unavailable):
    """The folder of the journal, or a file in it, was removed while the coordinator ran. `folder` is its path."""

    code = "state_removed"

    def __init__(self, folder: str, problem: str) -> None:
        super().__init__(
            f"the journal in {folder} was removed or moved away while the coordinator ran: {problem}. Set state_dir to "
            "a folder that nothing cleans, such as ~/.local/state/kvforge",
            folder=folder,
        )


class Draining(Unavailable):
    """Admission has stopped."""

    code = "draining"


class NotReady(Unavailable):
    """No worker is ready to serve."""

    code = "not_ready"


class DeadlineExceeded(KvforgeError):
    """The wait or the request ran out of time."""

    code = "deadline_exceeded"


class JournalCorrupt(KvforgeError):
    """The journal is damaged in the middle.

    Attributes:
        file: The damaged file.
        offset: The first damaged byte.
        record: The number of the first missing record, 0 if none is missing.
        following: The number of the next intact record, 0 if none is missing.
    """

    code = "journal_corrupt"

    def __init__(self, file: str, offset: int, record: int = 0, following: int = 0, problem: str = "") -> None:
        what = f"{file} is damaged at byte {offset}"
        if problem:
            what += f": {problem}"
        elif record:
            what += f": record {record} is missing and {following} follows"
        super().__init__(
            f"{what}. Nothing was changed. `kvforge replay` shows the readable records; restore a copy of the folder, "
            "or start with --fresh, which loses its requests",
            file=file,
            offset=offset,
            record=record,
            following=following,
        )


class UnsupportedModel(KvforgeError):
    """The model cannot be served."""

    code = "unsupported_model"

    def __init__(self, model: str, problem: str) -> None:
        super().__init__(f"model {model} cannot be served: {problem}", model=model)


class WorkerError(KvforgeError):
    """A worker failed while running a request."""

    code = "worker_error"


class GpuError(WorkerError):
    """The device failed (out of memory, fault)."""

    code = "gpu_error"


class KernelError(WorkerError):
    """A kernel is wrong on this device or does not compile.

    A restart does not help: the message names the setting that does.
    """

    code = "kernel_error"


class InternalError(KvforgeError):
    """A bug in kvforge."""

    code = "internal_error"


def _tree(root: type[KvforgeError]) -> list[type[KvforgeError]]:
    return [root, *(descendant for child in root.__subclasses__() for descendant in _tree(child))]


BY_CODE: dict[str, type[KvforgeError]] = {cls.code: cls for cls in _tree(KvforgeError)}


def restore(code: str, message: str, fields: dict[str, Field]) -> KvforgeError:
    """Rebuild the error that a peer raised. An unknown code of a newer peer becomes a KvforgeError that names it."""
    cls = BY_CODE.get(code)
    if cls is None:
        cls, message = KvforgeError, f"{message} [{code}]"
    error = cls.__new__(cls)
    KvforgeError.__init__(error, message, **fields)
    return error
