"""The error tree is complete, its codes are stable, and every error survives the wire."""

from __future__ import annotations

import inspect
import pickle

import msgspec
import pytest

from kvforge.protocol import errors
from kvforge.protocol.errors import BY_CODE, KvforgeError, restore
from kvforge.protocol.messages import ErrorInfo

EXAMPLES: list[KvforgeError] = [
    errors.InvalidConfiguration("blocks", "must be at least 1"),
    errors.InvalidRequest("prompt", "is empty"),
    errors.NotAllowed("admin", "drain"),
    errors.SequenceNotFound(7),
    errors.BlockNotFound(8),
    errors.RequestNotFound(9),
    errors.ModelNotFound("m", "not there"),
    errors.InvalidTransition(1, "running", "schedule"),
    errors.AlreadyFinished(1, "finished"),
    errors.SequenceBusy(1, 2),
    errors.AlreadyHolder(3, "me"),
    errors.NotAHolder(3, "me"),
    errors.BlockNotHeld(3),
    errors.StaleGeneration(3, 1, 2),
    errors.StateLost("before", "now"),
    errors.CapacityExceeded("blocks", 5, 2, "wait"),
    errors.QueueFull(10, 500),
    errors.RateExceeded(2.5, 500, "alice"),
    errors.QuotaExceeded("a", 12, 8),
    errors.UnsupportedModel("m", "attention sinks"),
    errors.JournalFull("folder"),
    errors.MessageRefused(1, 3),
    errors.JournalFailed("path", "reason", "remedy"),
    errors.StorageFailed("place", "reason", "remedy"),
    errors.StateRemoved("folder", "problem"),
    errors.JournalCorrupt("records-1", 12, 3, 5),
]
# Peers of other versions rely on these codes: a change breaks the wire protocol.
STABLE_CODES = {
    "error", "protocol_error", "version_mismatch", "invalid_configuration", "invalid_request",
    "not_allowed", "not_found", "sequence_not_found", "block_not_found", "request_not_found", "model_not_found",
    "conflict", "invalid_transition", "already_finished", "sequence_busy",
    "key_reused", "already_holder", "not_a_holder", "block_not_held",
    "stale_generation", "state_lost", "capacity_exceeded", "queue_full", "rate_exceeded", "quota_exceeded",
    "unavailable", "journal_full", "journal_corrupt",
    "coordinator_unavailable", "coordinator_in_use", "draining", "not_ready", "deadline_exceeded",
    "unsupported_model", "worker_error", "gpu_error", "kernel_error", "internal_error",
    "journal_failed", "state_removed", "message_refused", "storage_failed",
}  # fmt: skip


def declared() -> list[type[KvforgeError]]:
    return [
        value
        for value in vars(errors).values()
        if inspect.isclass(value) and issubclass(value, KvforgeError) and value.__module__ == errors.__name__
    ]


def test_every_error_class_has_its_own_code_and_is_found_by_it() -> None:
    assert set(BY_CODE) == STABLE_CODES
    assert sorted(cls.code for cls in declared()) == sorted(STABLE_CODES)
    assert all(BY_CODE[cls.code] is cls for cls in declared())


def test_the_module_docstring_shows_the_whole_tree() -> None:
    assert errors.__doc__ is not None
    for cls in declared()[1:]:
        assert cls.__name__ in errors.__doc__
        assert cls.code in errors.__doc__


@pytest.mark.parametrize("error", EXAMPLES, ids=lambda error: type(error).__name__)
def test_an_error_crosses_the_wire_as_the_same_class_with_the_same_fields(error: KvforgeError) -> None:
    info = msgspec.convert(msgspec.to_builtins(ErrorInfo.of(error)), ErrorInfo)
    back = restore(info.code, info.message, info.fields)
    assert type(back) is type(error)
    assert (str(back), back.fields) == (str(error), error.fields)


@pytest.mark.parametrize("cls", declared(), ids=lambda cls: cls.__name__)
def test_every_code_restores_its_class(cls: type[KvforgeError]) -> None:
    back = restore(cls.code, "why", {"field": "x"})
    assert type(back) is cls
    assert back.field == "x"


def test_an_unknown_code_from_a_newer_peer_is_kept_in_the_text() -> None:
    error = restore("brand_new", "something", {})
    assert type(error) is KvforgeError
    assert "brand_new" in str(error)


def test_ids_are_attributes_and_copies_keep_them() -> None:
    """behaviour 10: three errors, three codes, each carrying its id."""
    assert errors.SequenceNotFound(7).sequence_id == 7
    assert errors.BlockNotFound(8).block_id == 8
    assert errors.RequestNotFound(9).request_id == 9
    codes = {errors.SequenceNotFound.code, errors.BlockNotFound.code, errors.RequestNotFound.code}
    assert len(codes) == 3
    copied = pickle.loads(pickle.dumps(errors.SequenceNotFound(7)))  # noqa: S301 - our own object
    assert (type(copied), copied.sequence_id) == (errors.SequenceNotFound, 7)
    with pytest.raises(AttributeError, match="block_id"):
        _ = errors.SequenceNotFound(7).block_id
