"""What is stored of files and batches, and how clients read it."""

from __future__ import annotations

import secrets
from typing import Any

import msgspec

from kvforge.protocol.errors import NotFound

FILE, BATCH = "file", "batch"
CHUNKS = "chunks"  # the list of a file's document with its content
UPLOADING, PROCESSED = "uploading", "processed"
VALIDATING, IN_PROGRESS, CANCELLING = "validating", "in_progress", "cancelling"
FAILED, COMPLETED, EXPIRED, CANCELLED = "failed", "completed", "expired", "cancelled"
FINALIZING = "finalizing"
BATCH_PURPOSE, OUTPUT_PURPOSE = "batch", "batch_output"
ID_LENGTH_MAX = 100


class NoSuchStored(NotFound):
    """There is no file or batch with this id, or it belongs to another tenant."""

    def __init__(self, kind: str, name: str, field: str | None = None) -> None:
        super().__init__(f"there is no {kind} {name[:ID_LENGTH_MAX]!r}", **({"field": field} if field else {}))


class FileRecord(msgspec.Struct, frozen=True, kw_only=True):
    """The body of a file's document.

    Attributes:
        status: UPLOADING until all of its content is stored; clients do not see it before.
        expires_at: In seconds since 1970; 0: never.
        users: The batches in progress that read it. It does not expire meanwhile.
    """

    filename: str
    purpose: str
    bytes: int
    created_at: int
    status: str = PROCESSED
    expires_at: int = 0
    users: list[str] = []

    def shown(self, name: str) -> dict[str, Any]:
        """Return the file as a client reads it."""
        return {
            "id": name,
            "object": FILE,
            "bytes": self.bytes,
            "created_at": self.created_at,
            "expires_at": self.expires_at or None,
            "filename": self.filename,
            "purpose": self.purpose,
            "status": self.status,
            "status_details": None,
        }


class Problem(msgspec.Struct, frozen=True, kw_only=True):
    """Why a batch failed, with the line of its input file (from 1)."""

    code: str
    message: str
    line: int | None = None
    param: str | None = None


class Counts(msgspec.Struct, frozen=True, kw_only=True):
    """The requests of a batch."""

    total: int = 0
    completed: int = 0
    failed: int = 0


class BatchRecord(msgspec.Struct, frozen=True, kw_only=True):
    """The body of a batch's document.

    Attributes:
        caller: The name of the API key that created it.
        keep_output_s: How long its output is kept; 0: until it is deleted.
        next: The number of the first request (from 0) without an outcome in the output.
        at: The offset of its line in the input file.
        done: Later requests with an outcome, as ranges [first, last].
        output_bytes, error_bytes: The size of the output and error file so far.
    """

    endpoint: str
    input_file_id: str
    completion_window: str
    created_at: int
    expires_at: int
    caller: str = ""
    model: str = ""
    keep_output_s: float = 0.0
    metadata: dict[str, str] | None = None
    status: str = VALIDATING
    errors: list[Problem] = []
    output_file_id: str = ""
    error_file_id: str = ""
    in_progress_at: int | None = None
    finalizing_at: int | None = None
    completed_at: int | None = None
    failed_at: int | None = None
    expired_at: int | None = None
    cancelling_at: int | None = None
    cancelled_at: int | None = None
    counts: Counts = Counts()
    next: int = 0
    at: int = 0
    done: list[tuple[int, int]] = []
    output_bytes: int = 0
    error_bytes: int = 0

    @property
    def over(self) -> bool:
        """Whether it has ended."""
        return self.status in (FAILED, COMPLETED, EXPIRED, CANCELLED)

    def shown(self, name: str) -> dict[str, Any]:
        """Return the batch as a client reads it. Its files exist for clients when it has ended."""
        errors = {"object": "list", "data": msgspec.to_builtins(self.errors)} if self.errors else None
        return {
            "id": name,
            "object": BATCH,
            "endpoint": self.endpoint,
            "model": self.model or None,
            "errors": errors,
            "input_file_id": self.input_file_id,
            "completion_window": self.completion_window,
            "status": self.status,
            "output_file_id": self.output_file_id if self.over and self.output_bytes else None,
            "error_file_id": self.error_file_id if self.over and self.error_bytes else None,
            "created_at": self.created_at,
            "in_progress_at": self.in_progress_at,
            "expires_at": self.expires_at,
            "finalizing_at": self.finalizing_at,
            "completed_at": self.completed_at,
            "failed_at": self.failed_at,
            "expired_at": self.expired_at,
            "cancelling_at": self.cancelling_at,
            "cancelled_at": self.cancelled_at,
            "request_counts": msgspec.to_builtins(self.counts),
            "metadata": self.metadata,
        }


FILE_RECORD = msgspec.json.Decoder(FileRecord)
BATCH_RECORD = msgspec.json.Decoder(BatchRecord)
encode = msgspec.json.encode
changed = msgspec.structs.replace


def new_id(prefix: str) -> str:
    """Return an id that no other object has."""
    return f"{prefix}{secrets.token_hex(16)}"


def known_id(kind: str, name: str, field: str | None = None) -> str:
    """Return an id that may be one.

    Raises:
        NoSuchStored: It cannot be: it is empty, too long, or not printable ASCII.
    """
    if 0 < len(name) <= ID_LENGTH_MAX and name.isascii() and name.isprintable():
        return name
    raise NoSuchStored(kind, name, field)
