"""Cost of a decode step in the coordinator: the core alone, and the whole turn with messages and published tables.

    python -m benchmarks.control_plane [--sequences 16 256 1024 4096] [--steps 400] [--rounds 3] [--prompt 48]
        [--json FILE]

Core: apply(step result) and apply(turn) of a machine with N decoding requests, steps of all N rows, one in flight while
the other is applied. Turn: the same through real ZeroMQ sockets in one process: the result is received and decoded, the
step planned, tables published, the next step and every client's stream encoded and sent; without a journal, and with
one in the temporary folder, stored for the process ("process", written after the turn: the time of this is printed
apart) and written through to the disk ("power"). Medians and p99.9 of
many steps; nothing else runs in the process. The garbage collector is frozen as in the coordinator, which collects when
it is idle; the time of such a collection after the measured steps is printed too.
"""

from __future__ import annotations

import argparse
import gc
import select
import statistics
import sys
import tempfile
from pathlib import Path
from time import perf_counter_ns
from typing import Any

import numpy as np
import zmq

from kvforge.coordinator.core.events import Boot, ClientCame, FromClient, FromWorker, ToWorker, Turn
from kvforge.coordinator.core.limits import Bounds, Limits, ScheduleLimits
from kvforge.coordinator.core.machine import Machine
from kvforge.coordinator.host.garbage import TURNS_MIN, GarbageCollector
from kvforge.coordinator.journal.identity import Origin
from kvforge.coordinator.journal.log import Journal
from kvforge.coordinator.journal.unwritten import UnwrittenRecords
from kvforge.coordinator.transport.listener import Endpoint
from kvforge.coordinator.transport.router_socket import RouterSocket
from kvforge.coordinator.turn import TurnLimits, TurnLoop
from kvforge.protocol import codec
from kvforge.protocol.layout import Geometry
from kvforge.protocol.messages import (
    WORKER_REPLIES,
    Hello,
    ModelInfo,
    SamplingParams,
    Step,
    StepResult,
    Submit,
    WorkerHello,
    WorkerReady,
)
from kvforge.protocol.tables import TablesWriter
from kvforge.protocol.transport import dealer

from . import vllm_scheduler
from .report import report

VOCABULARY = 128_000
PROMPT_TOKENS = 48  # fixed for vLLM
BLOCK_SIZE = 16
WARM_STEPS = 40
SHOWN = ("p50_us", "mean_us", "p999_us")
MEASURED = ("core", "turn", "process", "written", "power", "vllm")
MODEL = ModelInfo(
    name="m", source="", architecture="any", fingerprint="1", vocab_size=VOCABULARY, context_tokens_max=1 << 20
)
SAMPLING = SamplingParams(temperature=0.0, seed=1, ignore_eos=True)


def answer(sequences: int, steps: int, prompt: int) -> int:
    """Return the tokens of each request, so that the first still decodes after the last prompt and all measured
    steps."""
    return 4 * steps + sequences * prompt // 4096


def limits(sequences: int, steps: int, prompt: int) -> Limits:
    """Bounds for N sequences that decode for so many steps."""
    width = (prompt + answer(sequences, steps, prompt)) // BLOCK_SIZE + 5
    blocks = sequences * width
    return Limits(
        bounds=Bounds(sequences_max=sequences, blocks_max=blocks, blocks_per_sequence_max=width, queue_max=sequences),
        schedule=ScheduleLimits(step_rows_max=sequences, step_tokens_max=max(8192, 2 * sequences)),
    )


def ready(limits: Limits) -> WorkerReady:
    """Return the announcement of the benchmark's worker."""
    return WorkerReady(
        rid=2, model=MODEL, blocks=limits.bounds.blocks_max, bytes_per_block=1, kv_dtype="float32", device="none"
    )


