"""Device memory by purpose, and the size of the KV pool: the memory left by weights, graphs and the largest step.

The memory that a step and the graphs need is measured: with a pool just large enough for the trial, the worker runs
the largest step that the coordinator may send and captures the two largest graphs of each kind. The KV pool gets the
rest.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import TypeVar

import numpy as np

from kvforge.protocol.errors import GpuError, InvalidConfiguration, KernelError, ProtocolError
from kvforge.protocol.messages import TOP_LOGPROBS_MAX, RowStart, SamplingParams, Step, WorkerWelcome
from kvforge.text.grammar_helper import TrialLimits
from kvforge.worker.attention.pool import KvPool
from kvforge.worker.attention.windows import WindowLimits, WindowTables
from kvforge.worker.config import CPU_KV_BYTES, GPU_FREE_SHARE, WorkerConfig
from kvforge.worker.device.device import Device
from kvforge.worker.loading.model import LoadedModel
from kvforge.worker.loading.weight_bytes import weight_bytes

from .graphs import bucket_sizes
from .host_transfers import buffer_bytes
from .runner import ModelRunner

MIB = 1 << 20
# Without a setting, states behind drafted tokens take at most one part in so many of the pool's memory, and there are
# at most this many: four requests with eight drafts, or sixteen with two.
DRAFT_STATES_PART, DRAFT_STATES_MAX = 32, 32
Size = TypeVar("Size")
log = logging.getLogger("worker")


@dataclass(frozen=True)
class DeviceBytes:
    """Use of the device's memory by this worker, in bytes.

    Attributes:
        weights: The model.
        pool: K and V.
        draft_states: Recurrent states behind drafted tokens.
        graphs: Captured graphs with their inputs, and the sampling state. 0 on a CPU, which other processes share.
        other: Workspaces of steps (cached by torch's allocator), compiled kernels, the driver's own. 0 on a CPU.
        free: Free memory of the whole device, as the driver reports it.
        total: Memory of the whole device.
    """

    weights: int
    pool: int
    graphs: int
    other: int
    free: int
    total: int
    draft_states: int = 0

    def by_purpose(self) -> dict[str, int]:
        """Return the bytes in use by purpose, without zeros, for WorkerReady."""
        held = {"weights": self.weights, "pool": self.pool, "graphs": self.graphs, "other": self.other}
        held["draft_states"] = self.draft_states
        return {purpose: size for purpose, size in held.items() if size}

    def line(self) -> str:
        """Return a line for the log."""
        parts = {"weights": self.weights, "graphs": self.graphs, "KV pool": self.pool, "other": self.other}
        if self.draft_states:
            parts["states of drafts"] = self.draft_states
        held = ", ".join(f"{name} {size / MIB:.0f} MiB" for name, size in parts.items())
        return f"device memory: {held}; {self.free / MIB:.0f} of {self.total / MIB:.0f} MiB free"


class MemoryAccounts:
    """Records how much memory each purpose takes."""

    def __init__(self, device: Device) -> None:
        """Record the free memory. Call it before anything is on the device."""
        self._device = device
        self._free_at_first = device.free_bytes()
        self.weights = self.graphs = 0

    def report(self, pool: KvPool) -> DeviceBytes:
        """Return the current use of the device's memory."""
        free = self._device.free_bytes()
        # On a CPU, memory taken by other processes would count as ours.
        taken = self._free_at_first - free if self._device.owns_memory else 0
        other = max(0, taken - self.weights - self.graphs - pool.bytes)
        states = pool.geometry.draft_state_bytes
        held = self.weights, pool.bytes - states, self.graphs, other
        return DeviceBytes(*held, free, self._device.total_bytes(), states)


def check_kv_bytes(config: WorkerConfig, device: Device) -> None:
    """Refuse a KV pool that is larger than all memory there is, before a model is loaded.

    Raises:
        InvalidConfiguration: Names `kv_bytes` and the device's memory.
    """
    total = device.total_bytes()
    if config.kv_bytes > total:
        problem = f"{config.kv_bytes} is more than all {total} bytes of memory of {device.name}"
        raise InvalidConfiguration("kv_bytes", f"{problem}: give less, or leave it out")


def check_drafts(config: WorkerConfig, welcome: WorkerWelcome) -> None:
    """Refuse a draft model where no step verifies drafts: it would take memory and time for nothing.

    Raises:
        InvalidConfiguration: Names `draft_model`.
    """
    if config.draft_model and not welcome.drafts_max:
        problem = f"{config.draft_model!r}, but the coordinator's schedule.drafts_max is 0: set it to 16, the default"
        raise InvalidConfiguration("draft_model", f"{problem}, or leave draft_model out")


def check_states(model: LoadedModel, welcome: WorkerWelcome) -> None:
    """Refuse a model with more blocks beside a sequence's block table than the coordinator's tables have.

    These hold a recurrent state, and a ring of window pages.

    Raises:
        InvalidConfiguration: Names `limits.state_blocks_max`.
        ProtocolError: The pool was made for a coordinator that knows windows, and this one does not.
    """
    geometry, most = model.geometry, welcome.state_blocks_max
    if geometry.window and not welcome.window_ahead:
        raise ProtocolError("the coordinator knows no windows, and this worker's pool has some: restart the worker")
    needed = geometry.state_blocks + ring_blocks(model, welcome) * geometry.window_pages
    if needed > most:
        if most:
            remedy = "raise it, or the coordinator's cache.block_size"
        else:
            remedy = "the coordinator is of a version without recurrent states: update it"
        kept = "recurrent state" if not geometry.window else "ring of windows"
        problem = f"{most}, and the {kept} of a sequence of {model.info.name} takes {needed} blocks"
        raise InvalidConfiguration("limits.state_blocks_max", f"is {problem}: {remedy}")


def with_draft_states(model: LoadedModel, config: WorkerConfig, welcome: WorkerWelcome) -> LoadedModel:
    """Return the model with room for the states behind the drafted tokens of a step.

    Args:
        model: The model. One without recurrent states needs none.
        config: The worker's configuration.
        welcome: The coordinator's limits.
    """
    geometry, rows_max = model.geometry, min(welcome.step_rows_max, welcome.slots_max)
    if not geometry.states or not welcome.drafts_max:
        return model
    each = geometry.state_blocks * geometry.bytes_per_block
    count = min(config.draft_states or DRAFT_STATES_MAX, rows_max - 1)
    if not config.draft_states:
        count = min(count, _pool_bytes_at_most(config, model) // DRAFT_STATES_PART // each)
    if count < 1:
        log.warning("drafts: none, because a recurrent state takes %d MiB; set draft_states to have some", each // MIB)
        return model
    log.info("drafts: at most %d tokens of a step, with %d MiB of recurrent states", count, count * each // MIB)
    return replace(model, geometry=replace(geometry, draft_states=count))


def _pool_bytes_at_most(config: WorkerConfig, model: LoadedModel) -> int:
    """Return the bytes that the pool takes as configured, or all that are free for it."""
    if config.blocks:
        return config.blocks * model.geometry.bytes_per_block
    if config.kv_bytes or not model.device.owns_memory:
        return config.kv_bytes or CPU_KV_BYTES
    if config.memory_share:
        return max(0, int(model.device.total_bytes() * config.memory_share) - weight_bytes(model))
    return model.device.free_bytes()


def window_limits(welcome: WorkerWelcome) -> WindowLimits | None:
    """Return the coordinator's limits of windows; None: it knows none."""
    if not welcome.window_ahead:
        return None
    return WindowLimits(welcome.window_ahead, welcome.blocks_per_sequence_max, welcome.state_blocks_max)


def ring_blocks(model: LoadedModel, welcome: WorkerWelcome) -> int:
    """Return the blocks of a sequence's ring of window pages; 0: no layer keeps a window."""
    limits, geometry = window_limits(welcome), model.geometry
    return limits.ring_blocks(geometry.window, geometry.block_size) if limits is not None and geometry.window else 0


def pool_blocks(config: WorkerConfig, model: LoadedModel, welcome: WorkerWelcome, graph_rows_max: int) -> int:
    """Return the number of blocks of the pool: as configured, or as many as fit.

    Args:
        config: The worker's configuration.
        model: The loaded model.
        welcome: The coordinator's limits.
        graph_rows_max: Rows of the largest decode graph; 0: no graphs.

    Raises:
        InvalidConfiguration: The configured size does not fit the device.
        GpuError: No memory is left for K and V.
        KernelError: A kernel failed in the trial step.
    """
    device = model.device
    if config.blocks:
        needed, total = config.blocks * model.geometry.bytes_per_block, device.total_bytes()
        if needed > total:
            problem = f"{config.blocks} blocks of this model take {needed} bytes; {device.name} has {total}"
            raise InvalidConfiguration("blocks", f"{problem}: give fewer, or leave it out")
        return config.blocks
    if config.memory_share and not device.owns_memory:
        problem = f"only applies to GPUs, and {device.name} is a CPU: set kv_bytes instead"
        raise InvalidConfiguration("memory_share", problem)
    if config.kv_bytes or not device.owns_memory:
        return model.geometry.blocks_for(config.kv_bytes or CPU_KV_BYTES)
    needed = _trial_bytes(model, welcome, graph_rows_max)
    if config.host_bytes:
        needed += buffer_bytes(device, model.geometry.bytes_per_block)
    free = device.free_bytes()
    log.debug("the largest step and the graphs take %d MiB of %d MiB free", needed // MIB, free // MIB)
    usable = int(free * GPU_FREE_SHARE)
    if config.memory_share:
        usable = min(usable, int(device.total_bytes() * config.memory_share) - weight_bytes(model))
    left = usable - needed
    if left < model.geometry.bytes_per_block:
        share = f" (memory_share = {config.memory_share:g} leaves {max(0, usable)})" if config.memory_share else ""
        raise GpuError(
            f"{device.name} has {free} bytes free{share}; steps and graphs need {needed}, leaving no KV pool: "
            "lower schedule.step_tokens_max or schedule.step_rows_max, or give the weights fewer bits (weight_dtype)"
        )
    return model.geometry.blocks_for(left)


def _trial_bytes(model: LoadedModel, welcome: WorkerWelcome, graph_rows_max: int) -> int:
    """Return the bytes that the largest step and all graphs take beside the pool.

    Raises:
        GpuError: There is not enough memory.
        KernelError: A kernel failed.
    """
    device, block_size = model.device, model.geometry.block_size
    row_tokens = min(
        welcome.step_tokens_max, model.info.context_tokens_max, welcome.blocks_per_sequence_max * block_size
    )
    rows_max = min(welcome.step_rows_max, welcome.slots_max)
    # As many rows as may be sampled, one with all the remaining tokens.
    long_row = max(1, min(row_tokens, welcome.step_tokens_max - rows_max + 1))
    counts = np.ones(min(rows_max, welcome.step_tokens_max), np.int32)
    counts[0] = long_row
    width = -(-long_row // block_size)
    pages = model.geometry.state_blocks  # all rows share them: their contents do not matter
    states = np.tile(np.arange(width + 1, width + 1 + pages, dtype=np.int32), (len(counts), 1)) if pages else None
    tables = np.zeros((len(counts), width), np.int32)
    tables[0] = np.arange(width)
    tables[1:, 0] = width
    free_before = device.free_bytes()
    windows, needed = _trial_windows(model, counts, width + 1 + pages)
    pool = KvPool(model.geometry, needed, device)
    try:
        with device.errors("trying the largest step"):
            runner = make_runner(model, pool, welcome, graph_rows_max)
            outcome = runner.run(_largest_step(counts), tables, states, windows)
            for error in outcome.errors[:1]:
                kind = KernelError if error.error.code == KernelError.code else GpuError
                raise kind(f"the largest step, {counts.sum()} tokens in {len(counts)} rows: {error.error.message}")
            device.synchronize()
            step_bytes = free_before - device.free_bytes() - model.geometry.draft_state_bytes  # `blocks_for` adds these
            graph_bytes = _graph_bytes(runner, graph_rows_max) if runner.graphs is not None else 0
            runner.close()
            del runner
    finally:
        pool.close()
    return step_bytes + graph_bytes


def _trial_windows(
    model: LoadedModel, counts: np.ndarray[tuple[int], np.dtype[np.int32]], used: int
) -> tuple[WindowTables | None, int]:
    """Return the window pages of rows at their beginning, from page `used` on, and the pages of the pool.

    The first row has pages of its own, and all others have common ones: their contents do not matter.
    """
    pages, size = model.geometry.window_pages, model.geometry.block_size
    if not pages:
        return None, used
    width = -(-int(counts[0]) // size)
    tables = np.zeros((len(counts), width, pages), np.int32)
    tables[0] = np.arange(used, used + width * pages, dtype=np.int32).reshape(width, pages)
    tables[1:, 0] = np.arange(used + width * pages, used + (width + 1) * pages, dtype=np.int32)
    return WindowTables(np.zeros(len(counts), np.int64), tables), used + (width + 1) * pages


def _graph_bytes(runner: ModelRunner, rows_max: int) -> int:
    """Estimate the bytes of all graphs."""
    assert runner.graphs is not None
    device = runner.model.device
    needed = _bytes_of(device, bucket_sizes(min(rows_max, runner.limits.step_rows_max)), runner.graphs.capture_one)
    if runner.prompt_graphs is not None:
        needed += _bytes_of(device, runner.prompt_graphs.sizes, runner.prompt_graphs.capture_one)
    if runner.draft_graphs is not None:
        needed += _bytes_of(device, runner.draft_graphs.sizes, runner.draft_graphs.capture_one)
    return needed


def _bytes_of(device: Device, sizes: Sequence[Size], capture: Callable[[Size], bool]) -> int:
    """Estimate the bytes of graphs of one kind: the largest, plus what the second added for each further one."""
    took = []
    for size in sizes[::-1][:2]:
        before = device.free_bytes()
        capture(size)
        took.append(before - device.free_bytes())
    return took[0] + sum(took[1:]) * (len(sizes) - 1)


def _largest_step(counts: np.ndarray[tuple[int], np.dtype[np.int32]]) -> Step:
    """Build a full step in which every row samples in the way that takes the most memory."""
    rows = len(counts)
    sampling = SamplingParams(temperature=1.0, top_p=0.9, prompt_logprobs=TOP_LOGPROBS_MAX)
    scored = np.arange(int(counts[0]) - 1, dtype=np.int32)
    return Step(
        step_id=0,
        begins=tuple(RowStart(slot=slot, request_id=0, sampling=sampling, seed=slot) for slot in range(rows)),
        slots=np.arange(rows, dtype=np.int32),
        starts=np.zeros(rows, np.int32),
        counts=counts,
        samples=np.ones(rows, np.int32),
        tokens=np.zeros(int(counts.sum()), np.int32),
        scored=scored,
        following=np.zeros_like(scored),
    )


def make_runner(
    model: LoadedModel, pool: KvPool, welcome: WorkerWelcome, graph_rows_max: int, trials: TrialLimits | None = None
) -> ModelRunner:
    """Make a runner within the coordinator's limits.

    Raises:
        InvalidConfiguration: A limit is invalid.
        GpuError: There is not enough memory.
    """
    with model.device.errors("making room for steps"):
        return ModelRunner(
            model,
            pool,
            slots_max=welcome.slots_max,
            step_tokens_max=welcome.step_tokens_max,
            step_rows_max=welcome.step_rows_max,
            table_width=welcome.blocks_per_sequence_max,
            graph_rows_max=graph_rows_max,
            trials=trials,
            drafts_max=welcome.drafts_max,
            draft_rows_max=welcome.draft_rows_max,
        )
