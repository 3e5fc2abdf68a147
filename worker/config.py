"""Worker configuration: one frozen structure, validated once."""

from __future__ import annotations

import os
from pathlib import Path

import msgspec

from kvforge.protocol import choices, logs
from kvforge.protocol.configuration import expand, load
from kvforge.protocol.errors import InvalidConfiguration
from kvforge.protocol.network import CurveCredentials, credentials_for, host_and_port
from kvforge.protocol.transport import default_runtime_dir, worker_endpoint
from kvforge.text.grammar_helper import TrialLimits

ATTENTIONS = ("auto", "triton", "reference")
KERNELS = ("auto", "reference")
GRAPHS = ("auto", "on", "off")
CAPTURE_IDLE, CAPTURE_START = GRAPH_CAPTURES = ("idle", "start")
BATCH_INVARIANT, FAST = DETERMINISMS = ("batch-invariant", "fast")
# Default pool sizes. A CPU's memory is shared with other processes: half a GiB. A GPU belongs to this worker: a share
# of its free memory, less what the trial of steps and graphs took. The remainder covers what no trial shows.
CPU_KV_BYTES = 512 << 20
GPU_FREE_SHARE = 0.96
WATCH_US, WATCH_CORES_MIN = 200, 4
RANKS_MAX = 64
GRAMMAR_MEMORY_MIN = 16 << 20
COLLECTIVES = ("auto", "gloo", "nccl")


class WorkerConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Settings of one worker process.

    Attributes:
        name: Unique among the coordinator's workers. All ranks of one worker share it.
        model: A path, or the name of a fetched model.
        draft_model: The same of a draft model: a small model with the same vocabulary, which drafts the next tokens.
            mtp: the multi-token prediction module of the model's own checkpoint. The folder of an EAGLE-3 head is
            recognised (see docs/drafts.md). It needs `schedule.drafts_max` of the coordinator. "": none.
        runtime_dir: Folder of the coordinator's sockets.
        endpoint: `tcp://HOST:PORT` for a coordinator behind a network; "" for the socket in `runtime_dir`.
            The coordinator's shared tables must be visible at the same path (for a container: mount their folder).
        server_key: The coordinator's public key, for a network endpoint.
        key_file: This worker's own key pair, for a network endpoint.
        load_format: auto, gguf, safetensors, or dummy (random weights).
        device: auto (a GPU if there is one), cpu, cuda or hip.
        device_index: Index of the GPU.
        dtype: Dtype of weights and activations: auto (the model's own), float32, float16 or bfloat16.
        weight_dtype: Precision of the multiplied weights: `dtype`, fp8 (on a GPU), int8, int4, or auto (on a CPU: as
            stored in a quantised file).
        kv_dtype: Dtype of the KV cache: auto (same as `dtype`), float32, float16, bfloat16, int8 or fp8.
        state_dtype: Dtype in which recurrent states that layers compute in float32 are kept: float32, bfloat16 or
            float16. 16 bits take half of the memory, and round each token's state.
        draft_states: Most drafted tokens of a step for a model with recurrent states, which keeps a state for each of
            them (see docs/drafts.md). 0: as many as a thirty-second of the KV pool's memory holds, at most 32.
        kv_bytes: Size of the KV pool in bytes. Set at most one of `kv_bytes`, `blocks` and `memory_share`; 0 means
            unset. Without any, the pool takes all GPU memory that steps leave free, or half a GiB on a CPU.
        blocks: Size of the KV pool in blocks.
        host_bytes: Size of the host file in bytes: memory of the host that keeps blocks which the pool evicts, also
            beyond the end of this process (see docs/host-tier.md). 0: none.
        host_dir: Folder of the host file, in memory (tmpfs or hugetlbfs); "": /dev/shm.
        host_huge_pages: Whether a new host file asks for huge pages. False starts faster where the kernel is slow to
            find them (see docs/host-tier.md).
        disk_bytes: Most bytes of the disk tier, which keeps blocks of the host file beyond the end of the host (see
            docs/disk-tier.md), of each rank. It needs `host_bytes` and `disk_dir`. 0: none.
        disk_dir: Folder of the disk tier.
        disk_key_file: File with the key that encrypts the disk tier: 64 hex digits, readable by its owner alone. "": it
            is not encrypted.
        memory_share: Share of a GPU's memory, 0 to 1, for weights, steps, graphs and pool together.
        attention: auto (the fastest that the device runs), triton, or reference (plain torch).
        kernels: auto, or reference: attention, layers, sampling and copies in plain torch, without any Triton kernel.
        determinism: batch-invariant: a request's tokens and log-probabilities do not depend on the rest of the batch;
            fast: they may differ in the last bits. `kvforge health` shows whether the model guarantees it.
        graphs: Whether steps of decodes and few prompt tokens run from captured graphs: on, off, or auto (on a GPU).
        graph_rows_max: Most decodes of a step that runs from a captured graph.
        graph_capture: When graphs are captured: idle (at start those of 1, 2, 4, ... decodes, which hold every batch of
            them, and for a second those of few prompt tokens; the others one by one while the worker is idle or after
            some use), or start (all before it serves, for about two minutes at most).
        threads: CPU threads of torch; 0: this worker's share of the cores.
        seed: Seed of random weights.
        context_tokens_max: Longest sequence (prompt and answer) in tokens; 0: the model's context length. A larger
            value needs a rotary embedding that is scaled for it.
        ranks: Processes that compute the model together (tensor parallelism).
        rank: Index of this process, from 0 to `ranks` - 1.
        expert_parallel: Whether ranks divide the experts of a mixture among them (expert parallelism), so that each has
            some experts as a whole. False: each rank has a part of every expert.
        collectives: Transport between ranks: nccl (RCCL on AMD; one GPU each), gloo (through host memory, without gloo
            where all ranks are on one host), or auto. On GPUs auto is nccl, replaced by direct access to the other
            ranks' memory where it gives the same bits faster.
        coordinator_wait_s: Seconds to wait for a coordinator.
        grammar_s: Core seconds that a grammar may take to compile and to start an answer, tried in a separate process.
            Grammars above this limit are rejected.
        grammar_memory_bytes: Memory limit of the same trial.
        grammars_waiting_max: Most grammars that may wait for their trial.
        watch_us: Microseconds to poll shared memory for the next step after a message before sleeping. 0: never poll;
            -1: 200 on machines with 4 or more cores, else 0.
        log_level: debug, info, warning or error.
        log_format: text, or json (one document per line).
    """

    name: str
    model: str
    draft_model: str = ""
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
    state_dtype: str = "float32"
    draft_states: int = 0
    kv_bytes: int = 0
    blocks: int = 0
    host_bytes: int = 0
    host_dir: str = ""
    host_huge_pages: bool = True
    disk_bytes: int = 0
    disk_dir: str = ""
    disk_key_file: str = ""
    memory_share: float = 0.0
    attention: str = "auto"
    kernels: str = "auto"
    determinism: str = BATCH_INVARIANT
    graphs: str = "auto"
    graph_rows_max: int = 512
    graph_capture: str = CAPTURE_IDLE
    threads: int = 0
    seed: int = 0
    context_tokens_max: int = 0
    ranks: int = 1
    rank: int = 0
    expert_parallel: bool = False
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
            raise InvalidConfiguration("name", "must be 1 to 64 printable characters without spaces")
        if self.endpoint:
            host_and_port(self.endpoint, "endpoint")
        if not self.model:
            raise InvalidConfiguration("model", "is required: a path, or a name that `kvforge pull` knows")
        logs.check(self.log_level, self.log_format)
        named = {"attention": ATTENTIONS, "kernels": KERNELS, "determinism": DETERMINISMS, "graphs": GRAPHS}
        named |= {"weight_dtype": choices.WEIGHT_DTYPES, "state_dtype": choices.STATE_DTYPES}
        named |= {"collectives": COLLECTIVES, "graph_capture": GRAPH_CAPTURES}
        for field, known in named.items():
            if getattr(self, field) not in known:
                raise InvalidConfiguration(field, f"must be one of {', '.join(known)}")
        if (self.attention, self.kernels) == ("triton", "reference"):
            raise InvalidConfiguration("attention", "kernels = 'reference' disables Triton; use attention = 'auto'")
        if self.graph_rows_max < 1:
            raise InvalidConfiguration("graph_rows_max", f"must be 1 or more, not {self.graph_rows_max}")
        sizes = ("kv_bytes", "blocks", "host_bytes", "disk_bytes", "context_tokens_max", "draft_states")
        for field in (*sizes, "threads", "device_index", "seed"):
            if getattr(self, field) < 0:
                raise InvalidConfiguration(field, f"must be 0 or more, not {getattr(self, field)}")
        if not 1 <= self.ranks <= RANKS_MAX:
            raise InvalidConfiguration("ranks", f"must be 1 to {RANKS_MAX}, not {self.ranks}")
        if not 0 <= self.rank < self.ranks:
            raise InvalidConfiguration("rank", f"must be 0 to {self.ranks - 1} where ranks is {self.ranks}")
        if self.expert_parallel and self.ranks == 1:
            problem = "true, but ranks is 1; set ranks (--tensor-parallel) to 2 or more"
            raise InvalidConfiguration("expert_parallel", problem)
        if self.draft_model and self.ranks > 1:
            problem = f"{self.draft_model!r}, but ranks is {self.ranks}: leave it out, or set ranks to 1"
            raise InvalidConfiguration("draft_model", problem)
        if self.disk_bytes and not self.host_bytes:
            problem = f"{self.disk_bytes}, but host_bytes is 0: blocks go to the disk through the host file"
            raise InvalidConfiguration("disk_bytes", problem)
        if self.disk_bytes and not self.disk_dir:
            raise InvalidConfiguration("disk_dir", f"is required where disk_bytes is {self.disk_bytes}: name a folder")
        if self.watch_us < -1:
            raise InvalidConfiguration("watch_us", f"must be -1 (choose) or more, not {self.watch_us}")
        if not 0 <= self.memory_share <= 1:
            raise InvalidConfiguration("memory_share", f"must be 0 to 1, not {self.memory_share:g}")
        given = [name for name in ("kv_bytes", "blocks", "memory_share") if getattr(self, name)]
        if len(given) > 1:
            raise InvalidConfiguration(given[0], f"give either {given[0]} or {given[1]}, not both")
        if self.memory_share and self.device == "cpu":
            raise InvalidConfiguration("memory_share", "only applies to GPUs: set kv_bytes for a CPU")
        if not 0 < self.grammar_s <= 60:
            problem = f"must be more than 0 and at most 60 seconds, not {self.grammar_s:g}"
            raise InvalidConfiguration("grammar_s", problem)
        if self.grammar_memory_bytes < GRAMMAR_MEMORY_MIN:
            problem = f"must be {GRAMMAR_MEMORY_MIN} bytes or more, not {self.grammar_memory_bytes}"
            raise InvalidConfiguration("grammar_memory_bytes", problem)
        if not 1 <= self.grammars_waiting_max <= 10_000:
            raise InvalidConfiguration("grammars_waiting_max", f"must be 1 to 10000, not {self.grammars_waiting_max}")
        if not 0 < self.coordinator_wait_s <= 86_400:
            problem = f"must be more than 0 and at most 86400 seconds, not {self.coordinator_wait_s:g}"
            raise InvalidConfiguration("coordinator_wait_s", problem)

    @property
    def grammar_trials(self) -> TrialLimits:
        """Limits of the process that tries grammars."""
        return TrialLimits(self.grammar_s, self.grammar_memory_bytes, self.grammars_waiting_max)

    @property
    def watched_us(self) -> int:
        """Return `watch_us` with -1 resolved for this machine, in microseconds."""
        if self.watch_us >= 0:
            return self.watch_us
        return WATCH_US if len(os.sched_getaffinity(0)) >= WATCH_CORES_MIN else 0

    def coordinator(self) -> tuple[str, CurveCredentials | None]:
        """Return the coordinator's endpoint and this worker's credentials for it.

        Returns:
            The endpoint, and the key pair to present; None for a local socket.

        Raises:
            InvalidConfiguration: A key is missing or cannot be read.
        """
        endpoint = self.endpoint or worker_endpoint(self.runtime_path)
        return endpoint, credentials_for(endpoint, self.server_key, expand(self.key_file) if self.key_file else None)

    @property
    def runtime_path(self) -> Path:
        """Folder of the coordinator's sockets."""
        return expand(self.runtime_dir) if self.runtime_dir else default_runtime_dir().absolute()


def load_config(path: Path) -> WorkerConfig:
    """Read a TOML file.

    Raises:
        InvalidConfiguration: The file cannot be read, or a value is invalid.
    """
    return load(path, WorkerConfig)
