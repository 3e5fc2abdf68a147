"""Tokens and log-probabilities with and without drafts, compared bit by bit, while workers are killed.

    python -m benchmarks.draft_bits [--cpu NAME] [--drafters lookup,mtp] [--tokens 250000] [--json FILE]
    python -m benchmarks.draft_bits --gpu llama-3.1-8b --kv bfloat16 --drafters eagle3 --reference FILE [--json FILE]

Random requests (prompts, many with a common beginning; temperatures of 0 and above, filters, penalties, biases,
log-probabilities, stop tokens) run in random order and company through a coordinator, a worker and this client, first
on a service without drafts, then on one with each drafter. The worker is killed with SIGKILL every so often and started
again. Each request's tokens, log-probabilities, alternatives and reason must be those without drafts.

Weights are dummies. Drafters run as they do in the product, and `benchmarks.draft_bits_worker` replaces their tokens:
each is the right one with the chance `--chance`, so that accepted and rejected drafts are both frequent. A quarter of
the requests chooses among three tokens, which lookup drafts by itself. The pool has too few blocks for the longest
requests of all rows at once, so that some are preempted.

`--reference FILE` has the answers without drafts: they are read from the file if it exists, and else written to it.
`--plant`: the worker accepts a wrong draft now and then, and differences must be found.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import signal
import struct
import sys
import tempfile
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from time import monotonic
from typing import Any, NamedTuple

import numpy as np

from kvforge import AsyncClient, CoordinatorUnavailable, DeadlineExceeded, KvforgeError, SamplingParams
from kvforge.worker.loading.source import MODEL_CONFIGS
from kvforge.worker.model_path import MTP

from .drafts import eagle_head, fewer_layers
from .drafts_worker import FIRST_SEED
from .installation import CONFIG, Installation
from .report import report
from .step_plan import BLOCK_SIZE

PLAIN = {"bfloat16": "auto", "float32": "auto"}  # the worker's own names of a dtype of KV
LOOKUP, DRAFT_MODEL, EAGLE = "lookup", "draft-model", "eagle3"
DRAFTERS = (LOOKUP, DRAFT_MODEL, MTP, EAGLE)
TINY = "tiny"
TINY_LAYERS = 7  # enough for an EAGLE-3 head to read three different layers
SEED = 1
PROMPT_MIN, ANSWER_MIN, SHARED = 8, 16, 48
DRAFTS_MAX = 6
WAIT_S = 900.0
READY_S, KILL_S = 240.0, 30.0
CHECK_S = 0.2
FEW = (7, 11, 13)  # answers of three tokens repeat themselves, and lookup finds drafts
FEW_BIAS = 60.0
POOL_SHARE = 0.6  # of the blocks that the longest requests of all rows take
SHOWN = 5


class Asked(NamedTuple):
    """A request.

    Attributes:
        prompt: Its tokens.
        tokens_max: The most tokens of its answer.
        sampling: Its sampling parameters; `seed` is FIRST_SEED + its number.
    """

    prompt: list[int]
    tokens_max: int
    sampling: SamplingParams


class Answer(NamedTuple):
    """The answer to a request, as JSON has it.

    Attributes:
        tokens: [n] int.
        logprobs: [n] float, in nats.
        top_logprobs: [n] lists of (token, log-probability).
        reason: Why it ended.
    """

    tokens: list[int]
    logprobs: list[float]
    top_logprobs: list[list[tuple[int, float]]]
    reason: str

    def bits(self) -> list[tuple[object, ...]]:
        """Return what is compared: the bits of each token, then the reason."""
        tops = self.top_logprobs or [[]] * len(self.tokens)
        parts = zip(self.tokens, self.logprobs, tops, strict=True)
        each = [(token, _bits(value), *((other, _bits(its)) for other, its in top)) for token, value, top in parts]
        return [*each, (self.reason,)]


@dataclass
class Served:
    """The answers of a service, and what it counted.

    Attributes:
        answers: By number of the request.
        drafted: Drafts that steps verified, except those behind the last look at a worker that was killed.
        accepted: Drafts that became tokens.
        kills: Kills of the worker.
        preempted: Preemptions.
        recomputed: Tokens that were computed again.
        took_s: Seconds.
    """

    answers: dict[int, Answer] = field(default_factory=dict)
    drafted: int = 0
    accepted: int = 0
    kills: int = 0
    preempted: int = 0
    recomputed: int = 0
    took_s: float = 0.0

    @property
    def tokens(self) -> int:
        """All tokens of its answers."""
        return sum(len(answer.tokens) for answer in self.answers.values())


def _bits(value: float) -> bytes:
    return struct.pack("<d", value)


def draw(tokens: int, vocab_size: int, prompt_max: int, answer_max: int) -> list[Asked]:
    """Return random requests for at least so many tokens, always the same ones.

    Args:
        tokens: The tokens of all answers.
        vocab_size: Tokens are in [3, vocab_size).
        prompt_max: The most tokens of a prompt.
        answer_max: The most tokens of an answer.
    """
    shared = random.Random(SEED).choices(range(3, vocab_size), k=SHARED)
    asked: list[Asked] = []
    while tokens > 0:
        rng = random.Random(f"{SEED} {len(asked)}")
        few, stops = rng.random() < 0.25, rng.random() < 0.1
        sampling = SamplingParams(
            temperature=rng.choice((0.0, 0.0, 0.5, 1.0, 1.5)),
            seed=FIRST_SEED + len(asked),
            ignore_eos=True,
            stop_tokens=rng.sample(range(3, vocab_size), 16) if stops else (),
            top_k=rng.choice((0, 0, 20)),
            top_p=rng.choice((1.0, 1.0, 0.9)),
            min_p=rng.choice((0.0, 0.0, 0.05)),
            repetition_penalty=rng.choice((1.0, 1.0, 1.1)),
            presence_penalty=rng.choice((0.0, 0.0, 0.4)),
            frequency_penalty=rng.choice((0.0, 0.0, 0.2)),
            logit_bias=dict.fromkeys(FEW, FEW_BIAS) if few else {},
            logprobs=rng.choice((0, 0, 1, 5)),
        )
        own = rng.choices(FEW if few else range(3, vocab_size), k=rng.randint(PROMPT_MIN, prompt_max))
        length = rng.randint(ANSWER_MIN, answer_max)
        asked.append(Asked([*(shared if rng.random() < 0.5 else []), *own], length, sampling))
        tokens -= 0 if stops else length
    return asked


async def ready(kv: AsyncClient, check: Callable[[], None]) -> None:
    """Wait until a worker is ready. check: As in `serve`."""
    deadline = monotonic() + READY_S
    while True:
        try:
            await kv.wait_ready(1.0)
            return
        except (CoordinatorUnavailable, DeadlineExceeded):
            check()
            if monotonic() > deadline:
                raise


async def serve(
    endpoint: str,
    asked: Sequence[Asked],
    rows: int,
    order: str,
    *,
    check: Callable[[], None],
    kill: Callable[[], None],
    kills: int,
) -> Served:
    """Run all requests, at most `rows` at a time.

    Args:
        endpoint: That of the coordinator.
        asked: The requests.
        rows: The most requests at a time.
        order: The seed of their order.
        check: Raises an error if a process has ended by itself; called several times a second.
        kill: Kills the worker and starts the next one.
        kills: How often, after about the same number of tokens each.
    """
    served, began = Served(), monotonic()
    waiting = random.Random(order).sample(range(len(asked)), len(asked))
    share = sum(each.tokens_max for each in asked) / (kills + 1)
    counts: dict[int, tuple[int, int]] = {}  # by process: drafted, accepted
    done = 0

    async def look(kv: AsyncClient) -> None:
        counts.update((each.pid, (each.drafted_total, each.accepted_total)) for each in (await kv.health()).workers)

    async def row(kv: AsyncClient) -> None:
        nonlocal done
        while waiting:
            number = waiting.pop()
            prompt, tokens_max, sampling = asked[number]
            request = await kv.submit(prompt, max_tokens=tokens_max, sampling=sampling)
            found = await request.result(WAIT_S)
            tops = [list(top) for top in found.top_logprobs]
            served.answers[number] = Answer(list(found.tokens), list(found.logprobs), tops, found.reason)
            done += tokens_max
            if served.kills < kills and done >= share * (served.kills + 1):
                served.kills += 1
                await look(kv)
                kill()

    async with AsyncClient(endpoint, timeout_s=WAIT_S, connect_timeout_s=60.0, stream_timeout_s=WAIT_S) as kv:
        running = asyncio.gather(*(row(kv) for _ in range(rows)))
        try:
            while not (await asyncio.wait([running], timeout=CHECK_S))[0]:
                check()
            running.result()
        finally:
            running.cancel()
            with suppress(asyncio.CancelledError, KvforgeError):
                await running
        await look(kv)
        requests = (await kv.stats()).requests
        served.preempted, served.recomputed = requests.preemptions_total, requests.recomputed_tokens_total
    served.drafted, served.accepted = (sum(each) for each in zip(*counts.values(), strict=True))
    served.took_s = monotonic() - began
    return served


def differences(found: dict[int, Answer], want: dict[int, Answer]) -> list[str]:
    """Describe each request that has other bits."""
    described = []
    for number in sorted(want):
        mine, theirs = found[number].bits(), want[number].bits()
        if mine != theirs:
            at = next((at for at, (one, other) in enumerate(zip(mine, theirs, strict=False)) if one != other), -1)
            described.append(f"request {number} differs at token {at} of {len(theirs) - 1}")
    return described


def write_answers(answers: dict[int, Answer], path: Path) -> None:
    """Write the tokens of answers, in the order of their numbers, as `benchmarks.draft_bits_worker` reads them."""
    table = np.zeros((len(answers), max(len(answer.tokens) for answer in answers.values())), np.int64)
    for number, answer in answers.items():
        table[number, : len(answer.tokens)] = answer.tokens
    np.save(path, table)


def tiny_config(folder: Path) -> str:
    """Write the configuration of a tiny model, and return its folder."""
    place = folder / TINY
    place.mkdir()
    fields = {"num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 2048, "rms_norm_eps": 1e-5}
    (place / "config.json").write_text(json.dumps(CONFIG | fields | {"num_hidden_layers": TINY_LAYERS}))
    return str(place)


class Proof:
    """Services of one model and one dtype of KV.

    Args:
        options: The command's.
        kv: The dtype of KV.
        folder: For files.
    """

    def __init__(self, options: argparse.Namespace, kv: str, folder: Path) -> None:
        self._options, self._kv, self._folder = options, kv, folder
        name = options.gpu or options.cpu
        self._model = tiny_config(folder) if name == TINY else name
        known = MODEL_CONFIGS / f"{self._model}.json"
        config = json.loads((known if known.is_file() else Path(self._model) / "config.json").read_text())
        self.asked = draw(options.tokens, config["vocab_size"], options.prompt, options.answer)
        self._answers = folder / "answers.npy"

    def without(self) -> dict[int, Answer]:
        """Return the answers without drafts, and keep them for the worker with drafts."""
        options = self._options
        path = options.reference and Path(options.reference)
        what = [options.gpu, options.cpu, self._kv, [repr(each) for each in self.asked[-3:]]]
        if path and path.exists():
            document = json.loads(path.read_text(encoding="utf-8"))
            if document["what"] != what:
                raise SystemExit(f"{path}: answers of other requests: remove the file, or give the same options")
            answers = {number: Answer(*each) for number, each in enumerate(document["answers"])}
        else:
            served = self._served("without drafts", {}, 0, ("kvforge.worker",), 0)
            answers = served.answers
            if path:
                listed = [answers[number] for number in range(len(answers))]
                path.write_text(json.dumps({"what": what, "answers": listed}), encoding="utf-8")
        write_answers(answers, self._answers)
        return answers

    def drafted(self, drafter: str) -> Served:
        """Return what a service with a drafter answers, while its worker is killed."""
        options = self._options
        with tempfile.TemporaryDirectory(dir=self._folder) as folder:
            place, worker = Path(folder), dict[str, Any]()
            if drafter == DRAFT_MODEL:
                worker["draft_model"] = fewer_layers(self._model, options.draft_layers, place)
            elif drafter != LOOKUP:
                worker["draft_model"] = MTP if drafter == MTP else eagle_head(self._model, place)
            command = ("benchmarks.draft_bits_worker", str(self._answers), str(options.chance), str(DRAFTS_MAX))
            command += ("--plant",) * options.plant
            return self._served(drafter, worker, DRAFTS_MAX, command, options.kills)

    def _served(self, name: str, worker: dict[str, Any], drafts: int, command: tuple[str, ...], kills: int) -> Served:
        options = self._options
        context = SHARED + options.prompt + options.answer + BLOCK_SIZE
        blocks = int(POOL_SHARE * options.rows * -(-context // BLOCK_SIZE))
        settings: dict[str, Any] = {
            "model": self._model,
            "blocks": blocks,
            "kv_dtype": PLAIN.get(self._kv, self._kv),
        } | worker
        if not options.gpu:
            settings |= {"device": "cpu", "dtype": "float32", "threads": 1}
        rows = options.rows * (1 + drafts)
        schedule = {
            "drafts_max": drafts,
            "draft_rows_max": rows,
            "step_tokens_max": 2048 if options.gpu else 512,
            "crashes_max": 1000,
        }
        service = Installation(
            context_tokens=context,
            blocks=blocks,
            schedule=schedule,
            sequences=rows,
            worker=settings,
            worker_command=command,
        )

        def kill() -> None:
            child = service.children[1]
            child.send(signal.SIGKILL)
            assert child.wait(monotonic() + KILL_S), "the worker outlives its kill"
            child.start()

        def check() -> None:
            for child in service.children:
                if (status := child.ended()) is not None:
                    raise RuntimeError(f"{child.name} ended with status {status}: {child.last_words()}")

        async def run() -> Served:
            async with AsyncClient(service.endpoint, timeout_s=WAIT_S, connect_timeout_s=60.0) as kv:
                await ready(kv, check)
            order = f"{name} {self._kv}"
            return await serve(service.endpoint, self.asked, options.rows, order, check=check, kill=kill, kills=kills)

        with service:
            try:
                served = asyncio.run(run())
            except Exception:
                print(service.log_of("worker"), file=sys.stderr)
                raise
        print(f"{self._kv}, {name}: {served.tokens:,} tokens in {served.took_s:.1f} s", file=sys.stderr, flush=True)
        return served


def main(arguments: Sequence[str] | None = None) -> int:
    """Compare and print; return exit status 1 if a bit differs."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.draft_bits",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--cpu", default=TINY, help="on the CPU in float32: a shape that ships with kvforge [tiny]")
    parser.add_argument("--gpu", default="", help="on a GPU: a shape that ships with kvforge")
    parser.add_argument("--kv", default="auto", help="dtypes of KV, with commas [auto]")
    parser.add_argument("--drafters", default=",".join(DRAFTERS), help="with commas [all]")
    parser.add_argument("--tokens", type=int, default=250_000, help="of each drafter and dtype of KV [250,000]")
    parser.add_argument("--kills", type=int, default=4, help="of each drafter and dtype of KV [4]")
    parser.add_argument("--rows", type=int, default=0, help="requests at a time [16; 48 on a GPU]")
    parser.add_argument("--prompt", type=int, default=64, help="the most tokens of a prompt's own part [64]")
    parser.add_argument("--answer", type=int, default=0, help="the most tokens of an answer [128; 512 on a GPU]")
    parser.add_argument("--chance", type=float, default=0.7, help="that a draft is right [0.7]")
    parser.add_argument("--draft-layers", type=int, default=1, help="of the draft model [1]")
    parser.add_argument("--reference", help="the answers without drafts of one dtype of KV")
    parser.add_argument("--plant", action="store_true", help="accept a wrong draft now and then")
    parser.add_argument("--json", help="write the results here too")
    parser.add_argument("--keep", action="store_true", help="keep the results that the file of --json has")
    options = parser.parse_args(arguments)
    options.rows = options.rows or (48 if options.gpu else 16)
    options.answer = options.answer or (512 if options.gpu else 128)
    drafters, kinds = (each.split(",") if each else [] for each in (options.drafters, options.kv))
    if unknown := [each for each in drafters if each not in DRAFTERS]:
        parser.error(f"--drafters: {unknown[0]!r} is none of {', '.join(DRAFTERS)}")
    if options.reference and len(kinds) > 1:
        parser.error("--reference: a file has the answers of one dtype of KV")
    runs: list[dict[str, Any]] = []
    if options.keep and options.json and Path(options.json).exists():
        runs = json.loads(Path(options.json).read_text(encoding="utf-8"))["results"]["runs"]
    with tempfile.TemporaryDirectory(prefix="kvf-bits-") as folder:
        for kv in kinds:
            place = Path(folder) / kv
            place.mkdir()
            proof = Proof(options, kv, place)
            want = proof.without()
            for drafter in drafters:
                served = proof.drafted(drafter)
                found = differences(served.answers, want)
                for line in found[:SHOWN]:
                    print(line, file=sys.stderr, flush=True)
                model = options.gpu or options.cpu
                runs.append(
                    {
                        "model": model,
                        "kv": kv,
                        "drafter": drafter,
                        "requests": len(want),
                        "tokens": served.tokens,
                        "drafted": served.drafted,
                        "accepted": served.accepted,
                        "kills": served.kills,
                        "preempted": served.preempted,
                        "recomputed_tokens": served.recomputed,
                        "took_s": round(served.took_s, 1),
                        "different_requests": len(found),
                    }
                )
    if not runs:
        print(f"no drafters: {options.reference or 'no file'} has the answers", file=sys.stderr)
        return 0
    header = [name.replace("_", " ") for name in runs[0]]
    rows = [[f"{value:,}" if isinstance(value, int) else value for value in run.values()] for run in runs]
    where = "GPU" if options.gpu else "CPU"
    title = f"answers with and without drafts, dummy weights, {where}, up to {options.rows} requests at a time"
    total = sum(run["tokens"] for run in runs)
    wrong = sum(run["different_requests"] for run in runs)
    report(title, header, rows, {"tokens": total, "different_requests": wrong, "runs": runs}, options.json)
    print(f"{total:,} tokens compared, {wrong} requests differ")
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
