"""Device memory by purpose, and the size of the KV pool: what is left after weights, graphs and the largest step.

What a step and the graphs take is not guessed but tried: with a pool of just the blocks of the trial, the largest step
that the coordinator may send is run, and the two largest decode graphs are captured; a KV pool then gets the rest.
"""

from __future__ import annotations

import logging
from dataclasses import dataclass
from itertools import chain

import numpy as np

from kvforge.protocol.errors import GpuError, InvalidConfiguration, KernelError
from kvforge.protocol.messages import RowStart, Sampling, Step, WorkerWelcome
from kvforge.text.grammar_helper import TrialLimits
from worker.attention.pool import KvPool
from worker.config import CPU_KV_BYTES, GPU_FREE_SHARE, WorkerConfig
from worker.device.device import Device
from worker.kernels.packed import stored_bytes
from worker.loading.model import LoadedModel

from .graphs import bucket_sizes
from .runner import Runner

MIB = 1 << 20
log = logging.getLogger("worker")


@dataclass(frozen=True)
class DeviceBytes:
    """What this worker's device memory is for, in bytes. total, free: of the whole device, as its driver says.

    weights: the model. pool: K and V. graphs: captured graphs with their places, and the sampler's state. other: what
    steps work in (kept by torch's allocator for the next one), compiled kernels, the driver's own. On a CPU, whose
    memory everyone shares, graphs and other are not counted: 0.
    """

    weights: int
    pool: int
    graphs: int
    other: int
    free: int
    total: int

    def by_purpose(self) -> dict[str, int]:
        """What is held, in bytes by purpose, without what is 0: for WorkerReady."""
        held = {"weights": self.weights, "pool": self.pool, "graphs": self.graphs, "other": self.other}
        return {purpose: size for purpose, size in held.items() if size}

    def line(self) -> str:
        """For the log."""
        parts = {"weights": self.weights, "graphs": self.graphs, "KV pool": self.pool, "other": self.other}
        held = ", ".join(f"{name} {size / MIB:.0f} MiB" for name, size in parts.items())
        return f"device memory: {held}; {self.free / MIB:.0f} of {self.total / MIB:.0f} MiB free"


class Accounts:
    """Notes what each purpose took as it takes it."""

    def __init__(self, device: Device) -> None:
        """Call it before anything is on the device."""
        self._device = device
        self._free_at_first = device.free_bytes()
        self.weights = self.graphs = 0

    def report(self, pool: KvPool) -> DeviceBytes:
        """As it is now."""
        free = self._device.free_bytes()
        # What all other processes of the machine took meanwhile would count as ours on a CPU.
        taken = self._free_at_first - free if self._device.owns_memory else 0
        other = max(0, taken - self.weights - self.graphs - pool.bytes)
        return DeviceBytes(self.weights, pool.bytes, self.graphs, other, free, self._device.total_bytes())


def weight_bytes(model: LoadedModel) -> int:
    """Bytes of the model's parameters and buffers, each once however many layers share it, and of packed weights."""
    tensors = chain(model.module.parameters(), model.module.buffers())
    plain = sum({tensor.data_ptr(): tensor.nbytes for tensor in tensors}.values())
    return plain + sum(map(stored_bytes, model.packed_weights()))


def check_kv_bytes(config: WorkerConfig, device: Device) -> None:
    """Refuse a KV pool that is larger than all memory there is, before a model is loaded.

    Raises:
        InvalidConfiguration: Names `kv_bytes` and the device's memory.
    """
    total = device.total_bytes()
    if config.kv_bytes > total:
        problem = f"{config.kv_bytes} is more than all {total} bytes of memory of {device.name}"
        raise InvalidConfiguration("kv_bytes", f"{problem}: give less, or leave it out")


