"""A coordinator and a worker as processes in a temporary folder, by default with a tiny random model."""

from __future__ import annotations

import json
import shutil
import signal
import tempfile
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from time import monotonic
from types import TracebackType
from typing import Any, Self

from kvforge import AsyncClient, CoordinatorUnavailable, DeadlineExceeded
from kvforge.launch.child import Child
from kvforge.launch.settings import Value, toml
from kvforge.protocol.errors import Unavailable
from kvforge.protocol.transport import client_endpoint

BLOCK_SIZE = 16
VOCABULARY = 256
READY_S, STOP_S = 120.0, 5.0
CONFIG = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "vocab_size": VOCABULARY,
    "bos_token_id": 1,
    "eos_token_id": 2,
}


class Installation:
    """A coordinator and a worker with a model of random weights. The end of the `with` block stops the processes and
    removes the folder."""

    def __init__(
        self,
        *,
        context_tokens: int,
        blocks: int,
        schedule: dict[str, float],
        sequences: int = 16,
        worker: Mapping[str, Value] | None = None,
        limits: Mapping[str, Value] | None = None,
        more: Callable[[Path], Mapping[str, Mapping[str, Any]]] | None = None,
        ranks: int = 1,
        groups: int = 1,
        worker_command: Sequence[str] = ("kvforge.worker",),
    ) -> None:
        """context_tokens: the longest sequence; blocks: size of the pool; schedule, limits: settings of those sections.
        Without a setting there are no drafts. more: other sections of the coordinator's, for an installation in a
        folder.

        worker: settings of the worker in place of the tiny model's on a CPU; `blocks` is then the most it may have.
        ranks: processes of a worker, each on a device of its own where there are GPUs. groups: workers of so many
        ranks. worker_command: the module of a worker, and the arguments before its own.
        """
        self.folder = Path(tempfile.mkdtemp(prefix="kvf-bench-"))
        self.runtime = self.folder / "r"
        self.endpoint = client_endpoint(self.runtime)
        width = -(-context_tokens // BLOCK_SIZE)
        model, temporary = self.folder / "model", self.folder / "tmp"
        model.mkdir()
        temporary.mkdir()
        (model / "config.json").write_text(json.dumps(CONFIG | {"max_position_embeddings": width * BLOCK_SIZE}))
        sizes: dict[str, Value] = {"blocks_per_sequence_max": width, "sequences_max": sequences, "blocks_max": blocks}
        tables: dict[str, Mapping[str, Any]] = {
            "limits": sizes | dict(limits or {}),
            "cache": {"block_size": BLOCK_SIZE},
            # Answers of dummy weights repeat themselves, and drafts of them would hide what a step takes.
            "schedule": {"drafts_max": 0} | schedule,
        }
        tables |= more(self.folder) if more is not None else {}
        runtime = str(self.runtime)
        coordinator = toml({"runtime_dir": runtime, "drain_s": 0.0}, tables)
        tiny: dict[str, Value] = {
            "model": str(model),
            "device": "cpu",
            "dtype": "float32",
            "threads": 1,
            "blocks": blocks,
        }
        settings: Mapping[str, Value] = tiny if worker is None else worker
        place: dict[str, Value] = {"runtime_dir": runtime, "load_format": "dummy"}
        self.children = [self._child(("kvforge.coordinator",), "coordinator", coordinator, temporary)]
        for number in range(groups * ranks):
            group, rank = divmod(number, ranks)
            own: dict[str, Value] = {"name": f"w{group}"}
            if ranks > 1:
                own |= {"ranks": ranks, "rank": rank}
            if groups * ranks > 1 and settings.get("device") != "cpu":
                own["device_index"] = number
            file = toml({**place, **settings, **own}, {})
            self.children.append(self._child(worker_command, f"worker{number or ''}", file, temporary))

    def _child(self, command: Sequence[str], name: str, config: str, temporary: Path) -> Child:
        file = self.folder / f"{name}.toml"
        file.write_text(config, encoding="utf-8")
        # The child ends with this process, even if this process is killed.
        return Child(name, ["-m", *command, "--config", str(file)], temporary, print, self.folder / f"{name}.log")

    def log_of(self, name: str) -> str:
        """Return the log so far of the named process ("coordinator", "worker", other ranks and workers "worker1")."""
        path = self.folder / f"{name}.log"
        return path.read_text(encoding="utf-8", errors="replace") if path.exists() else ""

    def __enter__(self) -> Self:
        try:
            for child in self.children:
                child.start()
        except BaseException:
            self._end()
            raise
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self._end()

    def _end(self) -> None:
        for number in (signal.SIGTERM, signal.SIGKILL):
            for child in reversed(self.children):
                child.send(number)
            for child in reversed(self.children):
                child.wait(monotonic() + STOP_S)
        shutil.rmtree(self.folder, ignore_errors=True)

    async def wait_ready(self, kv: AsyncClient) -> None:
        """Wait until the worker is ready. Raises Unavailable with the last output line if a process has exited."""
        deadline = monotonic() + READY_S
        while True:
            try:
                await kv.wait_ready(1.0)
                return
            except (CoordinatorUnavailable, DeadlineExceeded):
                for child in self.children:
                    if child.ended() is not None:
                        raise Unavailable(f"{child.name} exited: {child.last_words()}") from None
                if monotonic() > deadline:
                    raise
