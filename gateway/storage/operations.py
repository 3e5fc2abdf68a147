"""The operations of a storage and their results. They cross a process boundary as MessagePack.

Ids, kinds, lists and tenants are non-empty texts. Times are seconds since 1970, by the database's clock.
"""

from __future__ import annotations

from typing import Any

import msgspec


class Document(msgspec.Struct, frozen=True, kw_only=True):
    """A stored document.

    Attributes:
        tenant, kind, id: Its key. A document of another tenant does not exist for the caller.
        body: Its content.
        group: The key that `Claim` selects by, such as the model that the work needs.
        parent: The id of the document of the same tenant and kind that it continues, or "".
        state: "" for a document at rest; anything else names work in progress, which `Claim` finds.
        version: Rises by one with each `Put`.
        created_at, updated_at: Times of the first and the last `Put` or `Append`.
        expires_at: When it is removed; 0: never.
        size_bytes: The size of the body and the entries.
    """

    tenant: str
    kind: str
    id: str
    body: bytes = b""
    group: str = ""
    parent: str = ""
    state: str = ""
    version: int = 0
    created_at: float = 0.0
    updated_at: float = 0.0
    expires_at: float = 0.0
    size_bytes: int = 0


class Entry(msgspec.Struct, frozen=True):
    """An entry of one of a document's lists.

    Attributes:
        id: Unique in its list.
        body: Its content.
        position: Its place in the list. Positions rise and are never reused.
    """

    id: str
    body: bytes
    position: int = -1


class _Keyed(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """An operation on one document."""

    tenant: str
    kind: str
    id: str


class Put(_Keyed, frozen=True, kw_only=True, tag=True):
    """Write a document. Returns the `Document` without its body.

    Attributes:
        body, group, parent, state: As in `Document`.
        keep_s: Remove it this long after the last `Put`, `Append` or `Chain`; 0: never.
        expect: The version that must be there: 0 for none, -1 for any or none. Otherwise the call fails with Conflict.
        owner, lease_s: Take or keep the work for this long; "" releases it.
        clear: Remove the entries of all its lists.
    """

    body: bytes
    group: str = ""
    parent: str = ""
    state: str = ""
    keep_s: float = 0.0
    expect: int = -1
    owner: str = ""
    lease_s: float = 0.0
    clear: bool = False


class Get(_Keyed, frozen=True, kw_only=True, tag=True):
    """Read a document. Returns it, or None."""


class Delete(_Keyed, frozen=True, kw_only=True, tag=True):
    """Remove a document with its entries, and their bytes from the disk. Returns whether it was there."""


class List(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """List documents in the order of their creation. Returns a list of `Document`.

    Attributes:
        tenant, kind: Select the documents.
        after: Begin behind this id; "": with the first. An id that does not exist is NotFound.
        limit: How many at most.
        descending: The newest first.
        bodies: With their content.
    """

    tenant: str
    kind: str
    after: str = ""
    limit: int = 20
    descending: bool = False
    bodies: bool = True


class Chain(_Keyed, frozen=True, kw_only=True, tag=True):
    """Read a document and those that it continues, by `parent`. Returns a list of `Document`, the oldest first.

    The list is empty if the document does not exist. It begins with a document that has a parent if that was removed.

    Attributes:
        keep_s: Extend the retention of all documents to at least this long from now; 0: leave it.
        documents_max, bytes_max: Beyond these the call fails with CapacityExceeded.
    """

    keep_s: float = 0.0
    documents_max: int = 10_000
    bytes_max: int = 64 << 20


class Append(_Keyed, frozen=True, kw_only=True, tag=True):
    """Append entries to a list of a document. Returns the position of the first entry.

    Fails with NotFound if there is no such document, and with Conflict if an entry's id is in the list.

    Attributes:
        name: The list.
        entries: Their positions are ignored.
        keep_s: As in `Put`; negative: as it is.
        skip: Leave out entries with ids that are in the list, instead of a Conflict.
    """

    name: str
    entries: list[Entry]
    keep_s: float = -1.0
    skip: bool = False


class Read(_Keyed, frozen=True, kw_only=True, tag=True):
    """Read a list of a document. Returns a list of `Entry`, empty if there is no such document or list.

    Attributes:
        name: The list.
        after: Begin behind this entry; "": with the first. An id that is not in the list is NotFound.
        behind: Begin behind this position.
        limit: How many at most.
        descending: The last first.
    """

    name: str
    after: str = ""
    behind: int = -1
    limit: int = 20
    descending: bool = False


class GetEntry(_Keyed, frozen=True, kw_only=True, tag=True):
    """Read one entry of a list. Returns it, or None."""

    name: str
    entry: str


class RemoveEntry(_Keyed, frozen=True, kw_only=True, tag=True):
    """Remove one entry of a list, and its bytes from the disk. Returns whether it was there."""

    name: str
    entry: str


class Claim(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """Take over work in progress without a living owner. Returns a list of `Document`, the oldest first.

    Attributes:
        kind: The kind of the documents.
        groups: Only work of these groups; empty: of all.
        owner: The new owner, a name that no other process has.
        lease_s: How long the work is its own, unless it calls `Renew`.
        limit: How many at most.
    """

    kind: str
    owner: str
    lease_s: float
    groups: list[str] = []
    limit: int = 16


class Renew(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """Extend the leases of all work of an owner. Returns its watched documents (see `Watch`), without bodies."""

    owner: str
    lease_s: float


class Mark(_Keyed, frozen=True, kw_only=True, tag=True):
    """Change the state of work that an owner holds, and not its version. Returns whether it holds it."""

    owner: str
    state: str


class Release(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """End the leases of an owner's work, for others to claim at once. Returns the number of documents.

    Attributes:
        owner: The owner.
        keys: (tenant, kind, id) of the work; empty: all of it.
    """

    owner: str
    keys: list[tuple[str, str, str]] = []


class Watch(_Keyed, frozen=True, kw_only=True, tag=True):
    """Ask the owner of work in progress to append its progress for this long. Returns whether there is such work."""

    for_s: float


class Expire(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """Remove documents at rest that have expired. Returns the number.

    Attributes:
        limit: How many at most, the first to expire first.
    """

    limit: int = 256


class Usage(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """Return a list of `TenantUsage` for one tenant, or for all with `tenant` "" (at most 10,000)."""

    tenant: str = ""


class TenantUsage(msgspec.Struct, frozen=True):
    """The storage that a tenant uses. `in_progress` is the number of documents with a state."""

    tenant: str
    documents: int
    size_bytes: int
    in_progress: int


Operation = (
    Put
    | Get
    | Delete
    | List
    | Chain
    | Append
    | Read
    | GetEntry
    | RemoveEntry
    | Claim
    | Renew
    | Mark
    | Release
    | Watch
    | Expire
    | Usage
)
READING = (Get, List, Read, GetEntry, Usage)  # operations that change nothing
RESULTS: dict[type, Any] = {
    Put: Document,
    Get: Document | None,
    Delete: bool,
    List: list[Document],
    Chain: list[Document],
    Append: int,
    Read: list[Entry],
    GetEntry: Entry | None,
    RemoveEntry: bool,
    Claim: list[Document],
    Renew: list[Document],
    Mark: bool,
    Release: int,
    Watch: bool,
    Expire: int,
    Usage: list[TenantUsage],
}
Result = Document | Entry | bool | int | None | list[Document] | list[Entry] | list[TenantUsage]
