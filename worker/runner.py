"""One step: from the coordinator's arrays to tokens.

Order: slots change hands (`begins`), blocks are copied, then K and V of the new tokens are written and attention runs
(in one forward pass), then the rows with sample = 1 choose a token.

A poison row never takes the others with it. What can be checked beforehand is, and such a row is left out of the
batch; when the pass itself fails, rows are run again one by one (writing K and V twice gives the same bytes) and
those that fail alone are the ones reported. Nothing a slot remembers changes before its token is chosen.
"""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from protocol.errors import InvalidRequest, KvforgeError, WorkerError
from protocol.messages import NO_FLOAT32, NO_INT32, ErrorInfo, Float32Array, Int32Array, RowError, RowStart, Step

from .attention import PagedBatch
from .device import as_worker_error
from .model import LoadedModel
from .pool import KvPool, require_positive
from .sampler import NO_TOKEN, HostRows, SamplingState
from .starts import Histories, problem_of, split_history


@dataclass(frozen=True)
class StepOutcome:
    """slots, tokens: [sampled] int32; logprobs: [sampled] float32, nats; all host, in the step's row order.

    top_counts [sampled] (empty where no row wants any), top_tokens, top_logprobs: as in StepResult, in the same order.
    errors: one for each row that failed. duration_us: the whole of `run`, on the monotonic clock.
    """

    slots: Int32Array
    tokens: Int32Array
    logprobs: Float32Array
    errors: tuple[RowError, ...]
    duration_us: int
    top_counts: Int32Array
    top_tokens: Int32Array
    top_logprobs: Float32Array


@dataclass(frozen=True)
class _Rows:
    """Rows that passed the checks. tokens: [sum(counts)] int32, row after row; tables: [rows, width] int32."""

    slots: Int32Array
    starts: Int32Array
    counts: Int32Array
    samples: Int32Array
    tokens: Int32Array
    tables: Int32Array

    def pick(self, keep: npt.NDArray[np.bool_]) -> _Rows:
        tokens = self.tokens[np.repeat(keep, self.counts)]
        return _Rows(
            self.slots[keep], self.starts[keep], self.counts[keep], self.samples[keep], tokens, self.tables[keep]
        )