def submissions(sequences: int, steps: int, prompt: int) -> list[Submit]:
    """N requests that decode to the end of the run; their lengths differ, so that each step fills N / 16 blocks."""
    draw = np.random.default_rng(0)
    return [
        Submit(
            rid=i,
            max_tokens=answer(sequences, steps, prompt),
            sampling=SAMPLING,
            prompt=draw.integers(0, VOCABULARY, prompt + i % BLOCK_SIZE).astype(np.int32),
        )
        for i in range(sequences)
    ]


class Answerer:
    """A worker that answers at once with tokens drawn in advance, outside the measured time."""

    def __init__(self) -> None:
        draw = np.random.default_rng(1)
        self._tokens = draw.integers(0, VOCABULARY, 1 << 16).astype(np.int32)
        self._at = 0

    def answer(self, step: Step, epoch: int) -> StepResult:
        """The result of a step."""
        slots = step.slots[step.samples != 0]
        self._at = (self._at + slots.size) % (self._tokens.size - slots.size)
        tokens = self._tokens[self._at : self._at + slots.size]
        return StepResult(
            step_id=step.step_id, epoch=epoch, slots=slots, tokens=tokens, logprobs=np.zeros(slots.size, np.float32)
        )


def core(sequences: int, steps: int, prompt: int = PROMPT_TOKENS) -> list[float]:
    """Microseconds of each step of the core alone."""
    bounds = limits(sequences, steps, prompt)
    machine, answerer = Machine(Boot("benchmark", b"key", bounds), 0), Answerer()
    machine.apply(ClientCame(2), 0)
    machine.apply(FromWorker(1, WorkerHello(rid=1, name="w", pid=1)), 0)
    machine.apply(FromWorker(1, ready(bounds)), 0)
    for message in submissions(sequences, steps, prompt):
        machine.apply(FromClient(2, message, 1), 0)
    pending = [effect.message for effect in machine.apply(Turn(), 1).effects if isinstance(effect, ToWorker)]
    taken: list[float] = []
    warming = WARM_STEPS
    gc.collect()
    gc.freeze()
    now_us = 1
    while len(taken) < steps:
        step = pending.pop(0)
        assert isinstance(step, Step)
        event = FromWorker(1, answerer.answer(step, 1))
        now_us += 1000
        started = perf_counter_ns()
        machine.apply(event, now_us)
        effects = machine.apply(Turn(), now_us).effects
        ended = perf_counter_ns()
        pending += [effect.message for effect in effects if isinstance(effect, ToWorker)]
        s = machine.cache.sequences
        for changed in (s.changed_rows, s.changed_lengths, s.changed_cells, machine.cache.blocks.changed):
            changed.clear()  # the shell publishes these
        if step.slots.size == sequences and step.counts.max() == 1:
            warming -= 1
            if warming < 0:
                taken.append((ended - started) / 1e3)
    gc.unfreeze()
    return taken


