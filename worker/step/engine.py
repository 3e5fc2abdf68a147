"""The engine: everything a worker holds on its device, namely the model, the KV pool, and the runner with its graphs.

The model and the pool are made once, for the first coordinator. A runner is made for each set of limits.
"""

from __future__ import annotations

import contextlib
import hashlib
import logging
import time
from functools import partial
from typing import Any

import torch

from kvforge.models.store import default_cache_dir
from kvforge.protocol.errors import ProtocolError
from kvforge.protocol.messages import WorkerWelcome
from kvforge.worker.attention.pool import KvPool
from kvforge.worker.config import CAPTURE_IDLE, FAST, WorkerConfig
from kvforge.worker.cores import Cores
from kvforge.worker.device.compilation import CompilationMeter
from kvforge.worker.device.device import Device, open_device
from kvforge.worker.device.ranks import Ranks
from kvforge.worker.kernels.sharing import share_memory
from kvforge.worker.loading import Progress
from kvforge.worker.loading.draft_model import join_draft_model, join_head
from kvforge.worker.loading.eagle_heads import is_eagle_head, load_eagle_head
from kvforge.worker.loading.heads import DraftHead
from kvforge.worker.loading.load import load_model
from kvforge.worker.loading.model import LoadedModel
from kvforge.worker.loading.mtp_heads import load_mtp_head
from kvforge.worker.loading.serving_kernels import serving_kernels
from kvforge.worker.loading.weight_bytes import weight_bytes
from kvforge.worker.model_path import MTP, find_draft_model, find_model

from .disk_opening import disk_layout, open_disk_tier
from .graphs import CAPTURE_S
from .host_opening import HostAhead, begin_host_tier, open_host_tier
from .memory import (
    DeviceBytes,
    MemoryAccounts,
    check_drafts,
    check_kv_bytes,
    check_states,
    make_runner,
    pool_blocks,
    ring_blocks,
    window_limits,
    with_draft_states,
)
from .prompt_graphs import START_S
from .runner import ModelRunner

log = logging.getLogger("worker")