def pool_blocks(config: WorkerConfig, model: LoadedModel, welcome: WorkerWelcome, graph_rows_max: int) -> int:
    """Blocks of the pool: as configured, else what fits. Errors: InvalidConfiguration, GpuError, KernelError."""
    device = model.device
    if config.blocks:
        needed, total = config.blocks * model.geometry.bytes_per_block, device.total_bytes()
        if needed > total:
            problem = f"{config.blocks} blocks of this model take {needed} bytes; {device.name} has {total}"
            raise InvalidConfiguration("blocks", f"{problem}: give fewer, or leave it out")
        return config.blocks
    if config.memory_share and not device.owns_memory:
        raise InvalidConfiguration("memory_share", f"is of a GPU's memory, and {device.name} is a CPU: use kv_bytes")
    if config.kv_bytes or not device.owns_memory:
        return model.geometry.blocks_for(config.kv_bytes or CPU_KV_BYTES)
    needed = _trial_bytes(model, welcome, graph_rows_max)
    free = device.free_bytes()
    log.debug("the largest step and the graphs take %d MiB of %d MiB free", needed // MIB, free // MIB)
    usable = int(free * GPU_FREE_SHARE)
    if config.memory_share:
        usable = min(usable, int(device.total_bytes() * config.memory_share) - weight_bytes(model))
    left = usable - needed
    if left < model.geometry.bytes_per_block:
        share = f" (memory_share = {config.memory_share:g} leaves {max(0, usable)})" if config.memory_share else ""
        raise GpuError(
            f"{device.name} has {free} bytes free{share}; steps and graphs need {needed}, which leaves none for K and V"
        )
    return model.geometry.blocks_for(left)


def _trial_bytes(model: LoadedModel, welcome: WorkerWelcome, graph_rows_max: int) -> int:
    """Bytes that the largest step and all graphs will take beside the pool. Errors: GpuError, KernelError."""
    device, block_size = model.device, model.geometry.block_size
    row_tokens = min(
        welcome.step_tokens_max, model.info.context_tokens_max, welcome.blocks_per_sequence_max * block_size
    )
    rows_max = min(welcome.step_rows_max, welcome.slots_max)
    # As many rows as may be sampled, one of them with all the rest of the tokens.
    long_row = max(1, min(row_tokens, welcome.step_tokens_max - rows_max + 1))
    counts = np.ones(min(rows_max, welcome.step_tokens_max), np.int32)
    counts[0] = long_row
    width = -(-long_row // block_size)
    tables = np.zeros((len(counts), width), np.int32)
    tables[0] = np.arange(width)
    tables[1:, 0] = width
    free_before = device.free_bytes()
    pool = KvPool(model.geometry, width + 1, device)
    try:
        with device.errors("trying the largest step"):
            runner = make_runner(model, pool, welcome, graph_rows_max)
            outcome = runner.run(_largest_step(counts), tables)
            for error in outcome.errors[:1]:
                kind = KernelError if error.error.code == KernelError.code else GpuError
                raise kind(f"the largest step, {counts.sum()} tokens in {len(counts)} rows: {error.error.message}")
            device.synchronize()
            step_bytes = free_before - device.free_bytes()
            graph_bytes = _graph_bytes(runner, graph_rows_max) if runner.graphs is not None else 0
            runner.close()
            del runner
    finally:
        pool.close()
    return step_bytes + graph_bytes


def _graph_bytes(runner: Runner, rows_max: int) -> int:
    """Bytes of all graphs: of the largest, and of each further one as much as the second takes beyond it."""
    assert runner.graphs is not None
    device = runner.model.device
    took = []
    sizes = bucket_sizes(min(rows_max, runner.limits.step_rows_max))
    for size in sizes[::-1][:2]:
        before = device.free_bytes()
        runner.graphs.capture_one(size)
        took.append(before - device.free_bytes())
    return took[0] + sum(took[1:]) * (len(sizes) - 1)


def _largest_step(counts: np.ndarray[tuple[int], np.dtype[np.int32]]) -> Step:
    """Every row is sampled in the way that takes the most memory."""
    rows = len(counts)
    sampling = Sampling(temperature=1.0, top_p=0.9)
    return Step(
        step_id=0,
        begins=tuple(RowStart(slot=slot, request_id=0, sampling=sampling, seed=slot) for slot in range(rows)),
        slots=np.arange(rows, dtype=np.int32),
        starts=np.zeros(rows, np.int32),
        counts=counts,
        samples=np.ones(rows, np.int32),
        tokens=np.zeros(int(counts.sum()), np.int32),
    )


def make_runner(
    model: LoadedModel, pool: KvPool, welcome: WorkerWelcome, graph_rows_max: int, trials: TrialLimits | None = None
) -> Runner:
    """A runner within the coordinator's limits. Errors: InvalidConfiguration, GpuError."""
    with model.device.errors("making room for steps"):
        return Runner(
            model,
            pool,
            slots_max=welcome.slots_max,
            step_tokens_max=welcome.step_tokens_max,
            step_rows_max=welcome.step_rows_max,
            table_width=welcome.blocks_per_sequence_max,
            graph_rows_max=graph_rows_max,
            trials=trials,
        )
