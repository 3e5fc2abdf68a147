"""How a step fails: errors that end the worker, and errors of its rows and of the rows that depend on them."""

from __future__ import annotations

from collections.abc import Iterable

from kvforge.protocol.errors import WorkerError
from kvforge.worker.device.device import Device, as_worker_error
from kvforge.worker.loading.model import LoadedModel

from .pending import PendingStep


class FatalStepError(WorkerError):
    """A step failed in a way that no later one can make good: the worker must end, and its rows be recomputed."""


class RankDesyncError(FatalStepError):
    """A rank failed a step that other ranks completed: all ranks must restart."""


class HostCopyError(FatalStepError):
    """A copy from or to the host failed: later steps depend on it."""


class StateLostError(FatalStepError):
    """A pass over recurrent states failed half-way: they are neither before nor behind it."""


def require_repeatable(model: LoadedModel, error: Exception) -> None:
    """Check that a failed pass may be made again.

    With several ranks, one that skipped a pass would exchange the wrong numbers. Recurrent states would be advanced
    twice.

    Args:
        model: The model of the pass.
        error: Why it failed.

    Raises:
        RankDesyncError: The model runs on several ranks.
        StateLostError: The model has recurrent states.
    """
    ranks, text = model.ranks, f"{type(error).__name__}: {error}"
    if ranks is not None:
        raise RankDesyncError(f"rank {ranks.rank} of {ranks.count} failed its part of a step: {text}") from error
    if model.geometry.states:
        raise StateLostError(f"a step over recurrent states failed half-way: {text}") from error


def fail_step(pending: PendingStep, error: Exception, device: Device) -> None:
    """Fail all rows of a step after a failure that cannot be attributed to one row."""
    failure = as_worker_error(error, "a step", device)
    for slot in pending.slots.tolist():
        pending.errors.setdefault(slot, failure)
    pending.sampled, pending.waiting, pending.scored = [], [], []


def fail_dependents(pending: PendingStep, later_steps: Iterable[PendingStep]) -> None:
    """Fail the rows of later steps that were fed a token of a failed row of this step."""
    for later in later_steps:
        for slot, error in pending.errors.items():
            if slot in later.fed and slot not in later.begun and slot not in later.errors:
                later.spoiled[slot] = error