class Runner:
    """Runs steps of one model over one pool. Not thread-safe: a worker has one thread.

    slots_max: slots are [0, slots_max). step_tokens_max, step_rows_max: limits of one step.
    Errors: InvalidConfiguration names the limit.
    """

    def __init__(
        self, model: LoadedModel, pool: KvPool, *, slots_max: int, step_tokens_max: int, step_rows_max: int
    ) -> None:
        limits = {"slots_max": slots_max, "step_tokens_max": step_tokens_max, "step_rows_max": step_rows_max}
        for field, value in limits.items():
            require_positive(field, value)
        assert pool.geometry == model.geometry, "the pool was made for another model"
        self.model = model
        self.pool = pool
        self.slots_max, self.step_tokens_max, self.step_rows_max = slots_max, step_tokens_max, step_rows_max
        self._state = SamplingState(slots_max, model.vocab_size, model.device)
        # What the host must know of a slot without asking the device.
        self._has_sampled = np.zeros(slots_max, np.bool_)
        self._refused: dict[int, KvforgeError] = {}  # slots whose start was wrong, until a right one comes

    @torch.inference_mode()
    def run(self, step: Step, tables: npt.NDArray[np.int32]) -> StepOutcome:
        """Carries out one step.

        step: as its docstring says, except that `copies` name pool-local blocks. tables: [rows, width] int32, row r the
        block table of step row r, pool-local ids; entries past a row's tokens are not read.
        Never raises for what a step holds: every fault becomes the RowError of the rows it concerns.
        """
        started_ns = time.monotonic_ns()
        errors: dict[int, KvforgeError] = {}
        outcome: list[_Sampled] = []
        malformed = self._malformed(step, tables)
        if malformed is not None:
            errors = {int(slot): malformed for slot in np.ravel(step.slots)}
        else:
            rows = _Rows(step.slots, step.starts, step.counts, step.samples, step.tokens, tables)
            self._begin(step.begins, split_history(step), errors)
            keep, copies = self._check(rows, step.copies.reshape(-1, 3), errors)
            self.pool.copy_blocks(copies)
            if keep.any():
                self._run_rows(rows.pick(keep), outcome, errors)
        order = {int(slot): place for place, slot in enumerate(np.ravel(step.slots))}
        return _joined(
            outcome,
            order,
            tuple(RowError(slot, ErrorInfo.of(error)) for slot, error in errors.items()),
            (time.monotonic_ns() - started_ns) // 1000,
        )

    # ------------------------------------------------------------------------------------------------------- checking

    def _malformed(self, step: Step, tables: npt.NDArray[Any]) -> InvalidRequest | None:
        """Faults that leave no row readable."""
        rows = step.slots.size
        for name in ("slots", "starts", "counts", "samples", "tokens", "copies", "history"):
            array = getattr(step, name)
            if array.ndim != 1 or array.dtype != np.int32:
                return InvalidRequest(name, f"must be int32 of 1 dimension, not {array.dtype} of {array.ndim}")
        for name in ("starts", "counts", "samples"):
            if len(getattr(step, name)) != rows:
                return InvalidRequest(name, f"has {len(getattr(step, name))} rows, slots {rows}")
        if tables.ndim != 2 or tables.dtype != np.int32 or len(tables) != rows:
            return InvalidRequest("tables", f"must be [{rows}, width] int32, not {tables.shape} {tables.dtype}")
        if rows > self.step_rows_max:
            return InvalidRequest("slots", f"{rows} rows are more than step_rows_max = {self.step_rows_max}")
        if len(step.tokens) > self.step_tokens_max:
            problem = f"{len(step.tokens)} tokens are more than step_tokens_max = {self.step_tokens_max}"
            return InvalidRequest("tokens", problem)
        if rows and (step.counts.min() < 1 or int(step.counts.sum(dtype=np.int64)) != len(step.tokens)):
            return InvalidRequest("counts", f"must be at least 1 each and {len(step.tokens)} together")
        if len(step.copies) % 3:
            return InvalidRequest("copies", f"holds {len(step.copies)} numbers, not triples")
        if split_history(step) is None:
            return InvalidRequest("history", f"its {len(step.history)} tokens are not what `begins` says")
        return None

    def _begin(
        self, begins: tuple[RowStart, ...], histories: Histories | None, errors: dict[int, KvforgeError]
    ) -> None:
        assert histories is not None, "a malformed step begins nothing"
        for start, history in zip(begins, histories, strict=True):
            problem: KvforgeError | None = problem_of(start, history, self.slots_max, self.model.vocab_size)
            if problem is None:
                try:
                    self._state.begin(start, *history)
                except Exception as error:  # noqa: BLE001 - no memory for its penalties: the other rows go on
                    problem = as_worker_error(error, "starting a row", self.model.device)
            if problem is not None:
                errors[start.slot] = self._refused[start.slot] = problem
            else:
                self._refused.pop(start.slot, None)
                self._has_sampled[start.slot] = False
        self._state.upload_starts()

    def _check(
        self, rows: _Rows, copies: npt.NDArray[np.int32], errors: dict[int, KvforgeError]
    ) -> tuple[npt.NDArray[np.bool_], npt.NDArray[np.int32]]:
        """Rows that may run and copies that may be made; the others get their error."""
        bad_copy = self._bad_copies(copies)
        bad_targets = set(copies[bad_copy, 1].tolist())
        keep = np.ones(len(rows.slots), np.bool_)
        names, times = np.unique(rows.slots, return_counts=True)
        repeated = set(names[times > 1].tolist())
        ends = np.cumsum(rows.counts)
        for row, slot in enumerate(rows.slots.tolist()):
            problem: KvforgeError | None = errors.get(slot) or self._refused.get(slot)
            if problem is None and slot in repeated:
                problem = InvalidRequest("slots", f"slot {slot} is named twice in one step")
            if problem is None:
                tokens = rows.tokens[ends[row] - rows.counts[row] : ends[row]]
                problem = self._row_problem(rows, row, slot, tokens, bad_targets)
            if problem is not None:
                errors[slot] = problem
                keep[row] = False
        return keep, copies[~bad_copy]

    def _row_problem(
        self, rows: _Rows, row: int, slot: int, tokens: Int32Array, bad_targets: set[int]
    ) -> KvforgeError | None:
        start, end = int(rows.starts[row]), int(rows.starts[row]) + int(rows.counts[row])
        width, block_size = rows.tables.shape[1], self.pool.block_size
        if not 0 <= slot < self.slots_max:
            return InvalidRequest("slots", f"slot {slot} is not below slots_max = {self.slots_max}")
        if start < 0:
            return InvalidRequest("starts", f"{start} is not a position")
        if end > width * block_size:
            return InvalidRequest("tables", f"{width} blocks of {block_size} are fewer than the row's {end} tokens")
        if end > self.model.info.context_tokens_max:
            return InvalidRequest("starts", f"{end} tokens exceed the context of {self.model.info.context_tokens_max}")
        if rows.samples[row] not in (0, 1):
            return InvalidRequest("samples", f"{rows.samples[row]} is neither 0 nor 1")
        if tokens.min() < NO_TOKEN or tokens.max() >= self.model.vocab_size:
            worst = int(tokens.min() if tokens.min() < NO_TOKEN else tokens.max())
            return InvalidRequest("tokens", f"token id {worst} is not below the vocabulary of {self.model.vocab_size}")
        if tokens.min() == NO_TOKEN and not self._has_sampled[slot]:
            return InvalidRequest("tokens", f"-1 stands for the token sampled last, and slot {slot} has sampled none")
        blocks = rows.tables[row, : -(-end // block_size)]
        if blocks.min() < 0 or blocks.max() >= self.pool.blocks:
            worst = int(blocks.min() if blocks.min() < 0 else blocks.max())
            return InvalidRequest("tables", f"block {worst} is not one of the pool's {self.pool.blocks}")
        if bad_targets and not bad_targets.isdisjoint(blocks.tolist()):
            return InvalidRequest("copies", "a block of this row was to be copied from or to an impossible place")
        return None

    def _bad_copies(self, copies: npt.NDArray[np.int32]) -> npt.NDArray[np.bool_]:
        blocks, tokens = copies[:, :2], copies[:, 2]
        bad = ((blocks < 0) | (blocks >= self.pool.blocks)).any(axis=1)
        return np.asarray(bad | (tokens < 0) | (tokens > self.pool.block_size))

    # -------------------------------------------------------------------------------------------------------- running

    def _run_rows(
        self,
        rows: _Rows,
        outcome: list[_Sampled],
        errors: dict[int, KvforgeError],
    ) -> None:
        """Runs the rows together; if that fails, one by one, so that only the faulty ones fail."""
        try:
            logits, sampled = self._forward(rows)
        except Exception as error:  # noqa: BLE001 - any failure of foreign model code must spare the other rows
            if len(rows.slots) == 1:
                errors[int(rows.slots[0])] = _row_failure(error, self.model)
                return
            for row in range(len(rows.slots)):
                self._run_rows(rows.pick(np.arange(len(rows.slots)) == row), outcome, errors)
            return
        if len(sampled):
            outcome.append(self._sample(logits, sampled, errors))

    def _forward(self, rows: _Rows) -> tuple[torch.Tensor, Int32Array]:
        """Logits [sampled, vocab] float32 device, and the slots [sampled] int32 host they belong to."""
        device = self.model.device
        batch = PagedBatch.build(rows.tables, rows.starts, rows.counts, self.pool.block_size, device)
        tokens = device.upload(rows.tokens.astype(np.int64))
        if (rows.tokens == NO_TOKEN).any():
            owners = device.upload(np.repeat(rows.slots, rows.counts).astype(np.int64))
            tokens = torch.where(tokens == NO_TOKEN, self._state.last_token[owners], tokens)
        positions = np.arange(batch.tokens) - np.repeat(batch.query_starts[:-1] - batch.starts, batch.counts)
        samples = rows.samples == 1
        last = device.upload(batch.query_starts[1:][samples] - 1)
        logits = self.model.forward(tokens, device.upload(positions), last, batch, self.pool)
        return logits, rows.slots[samples]

    def _sample(self, logits: torch.Tensor, slots: Int32Array, errors: dict[int, KvforgeError]) -> _Sampled:
        chosen = self._state.sample(logits, slots).to_host()
        for slot in slots[chosen.banned].tolist():
            errors[slot] = InvalidRequest("sampling.logit_bias", "bans every token of the vocabulary")
        for slot in slots[~chosen.finite].tolist():
            errors[slot] = WorkerError("the model gave logits that are not finite")
        self._has_sampled[slots[chosen.finite & ~chosen.banned]] = True
        return slots, chosen


_Sampled = tuple[Int32Array, HostRows]


def _row_failure(error: Exception, model: LoadedModel) -> KvforgeError:
    return error if isinstance(error, KvforgeError) else as_worker_error(error, "the forward pass", model.device)


def _joined(
    outcome: list[_Sampled], order: dict[int, int], errors: tuple[RowError, ...], duration_us: int
) -> StepOutcome:
    """The parts as one, in row order, without the rows that failed."""
    if not outcome:
        return StepOutcome(NO_INT32, NO_INT32, NO_FLOAT32, errors, duration_us, NO_INT32, NO_INT32, NO_FLOAT32)
    slots = np.concatenate([part for part, _ in outcome])
    rows = HostRows.joined([rows for _, rows in outcome])
    by_row = np.argsort([order[int(slot)] for slot in slots], kind="stable")
    by_row = by_row[(rows.finite & ~rows.banned)[by_row]]
    tops = rows.tops_of(by_row)
    return StepOutcome(slots[by_row], rows.tokens[by_row], rows.logprobs[by_row], errors, duration_us, *tops)
