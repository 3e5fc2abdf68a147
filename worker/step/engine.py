"""What a worker holds on its device: the model, the KV pool, and the runner with its graphs.

The model is loaded and the pool made once, for the first coordinator; a runner is made for each set of limits.
"""

from __future__ import annotations

import contextlib
import hashlib
import logging
import time

import torch

from kvforge.models.store import default_cache_dir
from kvforge.protocol.errors import ProtocolError
from kvforge.protocol.messages import WorkerWelcome
from worker.attention.pool import KvPool
from worker.config import FAST, WorkerConfig
from worker.cores import Cores
from worker.device.device import Device, open_device
from worker.device.ranks import Ranks
from worker.kernels.sharing import share_memory
from worker.loading import Progress
from worker.loading.load import load_model
from worker.loading.model import LoadedModel
from worker.loading.serving_kernels import serving_kernels
from worker.model_path import find_model

from .memory import Accounts, DeviceBytes, check_kv_bytes, make_runner, pool_blocks, weight_bytes
from .runner import Runner

log = logging.getLogger("worker")


class Engine:
    """Made once in a worker's life, when the first coordinator has said its limits."""

    def __init__(
        self,
        config: WorkerConfig,
        welcome: WorkerWelcome,
        progress: Progress,
        cores: Cores | None = None,
        meeting: str = "",
    ) -> None:
        """Loads the model and makes the pool; `progress` is told. meeting: the name under which several ranks meet.
        Errors: those of load_model, KvPool and Runner, WorkerError where a rank does not come."""
        if cores is not None or config.threads:
            torch.set_num_threads(config.threads if cores is None else cores.threads)
        self.config, self._cores = config, cores
        self.device: Device = open_device(
            config.device, config.device_index, config.kernels != "reference", config.determinism != FAST
        )
        check_kv_bytes(config, self.device)
        self._accounts = Accounts(self.device)
        self._progress = progress
        self.ranks = self._meet(meeting)
        self.model: LoadedModel = load_model(
            find_model(config),
            load_format=config.load_format,
            dtype=config.dtype,
            weight_dtype=config.weight_dtype,
            device=self.device,
            block_size=welcome.block_size,
            kv_dtype=config.kv_dtype,
            attention=config.attention,
            progress=progress,
            seed=config.seed,
            context_tokens_max=config.context_tokens_max,
            ranks=self.ranks,
        )
        self.device.release_cached()
        self._accounts.weights = weight_bytes(self.model)
        if self.ranks is not None:
            progress("sharing memory with the other ranks", 1.0)
            rows_max = min(welcome.step_rows_max, welcome.slots_max)
            with self.device.errors("sharing memory with the other ranks"):
                share_memory(self.ranks, self.model.fused, self.device, welcome.step_tokens_max, rows_max)
        progress("making the KV pool", 1.0)
        blocks = pool_blocks(config, self.model, welcome, self._graph_rows)
        self.pool = KvPool(self.model.geometry, blocks, self.device)
        info = self.model.info
        log.info("%s in %s, weights in %s, on %s", info.name, info.dtype, info.weight_dtype, self.device.name)
        log.debug("%d blocks, %d bytes of KV in %s", blocks, self.pool.bytes, self.model.geometry.kv_dtype)
        for what, kernel in self.kernels().items():
            log.debug("kernels: %s by %s", what, kernel)  # `kvforge health` lists them
        self.runner: Runner = self._make_runner(welcome)
        self._limits = _limits(welcome)
        # Steps would stand still for a second when the first grammar comes.
        problem = self.runner.shaping.grammars.prepare()
        if problem:
            log.info("no grammar can be served: %s", problem)
        log.debug("%d MB of libraries were needed by loading alone", self.device.release_libraries() // 1_000_000)

    def adopt(self, welcome: WorkerWelcome) -> None:
        """Another coordinator is in charge: no slot means anything any more. Errors: ProtocolError, those of Runner."""
        if self.model.geometry.block_size != welcome.block_size:
            raise ProtocolError(
                f"the coordinator's block size is now {welcome.block_size}, this worker's pool was made for "
                f"{self.model.geometry.block_size}: restart the worker"
            )
        if _limits(welcome) == self._limits:
            self.runner.reset()
        else:
            self.runner.close()
            self.runner = self._make_runner(welcome)
            self._limits = _limits(welcome)

    def rest(self) -> None:
        """No step has come for a while: on a CPU, what steps worked in goes back to the machine, which others use too.

        It takes 4 ms. A GPU's is nobody else's, and its steps would wait for it.
        """
        if self.device.computes_on_cores:
            self.device.release_cached()

    def kernels(self) -> dict[str, str]:
        """Which kernels serve, by what they do: for people."""
        told = serving_kernels(self.model)
        if self._cores is not None and self.device.computes_on_cores:
            told["threads"] = self._cores.describe()
        return told

    def device_bytes(self) -> DeviceBytes:
        """What the device's memory is for, now."""
        return self._accounts.report(self.pool)

    def close(self) -> None:
        """Gives all memory but the weights' back. A device that is lost gives nothing; nor does that of one of several
        ranks, which may be waiting for another one that has ended: the process's end does."""
        if self.ranks is None or not self.ranks.capturable:
            with contextlib.suppress(RuntimeError):
                self.runner.close()
                self.pool.close()
        if self.ranks is not None:
            self.ranks.close()

    def _meet(self, meeting: str) -> Ranks | None:
        """The other processes of the group, once all are here. Errors: WorkerError, InvalidConfiguration."""
        config = self.config
        if config.ranks == 1:
            return None
        ranks = Ranks(config.rank, config.ranks, self.device, config.collectives)
        self._progress("meeting the other ranks", 0.0)
        # Of the user's own: the runtime folder is the coordinator's, and under systemd nobody else writes there.
        folder = default_cache_dir() / "meetings"
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        ours = hashlib.sha256(f"{config.runtime_path}\n{config.name}".encode()).hexdigest()[:16]
        place = folder / f"{ours}-{meeting}"
        for left in folder.glob(f"{ours}-*") if config.rank == 0 else ():
            if left != place:  # of ranks that were killed; the others may be at this one already
                left.unlink(missing_ok=True)
        ranks.meet(place)
        return ranks

    @property
    def _graph_rows(self) -> int:
        if self.ranks is not None and not self.ranks.capturable:
            return 0
        wanted = self.config.graphs == "on" or (self.config.graphs == "auto" and self.device.gains_from_graphs)
        return self.config.graph_rows_max if wanted else 0

    def _make_runner(self, welcome: WorkerWelcome) -> Runner:
        free_before, started = self.device.free_bytes(), time.monotonic()
        runner = make_runner(self.model, self.pool, welcome, self._graph_rows, self.config.grammar_trials)
        if runner.graphs is not None:
            self._progress("capturing decode graphs", 1.0)
            runner.graphs.capture()
            log.info("%d decode graphs captured in %.1f s", runner.graphs.captured, time.monotonic() - started)
        self._accounts.graphs = max(0, free_before - self.device.free_bytes()) if self.device.owns_memory else 0
        log.info("%s", self.device_bytes().line())
        return runner


def _limits(welcome: WorkerWelcome) -> tuple[int, ...]:
    """What a runner is made for."""
    return (welcome.slots_max, welcome.step_tokens_max, welcome.step_rows_max, welcome.blocks_per_sequence_max)
