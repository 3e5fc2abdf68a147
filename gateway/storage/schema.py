"""The tables, the same for both databases.

`{number}` is the primary key that counts up, `{blob}` the type of bytes.
"""

from __future__ import annotations

SCHEMA_VERSION = 1
VERSION_TABLE = "CREATE TABLE IF NOT EXISTS kvforge_schema (version BIGINT NOT NULL)"
TABLES = (
    # `next` is the position of the next entry of any list. `touched` is the lease's end, `watched` that of a `Watch`.
    """CREATE TABLE documents (
        number {number},
        tenant TEXT NOT NULL,
        kind TEXT NOT NULL,
        id TEXT NOT NULL,
        grouped TEXT NOT NULL,
        parent TEXT NOT NULL,
        state TEXT NOT NULL,
        body {blob} NOT NULL,
        version BIGINT NOT NULL,
        created DOUBLE PRECISION NOT NULL,
        updated DOUBLE PRECISION NOT NULL,
        keep DOUBLE PRECISION NOT NULL,
        expires DOUBLE PRECISION NOT NULL,
        bytes BIGINT NOT NULL,
        next BIGINT NOT NULL,
        owner TEXT NOT NULL,
        lease DOUBLE PRECISION NOT NULL,
        watched DOUBLE PRECISION NOT NULL,
        UNIQUE (tenant, kind, id)
    )""",
    "CREATE INDEX documents_in_order ON documents (tenant, kind, number)",
    "CREATE INDEX documents_by_expiry ON documents (expires) WHERE expires > 0 AND state = ''",
    "CREATE INDEX documents_by_use ON documents (tenant, expires) WHERE expires > 0 AND state = ''",
    "CREATE INDEX documents_in_progress ON documents (kind, lease) WHERE state <> ''",
    "CREATE INDEX documents_in_progress_of ON documents (tenant) WHERE state <> ''",
    "CREATE INDEX documents_by_owner ON documents (owner) WHERE owner <> ''",
    """CREATE TABLE entries (
        document BIGINT NOT NULL,
        list TEXT NOT NULL,
        position BIGINT NOT NULL,
        id TEXT NOT NULL,
        body {blob} NOT NULL,
        PRIMARY KEY (document, list, position),
        UNIQUE (document, list, id)
    )""",
    "CREATE TABLE tenants (tenant TEXT PRIMARY KEY, documents BIGINT NOT NULL, bytes BIGINT NOT NULL)",
)
