"""A worker's configuration: one frozen structure, validated once."""

from __future__ import annotations

import os
from pathlib import Path

import msgspec

from kvforge.protocol import choices, logs
from kvforge.protocol.configuration import expand, load
from kvforge.protocol.errors import InvalidConfiguration
from kvforge.protocol.network import Proof, host_and_port, proof_for
from kvforge.protocol.transport import default_runtime_dir, worker_endpoint
from kvforge.text.grammar_helper import TrialLimits

ATTENTIONS = ("auto", "triton", "reference")
KERNELS = ("auto", "reference")
GRAPHS = ("auto", "on", "off")
BATCH_INVARIANT, FAST = DETERMINISMS = ("batch-invariant", "fast")
# Where nothing is said: half a gibibyte on a CPU, whose memory others use too; of a GPU, which is ours, so much of what
# is free, less what steps and graphs were seen to take. The rest is for what no trial shows.
CPU_KV_BYTES = 512 << 20
GPU_FREE_SHARE = 0.96
WATCH_US, WATCH_CORES_MIN = 200, 4
RANKS_MAX = 64
GRAMMAR_MEMORY_MIN = 16 << 20
COLLECTIVES = ("auto", "gloo", "nccl")


class WorkerConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Everything a worker can be told.

    name: unique among the coordinator's workers. runtime_dir: where the coordinator's sockets are.
    endpoint: `tcp://HOST:PORT` of a coordinator that is reached over a network, "": the socket in runtime_dir. The
    coordinator's shared tables must be here too, at the same path (a container that mounts its folder). server_key: the
    coordinator's public key then. key_file: this worker's own keys then.
    model: a path or a known name. load_format: auto, gguf, safetensors, or dummy: random weights.
    device: auto (a GPU where there is one), cpu, cuda or hip. device_index: which of the GPUs.
    dtype: of weights and activations: auto (as the model says), float32, float16 or bfloat16. kv_dtype: of the KV
    cache: as dtype, int8 or fp8.
    kv_bytes, blocks, memory_share: the size of the KV pool; at most one may be set, and 0 means not set. Without any,
    the pool takes all the memory of a GPU that steps leave free, or half a GiB on a CPU. memory_share: the part of a
    GPU's memory, 0 to 1, that the worker takes altogether: weights, steps, graphs and pool.
    threads: CPU threads of torch; 0: its share of the cores. coordinator_wait_s: how long to wait for a coordinator.
    watch_us: for how long after a message to look for the next step in shared memory before sleeping (0: not at all,
    -1: 200 where there are 4 cores or more).
    weight_dtype: what weights are multiplied as on a CPU: as `dtype` says, in int8 or int4, or (auto) as a quantised
    GGUF file has them.
    attention: the kernels, the plain-torch reference, or (auto) the fastest that the device can run. kernels: auto, or
    reference: attention, layers, sampling and copies all in plain torch, and no kernel of Triton's anywhere.
    determinism: batch-invariant: a request's tokens and log-probabilities do not depend on what is computed beside it;
    fast: they may, in their last bits. `kvforge health` says whether it holds for the model.
    graphs: whether decode steps are captured; auto: on a GPU. graph_rows_max: of batches of up to so many rows.
    grammar_s, grammar_memory_bytes: seconds of a core and bytes of memory that a grammar may take to compile and to
    begin an answer by, in another process, before it is used; more is refused. grammars_waiting_max: how many may wait
    there.
    ranks: processes that compute the model together, each with a part of it (tensor parallel); all have one name.
    rank: which of them this is, from 0 on. collectives: by what they exchange numbers: nccl (RCCL on AMD, where each
    has a GPU of its own), gloo (through the host's memory), or auto: on GPUs nccl, and where that gives the same bits
    through each other's memory, which is faster.
    context_tokens_max: the longest sequence, prompt and answer; 0: what the model is said to have. More than that is
    possible only as far as its rotary embedding is scaled for it.
    seed: of random weights. log_level: debug, info, warning or error. log_format: text, or json: one document a line.
    """

    name: str
    model: str
    runtime_dir: str = ""
    endpoint: str = ""
    server_key: str = ""
    key_file: str = ""
    load_format: str = "auto"
    device: str = "auto"
    device_index: int = 0
    dtype: str = "auto"
    weight_dtype: str = "dtype"
    kv_dtype: str = "auto"
    kv_bytes: int = 0
    blocks: int = 0
    memory_share: float = 0.0
    attention: str = "auto"
    kernels: str = "auto"
    determinism: str = BATCH_INVARIANT
    graphs: str = "auto"
    graph_rows_max: int = 512
    threads: int = 0
    seed: int = 0
    context_tokens_max: int = 0
    ranks: int = 1
    rank: int = 0
    collectives: str = "auto"
    coordinator_wait_s: float = 60.0
    grammar_s: float = 1.0
    grammar_memory_bytes: int = 512 << 20
    grammars_waiting_max: int = 32
    watch_us: int = -1
    log_level: str = "info"
    log_format: str = "text"

    def __post_init__(self) -> None:
        if not 0 < len(self.name) <= 64 or not self.name.isprintable() or " " in self.name:
            raise InvalidConfiguration("name", "1 to 64 printable characters without spaces")
        if self.endpoint:
            host_and_port(self.endpoint, "endpoint")
        if not self.model:
            raise InvalidConfiguration("model", "is required: a path, or a name that `kvforge pull` knows")
        logs.check(self.log_level, self.log_format)
        named = {"attention": ATTENTIONS, "kernels": KERNELS, "determinism": DETERMINISMS, "graphs": GRAPHS}
        named["weight_dtype"] = choices.WEIGHT_DTYPES
        named["collectives"] = COLLECTIVES
        for field, known in named.items():
            if getattr(self, field) not in known:
                raise InvalidConfiguration(field, f"must be one of {', '.join(known)}")
        if (self.attention, self.kernels) == ("triton", "reference"):
            raise InvalidConfiguration("attention", "kernels = 'reference' leaves out Triton's; use attention = 'auto'")
        if self.graph_rows_max < 1:
            raise InvalidConfiguration("graph_rows_max", f"must be 1 or more, not {self.graph_rows_max}")
        for field in ("kv_bytes", "blocks", "threads", "device_index", "seed", "context_tokens_max"):
            if getattr(self, field) < 0:
                raise InvalidConfiguration(field, f"must be 0 or more, not {getattr(self, field)}")
        if not 1 <= self.ranks <= RANKS_MAX:
            raise InvalidConfiguration("ranks", f"must be 1 to {RANKS_MAX}, not {self.ranks}")
        if not 0 <= self.rank < self.ranks:
            raise InvalidConfiguration("rank", f"must be 0 to {self.ranks - 1} where ranks is {self.ranks}")
        if self.watch_us < -1:
            raise InvalidConfiguration("watch_us", f"must be -1 (choose) or more, not {self.watch_us}")
        if not 0 <= self.memory_share <= 1:
            raise InvalidConfiguration("memory_share", f"must be 0 to 1, not {self.memory_share:g}")
        given = [name for name in ("kv_bytes", "blocks", "memory_share") if getattr(self, name)]
        if len(given) > 1:
            raise InvalidConfiguration(given[0], f"give either {given[0]} or {given[1]}, not both")
        if self.memory_share and self.device == "cpu":
            raise InvalidConfiguration("memory_share", "is of a GPU's memory; for a CPU use kv_bytes")
        if not 0 < self.grammar_s <= 60:
            problem = f"must be more than 0 and at most 60 seconds, not {self.grammar_s:g}"
            raise InvalidConfiguration("grammar_s", problem)
        if self.grammar_memory_bytes < GRAMMAR_MEMORY_MIN:
            problem = f"must be {GRAMMAR_MEMORY_MIN} bytes or more, not {self.grammar_memory_bytes}"
            raise InvalidConfiguration("grammar_memory_bytes", problem)
        if not 1 <= self.grammars_waiting_max <= 10_000:
            raise InvalidConfiguration("grammars_waiting_max", f"must be 1 to 10000, not {self.grammars_waiting_max}")
        if not 0 < self.coordinator_wait_s <= 86_400:
            raise InvalidConfiguration("coordinator_wait_s", "must be more than 0 and at most 86400 seconds")

    @property
    def grammar_trials(self) -> TrialLimits:
        """Limits of the process that tries grammars."""
        return TrialLimits(self.grammar_s, self.grammar_memory_bytes, self.grammars_waiting_max)

    @property
    def watched_us(self) -> int:
        """`watch_us`, chosen."""
        if self.watch_us >= 0:
            return self.watch_us
        return WATCH_US if len(os.sched_getaffinity(0)) >= WATCH_CORES_MIN else 0

    def coordinator(self) -> tuple[str, Proof | None]:
        """Where the coordinator is, and what it lets this worker in for. Raises InvalidConfiguration."""
        endpoint = self.endpoint or worker_endpoint(self.runtime_path)
        return endpoint, proof_for(endpoint, self.server_key, expand(self.key_file) if self.key_file else None)

    @property
    def runtime_path(self) -> Path:
        """Folder of the coordinator's sockets."""
        return expand(self.runtime_dir) if self.runtime_dir else default_runtime_dir().absolute()


def load_config(path: Path) -> WorkerConfig:
    """Reads a TOML file. Raises InvalidConfiguration."""
    return load(path, WorkerConfig)