class Shell:
    """A coordinator's turn loop over real sockets, with one client and one worker in this process."""

    def __init__(self, folder: Path, limits: Limits, durability: str = "none") -> None:
        self.context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self._numbers = iter(range(1, 100))
        geometry = Geometry(
            slots=limits.bounds.sequences_max,
            blocks=limits.bounds.blocks_max,
            blocks_per_sequence=limits.bounds.blocks_per_sequence_max,
            block_size=limits.cache.block_size,
            states_per_sequence=limits.bounds.state_blocks_max,
        )
        boot, self.journal = Boot("benchmark", b"key", limits), None
        if durability != "none":
            origin, power = Origin.new(boot.boot), durability == "power"
            unwritten = None if power else UnwrittenRecords(folder, origin.journal, 1)
            self.journal = Journal(folder, 1, durable=power, origin=origin, unwritten=unwritten)
            self.journal.note(boot, 0)
        self.machine = Machine(boot, 0)
        self.tables = TablesWriter(folder / "tables", geometry, "benchmark")
        self.clients = RouterSocket((Endpoint(f"ipc://{folder}/c"),), self._number)
        self.workers = RouterSocket((Endpoint(f"ipc://{folder}/w"),), self._number)
        self._epoll = select.epoll()
        self._on_input = self.clients.watch(self._epoll) | self.workers.watch(self._epoll)
        turn_limits, sides = TurnLimits(messages_per_turn_max=1 << 16), (self.clients, self.workers)
        self.loop = TurnLoop(
            self.machine,
            self.tables,
            *sides,
            lambda: 1,
            lambda: perf_counter_ns() // 1000,
            turn_limits,
            journal=self.journal,
        )
        self.client, self.worker = dealer(self.context), dealer(self.context)
        self.client.connect(f"ipc://{folder}/c")
        self.worker.connect(f"ipc://{folder}/w")
        while not (self.client.poll(1, zmq.POLLOUT) and self.worker.poll(1, zmq.POLLOUT)):
            assert not self.waiting(0), "unexpected message before the first request"  # answers the handshakes
        self.now_us = self._due_us = 0
        self.flushed_us: list[float] = []

    def _number(self) -> int:
        return next(self._numbers)

    def turn(self) -> float:
        """Run one turn when a message has arrived or a timer is due; return its microseconds.

        The journal's records are written afterwards, as in the server: `flushed_us` has the time that this takes.
        """
        self.now_us += 1000
        while not self.waiting(10 if self._due_us > self.now_us else 0) and self._due_us > self.now_us:
            pass
        started = perf_counter_ns()
        self._due_us = self.loop.turn(self.now_us)
        ended = perf_counter_ns()
        if self.journal is not None:
            self.journal.flush()
            self.flushed_us.append((perf_counter_ns() - ended) / 1e3)
        return (ended - started) / 1e3

    def turn_until_settled(self) -> float:
        """Run turns until one applies the worker's answer; return the microseconds of that turn.

        Other events can make a turn due: such a turn applies no answer, and another turn follows.
        """
        before, spent = self.steps_settled, 0.0
        while self.steps_settled == before:
            spent = self.turn()
        return spent

    @property
    def steps_settled(self) -> int:
        """Return how many steps of its worker were applied."""
        return sum(worker.health(0).steps for worker in self.machine.workers.values())

    def waiting(self, timeout_s: float) -> bool:
        """Return whether a message arrives within that time, polling as the server does."""
        for descriptor, _ in self._epoll.poll(timeout_s):
            self._on_input[descriptor]()
        return self.clients.waiting or self.workers.waiting

    def receive_as_worker(self) -> list[bytes]:
        """Return the frames of the worker's next message, and keep sending to the worker meanwhile.

        A step of thousands of rows can exceed what its socket accepts at once. The rest is written when the coordinator
        polls, which is this thread: a plain `recv_multipart` would wait for itself.
        """
        while not self.worker.poll(1):
            self.waiting(0)
        return self.worker.recv_multipart()

    def close(self) -> None:
        """Everything."""
        if self.journal is not None:
            self.journal.close()
        self._epoll.close()
        for socket in (self.client, self.worker):
            socket.close(0)
        self.clients.close()
        self.workers.close()
        self.context.term()
        self.tables.close()


