"""Creation and check of the tables, the same for both databases."""

from __future__ import annotations

from .database import Database
from .failures import StorageFailed
from .schema import SCHEMA_VERSION, TABLES, VERSION_TABLE


def commit_tables(database: Database, place: str, number: str, blob: str, another: str) -> None:
    """Create the tables if there are none, check their version, and commit the transaction that was begun.

    Args:
        database: The database, in a transaction that writes.
        place: The database, as errors name it.
        number: The type of a primary key that counts up.
        blob: The type of bytes.
        another: What else a user may name, for the remedy.

    Raises:
        StorageFailed: Another version of kvforge made the tables.
    """
    database.execute(VERSION_TABLE)
    rows = database.execute("SELECT version FROM kvforge_schema")
    if not rows:
        for table in TABLES:
            database.execute(table.format(number=number, blob=blob))
        database.execute("INSERT INTO kvforge_schema VALUES (?)", (SCHEMA_VERSION,))
    elif rows[0][0] != SCHEMA_VERSION:
        database.rollback()
        problem = f"its tables have version {rows[0][0]}, and this gateway knows {SCHEMA_VERSION}"
        raise StorageFailed(place, problem, f"use the gateway that wrote it, or name another {another}")
    database.commit()