class Engine:
    """The worker's model, KV pool and runner, made once when the first coordinator has sent its limits.

    Attributes:
        config: The worker's configuration.
        device: The device.
        ranks: The group of ranks; None for one.
        model: The model.
        pool: Its KV pool.
        host: Copies blocks from and to the host file; None without one.
        runner: Runs the steps of the present coordinator.
        ring_blocks: Blocks of a sequence's ring of window pages; 0: no layer keeps a window.
    """

    def __init__(
        self,
        config: WorkerConfig,
        welcome: WorkerWelcome,
        progress: Progress,
        cores: Cores | None = None,
        meeting: str = "",
    ) -> None:
        """Load the model and allocate the pool.

        Args:
            config: The worker's configuration.
            welcome: The coordinator's limits.
            progress: Called with each phase and its fraction.
            cores: This worker's cores and threads.
            meeting: Name of the rendezvous of several ranks.

        Raises:
            KvforgeError: As raised by load_model, KvPool and ModelRunner.
            WorkerError: A rank did not arrive.
        """
        if cores is not None or config.threads:
            torch.set_num_threads(config.threads if cores is None else cores.threads)
        self.config, self._cores = config, cores
        progress("opening the device", 0.0)
        self.device: Device = open_device(
            config.device, config.device_index, config.kernels != "reference", config.determinism != FAST
        )
        compilation = CompilationMeter()
        if self.device.runs_kernels and log.isEnabledFor(logging.DEBUG):
            compilation.listen()
            progress = _noting(progress, compilation)
        check_kv_bytes(config, self.device)
        check_drafts(config, welcome)
        self._accounts = MemoryAccounts(self.device)
        self._progress = progress
        ahead = begin_host_tier(config, self.device)
        try:
            self._build(welcome, meeting, ahead)
        finally:
            if ahead is not None:
                ahead.end()
        if self.host is not None:
            self.host.lock_next()  # a file that cannot be page-locked is noticed at the start
        progress("preparing grammars", 1.0)
        # Otherwise steps would stall for a second when the first grammar arrives.
        problem = self.runner.shaping.grammars.prepare()
        if problem:
            log.info("grammars are disabled: %s", problem)
        log.debug("released %d MB of libraries that only loading needed", self.device.release_libraries() // 1_000_000)

    def _build(self, welcome: WorkerWelcome, meeting: str, ahead: HostAhead | None) -> None:
        """Load the model, and make the pool, its lower tiers and the runner."""
        config, progress = self.config, self._progress
        self.ranks = self._meet(meeting)
        self.model: LoadedModel = self._load(welcome)
        check_states(self.model, welcome)
        self.device.release_cached()
        self.model = with_draft_states(self.model, config, welcome)
        self._accounts.weights = weight_bytes(self.model)
        if self.ranks is not None:
            progress("sharing memory with the other ranks", 1.0)
            rows_max = min(welcome.step_rows_max, welcome.slots_max)
            with self.device.errors("sharing memory with the other ranks"):
                share_memory(self.ranks, self.model.fused, welcome.step_tokens_max, rows_max)
        progress("trying the largest step", 1.0)
        blocks = pool_blocks(config, self.model, welcome, self._graph_rows)
        progress("making the KV pool", 1.0)
        self.pool = KvPool(self.model.geometry, blocks, self.device)
        info = self.model.info
        log.info("%s in %s, weights in %s, on %s", info.name, info.dtype, info.weight_dtype, self.device.name)
        log.debug("%d blocks, %d bytes of KV in %s", blocks, self.pool.bytes, self.model.geometry.kv_dtype)
        self.host = open_host_tier(config, self.model, self.pool, ahead)
        layout = disk_layout(config, self.model)  # of all ranks, with a disk tier or not: each waits for the others
        self.disk = open_disk_tier(config, layout, self.pool, self.host) if self.host is not None else None
        for what, kernel in self.kernels().items():
            log.debug("kernels: %s by %s", what, kernel)  # `kvforge health` lists them
        self.runner: ModelRunner = self._make_runner(welcome)
        self._limits, self.ring_blocks = _limits(welcome), ring_blocks(self.model, welcome)

    def adopt(self, welcome: WorkerWelcome) -> None:
        """Serve another coordinator: forget every slot, and make a new runner if the limits changed.

        Raises:
            ProtocolError: The coordinator's block size differs from the pool's.
            InvalidConfiguration: There is a draft model, and the coordinator verifies no drafts.
            KvforgeError: As raised by ModelRunner.
        """
        if self.model.geometry.block_size != welcome.block_size:
            raise ProtocolError(
                f"the coordinator's block size is {welcome.block_size}, but this worker's pool was made for "
                f"{self.model.geometry.block_size}: restart the worker"
            )
        check_drafts(self.config, welcome)
        check_states(self.model, welcome)
        self.ring_blocks = ring_blocks(self.model, welcome)
        if _limits(welcome) == self._limits:
            self.runner.reset()
        else:
            self.runner.close()
            self.runner = self._make_runner(welcome)
            self._limits = _limits(welcome)

    def release_idle_memory(self) -> None:
        """Release cached memory on a CPU after a period without steps, because other processes share that memory.

        It takes 4 ms. A GPU's memory belongs to this worker alone, and releasing it would delay steps.
        """
        if self.device.computes_on_cores:
            self.device.release_cached()

    def use_idle_time(self) -> bool:
        """Do one piece of work that was left for idle time; return whether there is more.

        It page-locks a piece of the host file, or captures a graph.
        """
        if self.host is not None and self.host.lock_next():
            return True
        graphs = self.runner.graphs
        if graphs is None or self.ranks is not None:
            return False
        free_before = self.device.free_bytes()
        prompts = self.runner.prompt_graphs
        more = (prompts is not None and prompts.capture_missing()) or graphs.capture_missing()
        if self.device.owns_memory:
            self._accounts.graphs += max(0, free_before - self.device.free_bytes())
        return more

    def kernels(self) -> dict[str, str]:
        """Describe the kernels in use, by purpose, for people."""
        kernels = serving_kernels(self.model)
        if self.model.draft is not None:
            info, beside = self.model.draft.info, self.model.geometry.beside
            stored = beside.bytes_per_block if beside is not None else 0
            text = f"lookup, and {info.name} in {info.dtype}, weights in {info.weight_dtype}"
            kernels["drafts"] = f"{text}; {stored} bytes of each block"
        if self.host is not None and self.host.placement:
            kernels["host file"] = self.host.placement
        if self.disk is not None:
            kernels["disk tier"] = self.disk.how
        if self._cores is not None and self.device.computes_on_cores:
            kernels["threads"] = self._cores.describe()
        return kernels

    def device_bytes(self) -> DeviceBytes:
        """Return the current use of the device's memory by purpose."""
        return self._accounts.report(self.pool)

    def close(self) -> None:
        """Release all memory except the weights.

        Nothing is released on a lost device. With several ranks that capture graphs, this rank may be waiting for one
        that has ended: the end of the process releases the memory.
        """
        if self.disk is not None:
            self.disk.close()
        if self.ranks is None or not self.ranks.capturable:
            with contextlib.suppress(RuntimeError):
                self.runner.close()
                self.pool.close()
                if self.host is not None:
                    self.host.close()
        if self.ranks is not None:
            self.ranks.close()

    def _load(self, welcome: WorkerWelcome) -> LoadedModel:
        """Load the model, and the draft model if there is one."""
        config = self.config
        shared: dict[str, Any] = {
            "load_format": config.load_format,
            "dtype": config.dtype,
            "weight_dtype": config.weight_dtype,
            "device": self.device,
            "block_size": welcome.block_size,
            "kv_dtype": config.kv_dtype,
            "attention": config.attention,
            "seed": config.seed,
        }
        model = load_model(
            find_model(config),
            **shared,
            progress=self._progress,
            state_dtype=config.state_dtype,
            context_tokens_max=config.context_tokens_max,
            ranks=self.ranks,
            expert_parallel=config.expert_parallel,
            windows=window_limits(welcome),
        )
        if not config.draft_model:
            return model
        if config.draft_model == MTP:
            source = find_model(config)
            settings = shared | {"kv_dtype": "auto", "context_tokens_max": config.context_tokens_max}
            load = partial(load_model, source, **settings, progress=self._draft_progress, mtp=True)
            head = load_mtp_head(source, model, config.load_format, config.seed, load)
            return self._joined(model, head)
        draft_source = find_draft_model(config)
        if is_eagle_head(draft_source, config.load_format):
            self._progress("draft model: loading an EAGLE-3 head", 1.0)
            eagle = load_eagle_head(draft_source, model, config.load_format, config.attention, config.seed)
            return self._joined(model, eagle)
        # Its layers keep all tokens: a block of theirs is a block of the layers without a window.
        draft = load_model(
            draft_source,
            **shared,
            progress=self._draft_progress,
        )
        log.info("draft model: %s in %s, weights in %s", draft.info.name, draft.info.dtype, draft.info.weight_dtype)
        return join_draft_model(model, draft)

    def _joined(self, model: LoadedModel, head: DraftHead) -> LoadedModel:
        log.info("drafts: %s in %s, weights in %s", head.info.name, head.info.dtype, head.info.weight_dtype)
        return join_head(model, head)

    def _draft_progress(self, phase: str, fraction: float) -> None:
        self._progress(f"draft model: {phase}", fraction)

    def _meet(self, meeting: str) -> Ranks | None:
        """Return the process group once all ranks have joined.

        Raises:
            WorkerError: A rank did not arrive.
            InvalidConfiguration: The collectives cannot be used here.
        """
        config = self.config
        if config.ranks == 1:
            return None
        ranks = Ranks(config.rank, config.ranks, self.device, config.collectives)
        self._progress("meeting the other ranks", 0.0)
        # In the user's own cache folder: the coordinator owns the runtime folder, and systemd forbids others to write
        # there.
        folder = default_cache_dir() / "meetings"
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        ours = hashlib.sha256(f"{config.runtime_path}\n{config.name}".encode()).hexdigest()[:16]
        place = folder / f"{ours}-{meeting}"
        for left in folder.glob(f"{ours}-*") if config.rank == 0 else ():
            if left != place:  # left by killed ranks; other ranks may already wait at `place`
                left.unlink(missing_ok=True)
        ranks.meet(place)
        return ranks

    @property
    def _graph_rows(self) -> int:
        if self.ranks is not None and not self.ranks.capturable:
            return 0
        wanted = self.config.graphs == "on" or (self.config.graphs == "auto" and self.device.gains_from_graphs)
        return self.config.graph_rows_max if wanted else 0

    def _make_runner(self, welcome: WorkerWelcome) -> ModelRunner:
        free_before, started = self.device.free_bytes(), time.monotonic()
        runner = make_runner(self.model, self.pool, welcome, self._graph_rows, self.config.grammar_trials)
        if runner.graphs is not None:
            self._progress("capturing graphs", 1.0)
            runner.graphs.capture(few=self.config.graph_capture == CAPTURE_IDLE)
            captured = runner.graphs.captured
            if runner.prompt_graphs is not None:
                runner.prompt_graphs.capture(START_S if self.config.graph_capture == CAPTURE_IDLE else CAPTURE_S)
                captured += runner.prompt_graphs.captured
            if runner.draft_graphs is not None:
                runner.draft_graphs.capture()
                captured += len(runner.draft_graphs.sizes)
            log.debug("%d graphs captured in %.1f s", captured, time.monotonic() - started)
        runner.host = self.host
        self._accounts.graphs = max(0, free_before - self.device.free_bytes()) if self.device.owns_memory else 0
        log.info("%s", self.device_bytes().line())
        return runner


def _noting(progress: Progress, compilation: CompilationMeter) -> Progress:
    """Log the compilation of kernels at each report of progress."""

    def report(phase: str, fraction: float) -> None:
        log.debug("%s: %s so far", phase, compilation.line())
        progress(phase, fraction)

    return report


def _limits(welcome: WorkerWelcome) -> tuple[int, ...]:
    """Return the limits that a runner depends on."""
    sizes = (welcome.slots_max, welcome.step_tokens_max, welcome.step_rows_max, welcome.blocks_per_sequence_max)
    return (*sizes, welcome.drafts_max, welcome.draft_rows_max)