def whole(
    sequences: int, steps: int, prompt: int = PROMPT_TOKENS, durability: str = "none"
) -> tuple[list[float], float, list[float]]:
    """Return microseconds: of each turn that applies and plans a step of all sequences, of a collection after them, and
    of each write of the journal after a turn."""
    bounds, answerer = limits(sequences, steps, prompt), Answerer()
    decoder = codec.Decoder(WORKER_REPLIES)
    with tempfile.TemporaryDirectory(prefix="kvf-bench-") as folder:
        shell = Shell(Path(folder), bounds, durability)
        try:
            shell.worker.send_multipart(codec.encode(WorkerHello(rid=1, name="w", pid=1)))
            shell.worker.send_multipart(codec.encode(ready(bounds)))
            shell.client.send_multipart(codec.encode(Hello(rid=1)))
            for message in submissions(sequences, steps, prompt):
                shell.client.send_multipart(codec.encode(message))
            while shell.machine.admission.running_total < sequences:
                shell.turn()
            taken: list[float] = []
            warming = WARM_STEPS
            pauses = GarbageCollector(perf_counter_ns)
            pauses.start()
            while len(taken) < steps:
                step = decoder.decode(shell.receive_as_worker())
                if not isinstance(step, Step):
                    continue
                while shell.client.poll(0):
                    shell.client.recv_multipart()
                shell.worker.send_multipart(codec.encode(answerer.answer(step, 1)))
                spent = shell.turn_until_settled()
                if step.slots.size == sequences and step.counts.max() == 1:
                    warming -= 1
                    if warming < 0:
                        taken.append(spent)
                pauses.turn(idle=False)
            for _ in range(TURNS_MIN):
                pauses.turn(idle=True)
            pauses.stop()
            return taken, pauses.longest_us, shell.flushed_us[-len(taken) :]
        finally:
            shell.close()


def summary(spent: list[float]) -> dict[str, float]:
    """Return p50, mean and p99.9: work done once in several steps, such as indexing, shows in the mean only."""
    taken = np.array(spent)
    p50, p999 = np.percentile(taken, (50, 99.9))
    return {"p50_us": float(p50), "mean_us": float(taken.mean()), "p999_us": float(p999)}


def main() -> int:
    """Measures and prints."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.control_plane", description=__doc__)
    parser.add_argument("--json", help="write the results here too")
    parser.add_argument("--sequences", type=int, nargs="+", default=[16, 256, 1024, 4096])
    parser.add_argument("--steps", type=int, default=400)
    parser.add_argument("--rounds", type=int, default=3, help="how often each is measured: all steps count alike [3]")
    parser.add_argument("--prompt", type=int, default=PROMPT_TOKENS, help="tokens of each prompt [48]")
    options = parser.parse_args()
    rows: list[list[object]] = []
    results: list[dict[str, Any]] = []
    for sequences in options.sequences:
        spent: dict[str, list[float]] = {"core": [], "turn": [], "process": [], "written": [], "power": []}
        collections = []
        for _ in range(options.rounds):
            spent["core"] += core(sequences, options.steps, options.prompt)
            turns, collection_us, _ = whole(sequences, options.steps, options.prompt)
            spent["turn"] += turns
            collections.append(collection_us)
            for durability in ("process", "power"):
                turns, _, written = whole(sequences, options.steps, options.prompt, durability)
                spent[durability] += turns
                if durability == "process":
                    spent["written"] += written
        pooled: dict[str, Any] = {name: summary(each) for name, each in spent.items()}
        results.append({"sequences": sequences, "collection_us": statistics.median(collections)} | pooled)
    if missing := vllm_scheduler.reason():  # vLLM comes last, so that its imports do not affect the others
        print(f"vLLM's scheduler is not measured: {missing}", file=sys.stderr)
    for found in results:
        taken: list[float] = []
        for _ in range(options.rounds):
            taken += vllm_scheduler.decode_step_us(found["sequences"], options.steps) or []
        if taken:
            found["vllm"] = summary(taken)
        shown = [f"{found[n][p]:.0f}" if n in found else "-" for n in MEASURED for p in SHOWN]
        rows.append([found["sequences"], f"{found['collection_us']:.0f}", *shown])
    header = ["sequences", "collection, us"]
    for name in (
        "core",
        "turn",
        "turn, journal for the process",
        "written after it",
        "turn, journal for power",
        "vLLM scheduler",
    ):
        header += [f"{name} p50, us", "mean", "p99.9"]
    report("control plane: a decode step of N sequences", header, rows, results, options.json)
    return 0


if __name__ == "__main__":
    sys.exit(main())
