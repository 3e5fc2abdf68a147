"""Requests in random batches must give the same bits as alone.

They run beside others, in chunks, after preemption and recomputation, behind cached prefixes, as forks, and on a worker
that crashes.

    python -m tests.worker.step.company --requests 10000 [--seed 0] [--dtype bfloat16] [--kv-dtype auto]
        [--model-type llama] [--window 0] [--block-size 16]
"""

from __future__ import annotations

import argparse
import json
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from random import Random

import numpy as np
import numpy.typing as npt
import torch

from kvforge.protocol.messages import GENERATED, RowStart, SamplingParams, Step
from kvforge.worker.attention.pool import KvPool
from kvforge.worker.device.device import Device, open_device
from kvforge.worker.loading.load import load_model
from kvforge.worker.loading.model import LoadedModel
from kvforge.worker.step.runner import ModelRunner
from tests.worker.loading.random_models import YARN_BY_POSITION

# Wide enough for every kind of product and attention: parts of rows, tiles of our kernels and torch's products.
SHAPE = {
    "model_type": "llama",
    "vocab_size": 4000,
    "hidden_size": 1024,
    "intermediate_size": 2816,
    "num_hidden_layers": 3,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "head_dim": 128,
    "max_position_embeddings": 4096,
    "initializer_range": 0.05,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
}
MIXED = {"sliding_window": 48, "layer_types": ["sliding_attention", "full_attention"]}
EXPERTS = {"num_experts": 8, "num_experts_per_tok": 3, "moe_intermediate_size": 104}
# Additional settings by model type.
FIELDS: dict[str, dict[str, object]] = {
    "ministral3": {"rope_parameters": YARN_BY_POSITION},
    "mistral": {"sliding_window": 48},
    "gemma3_text": MIXED | {"num_hidden_layers": 2},
    "gpt2": {"n_embd": 256, "n_layer": 2, "n_head": 4, "n_inner": 700, "n_positions": 4096},
    "mixtral": {"num_local_experts": 4, "intermediate_size": 104},
    "qwen2_moe": {**EXPERTS, "shared_expert_intermediate_size": 200},
}
Said = list[tuple[int, int]]  # each token, and the bits of its log-probability


@dataclass(eq=False)
class Request:
    """generated: the tokens of the answer, the first `inherited` by the parent of a fork. computed: tokens with KV in
    the pool. blocks: its block table. story: a log of its steps, to analyse a difference."""

    number: int
    prompt: list[int]
    wanted: int
    seed: int
    temperature: float
    generated: Said = field(default_factory=list)
    slot: int = -1
    computed: int = 0
    blocks: list[int] = field(default_factory=list)
    inherited: int = 0
    story: list[tuple[int, ...]] = field(default_factory=list)

    @property
    def tokens(self) -> list[int]:
        """Return all tokens of prompt and answer."""
        return self.prompt + [token for token, _ in self.generated]

    def marked(self, mark: int) -> list[int]:
        """Return the tokens as the coordinator sends them to a worker."""
        return self.prompt + [token + mark for token, _ in self.generated]

    @property
    def start(self) -> RowStart:
        """Return the start message for its slot."""
        return RowStart(
            slot=self.slot,
            request_id=self.number,
            sampling=SamplingParams(temperature=self.temperature),
            seed=self.seed,
            generated=len(self.generated),
        )


def draw(
    random: Random, number: int, prefixes: Sequence[list[int]], longest: int, vocabulary: int, most: int = 40
) -> Request:
    """Draw a request for at most `most` tokens, every other one behind one of the prefixes."""
    prompt = list(random.choice(prefixes)) if random.random() < 0.5 else []
    prompt += [random.randrange(vocabulary) for _ in range(1 + int(random.random() ** 3 * longest))]
    temperature = random.choice((0.0, 0.0, 0.7, 1.3))
    return Request(number, prompt, 1 + int(random.random() ** 2 * most), random.getrandbits(60), temperature)


