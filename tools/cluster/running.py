"""`kvforge up` and `kvforge demo` as processes, with deadlines and checks of leftovers."""

from __future__ import annotations

import json
import os
import select
import signal
import subprocess
import sys
from contextlib import suppress
from pathlib import Path
from time import monotonic
from types import TracebackType
from typing import Any, Self

from kvforge.process.leash import leashed

from .fork_server import Child, fork_server

DEADLINE_S = 240.0
CONFIG = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 256,
    "max_position_embeddings": 2048,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
# Changes of CONFIG, by family. LFM2 and Qwen3.5 have recurrent states beside attention; in Mamba 2 no layer attends.
FAMILIES: dict[str, dict[str, Any]] = {
    "llama": {},
    "lfm2": {
        "architectures": ["Lfm2ForCausalLM"],
        "model_type": "lfm2",
        "num_hidden_layers": 3,
        "layer_types": ["conv", "full_attention", "conv"],
    },
    "qwen3_5": {
        "architectures": ["Qwen3_5ForCausalLM"],
        "model_type": "qwen3_5_text",
        "head_dim": 16,
        "layer_types": ["linear_attention", "full_attention"],
        "linear_num_value_heads": 4,
        "linear_num_key_heads": 2,
        "linear_key_head_dim": 8,
        "linear_value_head_dim": 8,
    },
    "mamba2": {
        "architectures": ["Mamba2ForCausalLM"],
        "model_type": "mamba2",
        "num_heads": 8,
        "head_dim": 16,
        "n_groups": 2,
        "state_size": 8,
        "chunk_size": 16,
    },
}


def tiny_model(folder: Path, family: str = "llama") -> Path:
    """Write a folder with the configuration of a tiny model for random weights.

    Args:
        folder: Where to make the folder `model`.
        family: A name in FAMILIES.

    Returns:
        The new folder.
    """
    model = folder / "model"
    model.mkdir()
    (model / "config.json").write_text(json.dumps(CONFIG | FAMILIES[family]))
    return model


class Process:
    """A `kvforge` command. Both outputs are merged; `expect` waits for words in them."""

    def __init__(self, *arguments: str, forked: bool = False, **environment: str) -> None:
        """forked: by the fork server, which then forks the workers of `kvforge up` too."""
        self._output, output = os.pipe()
        everything = {**os.environ, **environment}
        self.process: subprocess.Popen[bytes] | Child
        try:
            if forked:
                log = Path(f"/proc/{os.getpid()}/fd/{output}")
                self.process = fork_server().start([*arguments], log, everything, "tools.cluster.forked_up")
            else:
                self.process = subprocess.Popen(
                    leashed([sys.executable, "-m", "kvforge", *arguments]),
                    stdin=subprocess.DEVNULL,
                    stdout=output,
                    stderr=output,
                    env=everything,
                )
        finally:
            os.close(output)
        self.text = ""
        self._from = 0

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        if self.process.poll() is None:
            self.process.terminate()
            with suppress(subprocess.TimeoutExpired):
                self.process.wait(20)
        self.process.kill()
        self.process.wait(10)
        os.close(self._output)

    def expect(self, *words: str) -> None:
        """Wait until each of the words has been printed, after the previously expected ones."""
        deadline = monotonic() + DEADLINE_S
        for word in words:
            while (at := self.text.find(word, self._from)) < 0:
                assert self._read(deadline), f"it ended without {word!r}:\n{self.text}"
            self._from = at + len(word)

    def expect_anywhere(self, *words: str) -> None:
        """Wait until each of the words has been printed, in any order: lines of several processes have none."""
        deadline = monotonic() + DEADLINE_S
        for word in words:
            while word not in self.text:
                assert self._read(deadline), f"it ended without {word!r}:\n{self.text}"

    def signal(self, number: signal.Signals) -> None:
        """Send a signal to the process."""
        self.process.send_signal(number)

    def end(self) -> int:
        """Waits for the end; returns the exit status."""
        deadline = monotonic() + DEADLINE_S
        while self._read(deadline):
            continue
        return self.process.wait(DEADLINE_S)

    def _read(self, deadline: float) -> bool:
        ready = select.select([self._output], [], [], max(0.0, deadline - monotonic()))[0]
        assert ready, f"nothing came within {DEADLINE_S} s:\n{self.text}"
        chunk = os.read(self._output, 1 << 16)
        self.text += chunk.decode(errors="replace")
        return bool(chunk)


def processes_of(folder: Path) -> dict[int, str]:
    """Return the processes with a folder in their command line, by id."""
    found = {}
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit() and int(entry.name) != os.getpid():
            with suppress(OSError):
                line = (entry / "cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace")
                if str(folder) in line:
                    found[int(entry.name)] = line
    return found


def wait_gone(*pids: int) -> None:
    """Waits until processes, which need not be children, have ended."""
    deadline = monotonic() + DEADLINE_S
    for pid in pids:
        try:
            descriptor = os.pidfd_open(pid)
        except ProcessLookupError:
            continue
        try:
            assert select.select([descriptor], [], [], max(0.0, deadline - monotonic()))[0], f"{pid} still runs"
        finally:
            os.close(descriptor)
