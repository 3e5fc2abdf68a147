"""The operations, as SQL for both databases."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

from kvforge.protocol.errors import CapacityExceeded, Conflict, KvforgeError, NotFound

from .database import Busy, Database, Row
from .failures import StorageFailed, TenantFull
from .operations import (
    READING,
    Append,
    Chain,
    Claim,
    Delete,
    Document,
    Entry,
    Expire,
    Get,
    GetEntry,
    List,
    Mark,
    Operation,
    Put,
    Read,
    Release,
    RemoveEntry,
    Renew,
    Result,
    TenantUsage,
    Usage,
    Watch,
)

TRIES = 4
USED_S = 600.0
EVICTED_MAX, EVICTED_AT_ONCE = 1000, 16  # documents that one operation may remove, and that it reads at once
TENANTS_MAX = 10_000
DOCUMENT_BYTES = 256  # charged for a document beside its bodies, and for an entry
_COLUMNS = "tenant, kind, id, grouped, parent, state, version, created, updated, expires, bytes"
_WHERE = "tenant = ? AND kind = ? AND id = ?"
Outcome = list[Result] | KvforgeError


class Engine:
    """Does calls in groups, each group with one commit.

    Args:
        database: The connection, which is opened by the first call and again after a failure.
        tenant_bytes_max: Limit of a tenant's documents and entries in bytes.
    """

    def __init__(self, database: Database, tenant_bytes_max: int) -> None:
        self._db, self._tenant_bytes_max = database, tenant_bytes_max
        self._open = False
        self._now = 0.0
        self._removed = False
        self.untidy = False

    def run(self, calls: Sequence[Sequence[Operation]]) -> list[Outcome]:
        """Do calls, all with one commit if none is in the way of the others.

        Returns:
            For each call its results, or the error that it failed with.
        """
        if len(calls) > 1:
            outcomes = self._transaction(calls)
            if not isinstance(outcomes, KvforgeError):
                return outcomes
        found: list[Outcome] = []
        for call in calls:
            outcomes = self._transaction([call])
            found.append(outcomes if isinstance(outcomes, KvforgeError) else outcomes[0])
        return found

    def tidy(self) -> None:
        """Remove what deleted rows have left on the disk."""
        if not self._open:
            self.untidy = False
            return
        try:
            self.untidy = not self._db.tidy()
        except (Busy, StorageFailed):
            self.untidy = True

    def close(self) -> None:
        """Close the database."""
        self._db.close()
        self._open = False

    # ------------------------------------------------------------------------------------------------- transactions

    def _transaction(self, calls: Sequence[Sequence[Operation]]) -> list[Outcome] | KvforgeError:
        """Do calls with one commit. Return their outcomes, or the error that prevented the whole transaction."""
        error: KvforgeError = StorageFailed("", "the database stayed locked by other processes", "try again")
        for _ in range(TRIES):
            try:
                return self._tried(calls)
            except Busy as busy:
                self._undo()
                error = StorageFailed("", str(busy), "try again")
            except StorageFailed as failed:
                self._undo()
                self._db.close()  # a connection that failed may stay broken
                self._open = False
                return failed
        return error

    def _undo(self) -> None:
        try:
            self._db.rollback()
        except (Busy, StorageFailed):
            self._db.close()
            self._open = False

    def _tried(self, calls: Sequence[Sequence[Operation]]) -> list[Outcome]:
        if not self._open:
            self._db.close()  # of an opening that failed, as when the tables were locked
            self._db.open()
            self._open = True
        self._removed = False
        writes = any(not isinstance(operation, READING) for call in calls for operation in call)
        self._db.begin(writes=writes)
        self._now = self._db.now()
        alone = len(calls) == 1
        outcomes: list[Outcome] = []
        for call in calls:
            if not alone:
                self._db.execute("SAVEPOINT one")
            try:
                outcomes.append([self._do(operation) for operation in call])
            except KvforgeError as error:
                if isinstance(error, StorageFailed):
                    raise
                if alone:
                    self._db.rollback()
                    return [error]
                self._db.execute("ROLLBACK TO SAVEPOINT one")
                outcomes.append(error)
            if not alone:
                self._db.execute("RELEASE SAVEPOINT one")
        self._db.commit()
        self.untidy |= self._removed
        return outcomes

    def _do(self, operation: Operation) -> Result:
        return _HANDLERS[type(operation)](self, operation)

    # --------------------------------------------------------------------------------------------------- documents

    def _put(self, put: Put) -> Document:
        rows = self._db.execute(
            f"SELECT number, version, created, bytes, LENGTH(body) FROM documents WHERE {_WHERE}{self._locked}",
            _key(put),
        )
        version = rows[0][1] if rows else 0
        if put.expect not in (-1, version):
            raise Conflict(f"{put.kind} {put.id!r} is at version {version}, not {put.expect}: it was changed meanwhile")
        expires = self._now + put.keep_s if put.keep_s else 0.0
        lease = self._now + put.lease_s if put.owner else 0.0
        held = rows[0][3] - rows[0][4] if rows and not put.clear else DOCUMENT_BYTES
        if rows and put.clear:
            self._db.execute("DELETE FROM entries WHERE document = ?", (rows[0][0],))
        size, created = held + len(put.body), rows[0][2] if rows else self._now
        work = (put.group, put.parent, put.state)
        values = (*work, put.body, version + 1, self._now, put.keep_s, expires, size, put.owner, lease)
        if rows:
            self._db.execute(
                "UPDATE documents SET grouped = ?, parent = ?, state = ?, body = ?, version = ?, updated = ?, keep = ?,"
                " expires = ?, bytes = ?, owner = ?, lease = ?, watched = 0 WHERE number = ?",
                (*values, rows[0][0]),
            )
        else:
            self._db.execute(
                "INSERT INTO documents (grouped, parent, state, body, version, updated, keep, expires, bytes, owner,"
                " lease, watched, tenant, kind, id, created, next) VALUES"
                " (?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, 0, ?, ?, ?, ?, 0)",
                (*values, *_key(put), created),
            )
        self._account(put.tenant, 0 if rows else 1, size - (rows[0][3] if rows else 0), _key(put))
        return Document(
            tenant=put.tenant,
            kind=put.kind,
            id=put.id,
            group=put.group,
            parent=put.parent,
            state=put.state,
            version=version + 1,
            created_at=created,
            updated_at=self._now,
            expires_at=expires,
            size_bytes=size,
        )

    def _get(self, get: Get) -> Document | None:
        rows = self._db.execute(f"SELECT {_COLUMNS}, body FROM documents WHERE {_WHERE}", _key(get))
        return _document(rows[0]) if rows else None

    def _delete(self, delete: Delete) -> bool:
        rows = self._db.execute(
            f"SELECT number, tenant, bytes FROM documents WHERE {_WHERE}{self._locked}", _key(delete)
        )
        self._remove(rows)
        return bool(rows)

    def _list(self, asked: List) -> list[Document]:
        begin, (order, beyond) = 0 if not asked.descending else 1 << 62, _order(asked.descending)
        if asked.after:
            rows = self._db.execute(f"SELECT number FROM documents WHERE {_WHERE}", _key(asked, asked.after))
            if not rows:
                raise NotFound(f"there is no {asked.kind} {asked.after!r}")
            begin = rows[0][0]
        body = ", body" if asked.bodies else ""
        rows = self._db.execute(
            f"SELECT {_COLUMNS}{body} FROM documents WHERE tenant = ? AND kind = ? AND number {beyond} ?"
            f" ORDER BY number {order} LIMIT ?",
            (asked.tenant, asked.kind, begin, asked.limit),
        )
        return [_document(row) for row in rows]

    def _chain(self, chain: Chain) -> list[Document]:
        found: list[Document] = []
        at, size, seen = chain.id, 0, set[str]()
        while at and at not in seen:
            seen.add(at)
            rows = self._db.execute(f"SELECT {_COLUMNS}, body FROM documents WHERE {_WHERE}", _key(chain, at))
            if not rows:
                break
            found.append(_document(rows[0]))
            size += len(found[-1].body)
            if len(found) > chain.documents_max or size > chain.bytes_max:
                what = f"{chain.kind}s that {chain.id!r} continues"
                if size > chain.bytes_max:
                    raise CapacityExceeded(f"bytes of {what}", size, chain.bytes_max, "begin a new conversation")
                raise CapacityExceeded(what, len(found), chain.documents_max, "begin a new conversation")
            at = found[-1].parent
        if chain.keep_s:
            until = self._now + chain.keep_s
            for document in found:
                # A use shortly after another one is not written down: that would rewrite all of them in each turn.
                if 0 < document.expires_at < until - min(chain.keep_s / 100, USED_S):
                    self._db.execute(
                        f"UPDATE documents SET expires = ? WHERE {_WHERE}", (until, *_key(chain, document.id))
                    )
        return found[::-1]

    # ----------------------------------------------------------------------------------------------------- entries

    def _append(self, append: Append) -> int:
        rows = self._db.execute(f"SELECT number, next, keep FROM documents WHERE {_WHERE}{self._locked}", _key(append))
        if not rows:
            raise NotFound(f"there is no {append.kind} {append.id!r}")
        number, first, keep = rows[0]
        added: list[Entry] = []
        for entry in append.entries:
            there = "SELECT 1 FROM entries WHERE document = ? AND list = ? AND id = ?"
            if self._db.execute(there, (number, append.name, entry.id)):
                if append.skip:
                    continue
                raise Conflict(f"{append.kind} {append.id!r} already has an entry {entry.id!r} in {append.name}")
            self._db.execute(
                "INSERT INTO entries (document, list, position, id, body) VALUES (?, ?, ?, ?, ?)",
                (number, append.name, first + len(added), entry.id, entry.body),
            )
            added.append(entry)
        size = sum(len(entry.body) + DOCUMENT_BYTES for entry in added)
        keep = keep if append.keep_s < 0 else append.keep_s
        self._db.execute(
            "UPDATE documents SET next = next + ?, updated = ?, bytes = bytes + ?, keep = ?, expires = ?"
            " WHERE number = ?",
            (len(added), self._now, size, keep, self._now + keep if keep else 0.0, number),
        )
        self._account(append.tenant, 0, size, _key(append))
        return int(first)

    def _read(self, read: Read) -> list[Entry]:
        order, beyond = _order(read.descending)
        begin = read.behind
        if read.descending and begin < 0:
            begin = 1 << 62
        rows = self._db.execute(f"SELECT number FROM documents WHERE {_WHERE}", _key(read))
        if not rows:
            return []
        number = rows[0][0]
        if read.after:
            rows = self._db.execute(
                "SELECT position FROM entries WHERE document = ? AND list = ? AND id = ?",
                (number, read.name, read.after),
            )
            if not rows:
                raise NotFound(f"{read.kind} {read.id!r} has no {read.after!r} in {read.name}")
            begin = rows[0][0]
        rows = self._db.execute(
            f"SELECT id, body, position FROM entries WHERE document = ? AND list = ? AND position {beyond} ?"
            f" ORDER BY position {order} LIMIT ?",
            (number, read.name, begin, read.limit),
        )
        return [Entry(row[0], bytes(row[1]), row[2]) for row in rows]

    def _get_entry(self, asked: GetEntry) -> Entry | None:
        rows = self._db.execute(
            "SELECT entries.id, entries.body, position FROM entries JOIN documents ON number = document"
            " WHERE tenant = ? AND kind = ? AND documents.id = ? AND list = ? AND entries.id = ?",
            (*_key(asked), asked.name, asked.entry),
        )
        return Entry(rows[0][0], bytes(rows[0][1]), rows[0][2]) if rows else None

    def _remove_entry(self, asked: RemoveEntry) -> bool:
        rows = self._db.execute(
            "SELECT number, position, LENGTH(entries.body) FROM entries JOIN documents ON number = document"
            " WHERE tenant = ? AND kind = ? AND documents.id = ? AND list = ? AND entries.id = ?",
            (*_key(asked), asked.name, asked.entry),
        )
        if not rows:
            return False
        number, position, size = rows[0]
        self._db.execute(
            "DELETE FROM entries WHERE document = ? AND list = ? AND position = ?", (number, asked.name, position)
        )
        freed = size + DOCUMENT_BYTES
        self._db.execute(
            "UPDATE documents SET bytes = bytes - ?, updated = ? WHERE number = ?", (freed, self._now, number)
        )
        self._account(asked.tenant, 0, -freed, _key(asked))
        self._removed = True
        return True

    # ------------------------------------------------------------------------------------------------ work, leases

    def _claim(self, claim: Claim) -> list[Document]:
        groups = f" AND grouped IN ({', '.join('?' * len(claim.groups))})" if claim.groups else ""
        rows = self._db.execute(
            f"SELECT {_COLUMNS}, body, number FROM documents WHERE kind = ? AND state <> '' AND lease <= ?{groups}"
            f" ORDER BY number LIMIT ?{self._skipping}",
            (claim.kind, self._now, *claim.groups, claim.limit),
        )
        for row in rows:
            self._db.execute(
                "UPDATE documents SET owner = ?, lease = ?, watched = 0 WHERE number = ?",
                (claim.owner, self._now + claim.lease_s, row[-1]),
            )
        return [_document(row[:-1]) for row in rows]

    def _renew(self, renew: Renew) -> list[Document]:
        # Without the second condition, the partial index cannot be used and all documents are read.
        self._db.execute(
            "UPDATE documents SET lease = ? WHERE owner = ? AND owner <> ''", (self._now + renew.lease_s, renew.owner)
        )
        rows = self._db.execute(
            f"SELECT {_COLUMNS} FROM documents WHERE owner = ? AND owner <> '' AND watched > ?",
            (renew.owner, self._now),
        )
        return [_document(row) for row in rows]

    def _mark(self, mark: Mark) -> bool:
        self._db.execute(
            f"UPDATE documents SET state = ? WHERE {_WHERE} AND owner = ? AND state <> ''",
            (mark.state, *_key(mark), mark.owner),
        )
        return self._db.changed > 0

    def _release(self, release: Release) -> int:
        released = "UPDATE documents SET lease = 0, owner = '' WHERE owner = ? AND owner <> ''"
        if not release.keys:
            self._db.execute(released, (release.owner,))
            return self._db.changed
        count = 0
        for key in release.keys:
            self._db.execute(f"{released} AND {_WHERE}", (release.owner, *key))
            count += self._db.changed
        return count

    def _watch(self, watch: Watch) -> bool:
        self._db.execute(
            f"UPDATE documents SET watched = ? WHERE {_WHERE} AND state <> ''", (self._now + watch.for_s, *_key(watch))
        )
        return self._db.changed > 0

    # ----------------------------------------------------------------------------------------------------- bounds

    def _expire(self, expire: Expire) -> int:
        rows = self._db.execute(
            "SELECT number, tenant, bytes FROM documents WHERE expires > 0 AND state = '' AND expires <= ?"
            f" ORDER BY expires LIMIT ?{self._skipping}",
            (self._now, expire.limit),
        )
        self._remove(rows)
        return len(rows)

    def _usage(self, usage: Usage) -> list[TenantUsage]:
        only, values = ("WHERE tenant = ?", (usage.tenant,)) if usage.tenant else ("WHERE tenant <> ''", ())
        progress = f"SELECT tenant, COUNT(*) FROM documents {only} AND state <> '' GROUP BY tenant"
        in_progress: dict[str, int] = dict(self._db.execute(progress, values))
        rows = self._db.execute(
            f"SELECT tenant, documents, bytes FROM tenants {only} AND documents > 0 ORDER BY bytes DESC LIMIT ?",
            (*values, TENANTS_MAX),
        )
        return [TenantUsage(tenant, count, size, in_progress.get(tenant, 0)) for tenant, count, size in rows]

    def _account(self, tenant: str, documents: int, size: int, key: tuple[str, str, str]) -> None:
        """Charge a tenant, and make room where its limit is exceeded. `key` is the document that must stay."""
        self._charge(tenant, documents, size)
        if size <= 0:
            return
        over = self._held(tenant) - self._tenant_bytes_max
        if over <= 0:
            return
        evicted = 0
        while over > 0:
            rows = self._db.execute(
                "SELECT number, tenant, bytes FROM documents WHERE tenant = ? AND expires > 0 AND state = ''"
                " AND NOT (kind = ? AND id = ?) ORDER BY expires LIMIT ?",
                (tenant, key[1], key[2], EVICTED_AT_ONCE),
            )
            if not rows or evicted >= EVICTED_MAX:  # the whole call is undone
                raise TenantFull(tenant, self._tenant_bytes_max + over, self._tenant_bytes_max)
            for row in rows:
                if over > 0:
                    self._remove([row])
                    over, evicted = over - row[2], evicted + 1

    def _charge(self, tenant: str, documents: int, size: int) -> None:
        self._db.execute(
            "INSERT INTO tenants (tenant, documents, bytes) VALUES (?, ?, ?) ON CONFLICT (tenant) DO UPDATE"
            " SET documents = tenants.documents + excluded.documents, bytes = tenants.bytes + excluded.bytes",
            (tenant, documents, size),
        )

    def _held(self, tenant: str) -> int:
        rows = self._db.execute("SELECT bytes FROM tenants WHERE tenant = ?", (tenant,))
        return int(rows[0][0]) if rows else 0

    def _remove(self, rows: Iterable[Row]) -> None:
        """Remove documents, given as (number, tenant, bytes)."""
        for number, tenant, size in rows:
            self._db.execute("DELETE FROM entries WHERE document = ?", (number,))
            self._db.execute("DELETE FROM documents WHERE number = ?", (number,))
            if self._db.changed:
                self._charge(tenant, -1, -size)
            self._removed = True

    @property
    def _locked(self) -> str:
        return " FOR UPDATE" if self._db.locks_rows else ""

    @property
    def _skipping(self) -> str:
        return " FOR UPDATE SKIP LOCKED" if self._db.locks_rows else ""


def _key(operation: Any, own: str | None = None) -> tuple[str, str, str]:
    return operation.tenant, operation.kind, operation.id if own is None else own


def _order(descending: bool) -> tuple[str, str]:
    """Return the direction of an ORDER BY, and the comparison with the last row before a page."""
    return ("DESC", "<") if descending else ("ASC", ">")


def _document(row: Row) -> Document:
    tenant, kind, name, group, parent, state, version, created, updated, expires, size, *body = row
    return Document(
        tenant=tenant,
        kind=kind,
        id=name,
        group=group,
        parent=parent,
        state=state,
        version=version,
        created_at=created,
        updated_at=updated,
        expires_at=expires,
        size_bytes=size,
        body=bytes(body[0]) if body else b"",
    )


_HANDLERS: dict[type, Callable[[Engine, Any], Result]] = {
    Put: Engine._put,
    Get: Engine._get,
    Delete: Engine._delete,
    List: Engine._list,
    Chain: Engine._chain,
    Append: Engine._append,
    Read: Engine._read,
    GetEntry: Engine._get_entry,
    RemoveEntry: Engine._remove_entry,
    Claim: Engine._claim,
    Renew: Engine._renew,
    Mark: Engine._mark,
    Release: Engine._release,
    Watch: Engine._watch,
    Expire: Engine._expire,
    Usage: Engine._usage,
}