class Company:
    """A runner in which `play` runs requests in random batches."""

    def __init__(self, model: LoadedModel, random: Random, rows_max: int, tokens_max: int, graph_rows_max: int) -> None:
        self._random, self.rows_max, self.tokens_max = random, rows_max, tokens_max
        self._model, self._graph_rows_max = model, graph_rows_max
        context = model.info.context_tokens_max
        self._block_size = model.geometry.block_size
        self.pool = KvPool(model.geometry, rows_max * (context // self._block_size) // 4, model.device)
        self._steps = self.evictions = self.hits = self.copies = self.forks = self.deaths = 0
        self._start()

    def _start(self) -> None:
        """Start a worker process with a pool full of NaN."""
        for tensor in self.pool.tensors():
            if tensor.is_floating_point() and tensor.element_size() > 1:
                tensor.fill_(float("nan"))
            else:
                tensor.view(torch.int8).random_(-100, 100)
        self._free = list(range(self.pool.blocks))
        self._slots = list(range(self.rows_max))
        self._holders = [0] * self.pool.blocks
        self._begins: list[Request] = []
        self._owed: list[int] = []  # pending copies of blocks
        self.runner = ModelRunner(
            self._model,
            self.pool,
            slots_max=self.rows_max,
            step_tokens_max=self.tokens_max,
            step_rows_max=self.rows_max,
            graph_rows_max=self._graph_rows_max,
        )

    def play(self, requests: list[Request], forks: int = 0, deaths: int = 0) -> list[Request]:
        """Run all requests to their end in random batches, order and chunks; return the forks. deaths: worker
        crashes."""
        waiting, running, forked = list(requests), [], list[Request]()
        dues = [len(requests) * (death + 1) // (deaths + 1) for death in range(deaths)]  # finished at each
        ended = 0
        while waiting or running:
            while waiting and self._slots and self._random.random() < 0.5 and self._room(waiting[-1]):
                running.append(waiting.pop())
                self._begin(running[-1], running)
            if not running:
                continue
            if self._random.random() < 0.1 and not self._owed:
                thrown = self._random.choice(running)
                self._end(thrown)
                self._begin(thrown, [])
                self.evictions += 1
            if dues and ended >= dues[0]:
                self._die(running)
                dues.pop(0)
            elif len(forked) < forks and self._random.random() < forks / len(requests):
                fork = self._fork(running, len(requests) + len(forked))
                forked += [fork] if fork is not None else []
                running += [fork] if fork is not None else []
            self._step(running)
            for request in [one for one in running if len(one.generated) == one.wanted]:
                self._end(request)
                running.remove(request)
                ended += 1
        return forked

    def _room(self, request: Request) -> bool:
        return len(self._free) >= -(-(len(request.prompt) + request.wanted) // self._block_size)

    def _die(self, running: list[Request]) -> None:
        """Crash the worker, which loses all KV."""
        self.runner.close()
        self._start()
        for request in running:
            self._begin(request, [])
        self.deaths += 1

    def _fork(self, running: list[Request], number: int) -> Request | None:
        """Fork a request with generated tokens: the same blocks, but its own random draws from here on."""
        here = [one for one in running if one.generated and one.computed >= len(one.prompt) and one not in self._begins]
        parents = [one for one in here if len(one.generated) < one.wanted]
        if not parents or not self._slots:
            return None
        parent = self._random.choice(parents)
        fork = Request(number, parent.prompt, parent.wanted, self._random.getrandbits(60), 1.0, list(parent.generated))
        fork.inherited = len(fork.generated)
        if not self._room(fork):
            return None
        # The last token is recomputed: the fork diverges from there.
        self._take(fork, parent, min(parent.computed, len(fork.tokens) - 1))
        self.forks += 1
        return fork

    def _begin(self, request: Request, beside: list[Request]) -> None:
        """Allocate a slot and blocks; reuse the blocks of a computed common prefix."""
        donors = [(self._common(request, other), other) for other in beside if other is not request]
        best, donor = max(donors, default=(0, request), key=lambda each: each[0])
        if best and self._random.random() < 0.7:
            if self._random.random() < 0.5:
                best = best // self._block_size * self._block_size
            self._take(request, donor, best)
            self.hits += 1
        else:
            self._take(request, request, 0)

    def _take(self, request: Request, donor: Request, tokens: int) -> None:
        """Allocate a slot, share the donor's blocks for the first `tokens` tokens (copying a partial block), and add
        new blocks."""
        if self._owed:  # one copy a step: two copies might depend on each other
            tokens = tokens // self._block_size * self._block_size
        request.slot, request.computed = self._slots.pop(), tokens
        whole, rest = divmod(tokens, self._block_size)
        source = donor.blocks[whole] if rest else -1
        request.blocks = donor.blocks[:whole]
        for block in request.blocks:
            self._holders[block] += 1
        for _ in range(-(-(len(request.prompt) + request.wanted) // self._block_size) - whole):
            block = self._free.pop(self._random.randrange(len(self._free)))
            self._holders[block] = 1
            request.blocks.append(block)
        if rest:
            self._owed += [source, request.blocks[whole], rest]
            self.copies += 1
        self._begins.append(request)

    def _common(self, request: Request, other: Request) -> int:
        """Return the length of the computed common prefix, with at least one token left to compute. Blocks that the
        other request only received do not count, because their copy may be pending."""
        if other in self._begins:
            return 0
        most = min(len(request.prompt) - 1, len(other.prompt), other.computed)
        pairs = zip(request.prompt[:most], other.prompt[:most], strict=True)
        return next((place for place, (mine, its) in enumerate(pairs) if mine != its), most)

    def _end(self, request: Request) -> None:
        for block in request.blocks:
            self._holders[block] -= 1
            if not self._holders[block]:
                self._free.append(block)
        self._slots.append(request.slot)
        self._begins = [one for one in self._begins if one is not request]

    def _step(self, running: list[Request]) -> None:
        """Run a step of random requests in random order, with prompts and recomputation in chunks."""
        random, room = self._random, self.tokens_max
        chosen = random.sample(running, random.randint(1, len(running))) if random.random() < 0.5 else list(running)
        rows: list[tuple[Request, int]] = []
        for request in chosen:
            left = len(request.tokens) - request.computed
            count = left if random.random() < 0.5 else random.randint(1, left)
            count = min(count, room)
            if count:
                rows.append((request, count))
                room -= count
        begins = tuple(request.start for request in self._begins)
        copies, self._begins, self._owed = self._owed, [], []
        starts = [request.computed for request, _ in rows]
        counts = [count for _, count in rows]
        mark = GENERATED if self.runner.model.wants_kinds else 0
        tokens = [token for request, count in rows for token in request.marked(mark)[request.computed :][:count]]
        samples = [int(request.computed + count == len(request.tokens)) for request, count in rows]
        width = max(-(-(start + count) // self._block_size) for start, count in zip(starts, counts, strict=True))
        tables = np.zeros((len(rows), width), np.int32)
        for row, (request, _) in enumerate(rows):
            used = request.blocks[:width]
            tables[row, : len(used)] = used
        step = Step(
            self._steps,
            begins=begins,
            copies=_int32(copies),
            slots=_int32([request.slot for request, _ in rows]),
            starts=_int32(starts),
            counts=_int32(counts),
            samples=_int32(samples),
            tokens=_int32(tokens),
        )
        outcome = self.runner.run(step, tables)
        assert not outcome.errors, outcome.errors
        self._steps += 1
        for request, count in rows:
            request.story.append((request.computed, count, len(tokens), len(rows), sum(samples)))
            request.computed += count
        by_slot = {request.slot: request for request, _ in rows}
        bits = outcome.logprobs.view(np.int32).tolist()
        for slot, token, logprob in zip(outcome.slots.tolist(), outcome.tokens.tolist(), bits, strict=True):
            by_slot[slot].generated.append((token, logprob))

    def summary(self) -> str:
        """Return a readable summary."""
        return (
            f"{self._steps} steps, {self.evictions} preempted and recomputed, {self.hits} behind what another one "
            f"computed, {self.copies} copies of a part of a block, {self.forks} forks, {self.deaths} deaths"
        )

    def close(self) -> None:
        self.runner.close()
        self.pool.close()


class Alone(Company):
    """A runner in which each request runs alone: its prompt at once, then token by token."""

    def __init__(self, model: LoadedModel, graph_rows_max: int = 0) -> None:
        super().__init__(model, Random(0), 4, model.info.context_tokens_max, graph_rows_max)

    def say(self, request: Request) -> Said:
        """Return the generated tokens behind the inherited ones."""
        again = Request(request.number, request.prompt, request.wanted, request.seed, request.temperature)
        again.generated = request.generated[: request.inherited]
        self._begin(again, [])
        while len(again.generated) < again.wanted:
            self._whole(again)
        self._end(again)
        return again.generated

    def _whole(self, request: Request) -> None:
        self._random = _Never(0)
        self._step([request])


class _Never(Random):
    """A scheduler stand-in without chunks."""

    def random(self) -> float:
        return 0.0

    def sample(self, population: Sequence[Request], k: int, **_: object) -> list[Request]:  # type: ignore[override]
        return list(population)


def _int32(numbers: list[int]) -> npt.NDArray[np.int32]:
    return np.array(numbers, np.int32)


def compare(alone: Alone, requests: list[Request]) -> str:
    """Return the first difference, or ""."""
    for request in requests:
        expected = alone.say(request)
        if request.generated != expected:
            at = next(i for i, (one, other) in enumerate(zip(request.generated, expected, strict=True)) if one != other)
            return (
                f"request {request.number}, {len(request.prompt)} prompt tokens, at token {at} of {request.wanted}: "
                f"{request.generated[at]}, alone {expected[at]}"
            )
    return ""


def wide_model(
    folder: Path,
    device: Device,
    dtype: str,
    kv_dtype: str = "auto",
    weight_dtype: str = "auto",
    block_size: int = 16,
    **fields: object,
) -> LoadedModel:
    """Return a model of SHAPE with random weights."""
    (folder / "config.json").write_text(json.dumps(SHAPE | fields))
    return load_model(
        folder,
        load_format="dummy",
        dtype=dtype,
        device=device,
        block_size=block_size,
        kv_dtype=kv_dtype,
        weight_dtype=weight_dtype,
    )


def main() -> None:
    """Exit status 1 at the first difference."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--requests", type=int, default=1000)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--kv-dtype", default="auto")
    parser.add_argument("--model-type", default="llama", help="llama, qwen3, mistral, phi3, ... [llama]")
    parser.add_argument("--window", type=int, default=0, help="tokens that a query of mistral's layers sees [0: all]")
    parser.add_argument("--block-size", type=int, default=16)
    options = parser.parse_args()
    random, device = Random(options.seed), open_device("auto")
    with tempfile.TemporaryDirectory() as folder:
        fields = FIELDS.get(options.model_type, {}) | {"model_type": options.model_type}
        if options.model_type == "mistral":
            fields["sliding_window"] = options.window or None
        model = wide_model(
            Path(folder), device, options.dtype, options.kv_dtype, block_size=options.block_size, **fields
        )
    print(
        f"{device.name}, {options.model_type}, {options.dtype}, KV {options.kv_dtype}, blocks of {options.block_size}, "
        f"window {options.window}: {model.unsteady or 'batch-invariant'}"
    )
    vocabulary = int(SHAPE["vocab_size"])  # type: ignore[call-overload]
    prefixes = [[random.randrange(vocabulary) for _ in range(random.randint(20, 600))] for _ in range(5)]
    requests = [draw(random, number, prefixes, 1500, vocabulary) for number in range(options.requests)]
    company, alone = Company(model, random, 96, 4096, 96), Alone(model, graph_rows_max=4)
    began = time.monotonic()
    requests += company.play(requests, forks=options.requests // 5, deaths=options.requests // 100)
    tokens = sum(len(request.generated) for request in requests)
    took_s = time.monotonic() - began
    print(f"{len(requests)} requests, {tokens} tokens: {took_s:.1f} s; {company.summary()}", flush=True)
    problem = compare(alone, requests)
    print(problem or "all requests have the same bits as alone", f"{time.monotonic() - began:.1f} s")
    raise SystemExit(1 if problem else 0)


if __name__ == "__main__":
    main()
