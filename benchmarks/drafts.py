"""Tokens per second with and without drafts, and the time of a step that verifies drafts.

    python -m benchmarks.drafts --gpu [--model llama-3.1-8b] [--json FILE]
    python -m benchmarks.drafts [--model smollm2-135m] [--threads 1] [--json FILE]
    python -m benchmarks.drafts --draft-model FOLDER [--chance 0.7] --tasks random ...
    python -m benchmarks.drafts --draft-layers 2 [--chance 0.7] --tasks random ...
    python -m benchmarks.drafts --heads mtp|eagle3 [--chance 0.7] --tasks random ...
    python -m benchmarks.drafts --tasks session --sessions FOLDER [--requests 32] [--session-prompt 8192] ...

Without a draft model, drafts are those of lookup. A draft model has dummy weights too, and may have the shape of the
model in fewer layers: its passes take their time, and each of its tokens is the recorded one with the chance
`--chance`. Heads have dummy weights too: `mtp` is one more layer of the model, and `eagle3` a layer of its own with a
vocabulary of 32,000 tokens.

Two services with the same dummy weights, with and without drafts (a coordinator, a worker and this client as
processes), replay the answers of `benchmarks.drafts_tasks`: the sampler of `benchmarks.drafts_worker` is made to
choose the recorded tokens, so that answers repeat their prompts as those of the task do, and not as dummy weights
would. Rounds alternate between the services; the idle one sleeps. Prompts are cached by a round that is not counted.
The throughput is the tokens of all answers over the time from their submission to the last end; the medians of the
rounds are compared. Tokens and log-probabilities must be equal on both services.

The task `again` has other requests in each round, and runs alone: requests are drafted from those of earlier rounds
there, and in the other tasks from themselves alone, because each round repeats the same answers.

The task `session` replays recorded sessions with their text (`benchmarks.drafts_sessions`). Their answers are short, so
that a round has `--requests` requests, `--batch` at a time: as one ends, the next is submitted.

Before that, a worker's runner alone times steps of one row beside steps of one row and 4 drafts, one at a time and in
alternation, at the same length.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from statistics import median
from time import perf_counter
from typing import Any, NamedTuple

import numpy as np

from kvforge import Client, Request, SamplingParams, Token
from kvforge.worker.loading.eagle_heads import ARCHITECTURE
from kvforge.worker.loading.source import MODEL_CONFIGS
from kvforge.worker.model_path import MTP

from .drafts_sessions import SESSION, add_options, make_asked, sizes
from .drafts_tasks import TASKS, Task, make
from .drafts_worker import FIRST_SEED
from .installation import Installation
from .report import report
from .step_plan import BLOCK_SIZE, Plan
from .step_served import wait_ready

WAIT_S = 600.0
AGAIN = TASKS[-1]
VERIFIED = 4  # drafts of the verification step
VERIFY_S = 300
STEPS, WARM = 60, 10
Answer = tuple[tuple[int, ...], tuple[float, ...]]


class Round(NamedTuple):
    """What one round measured.

    Attributes:
        speed: Tokens per second.
        steps: Steps of the worker.
        drafted: Drafted tokens that steps verified.
        accepted: Those that became tokens.
        answers: The tokens and log-probabilities of each request.
    """

    speed: float
    steps: int
    drafted: int
    accepted: int
    answers: list[Answer]


class Service:
    """A coordinator with a worker, through a client."""

    def __init__(self, client: Client) -> None:
        self._client = client

    def counts(self) -> tuple[int, int, int]:
        """Return the worker's steps, the drafts that they verified, and how many became tokens."""
        (worker,) = self._client.health().workers
        return self._client.stats().pools[0].steps, worker.drafted_total, worker.accepted_total

    def run(self, task: Task, seed: int, batch: int, tokens: int = 0, first: int = 0, requests: int = 0) -> Round:
        """Run the requests [first, first + requests) of a task, `batch` at a time.

        Args:
            task: The task.
            seed: The seed of its first request.
            batch: How many requests run together.
            tokens: The most of an answer; 0: all.
            first: The first request.
            requests: How many; 0: `batch`.
        """
        before, begin = self.counts(), perf_counter()
        numbers = range(first, first + (requests or batch))
        pending: list[Request] = []
        running: dict[Request, Iterator[Token]] = {}
        for number in numbers:
            while len(running) == batch:
                wait_for_end(running)
            request = self._client.submit(
                task.prompts[number],
                max_tokens=tokens or len(task.answers[number]),
                sampling=SamplingParams(temperature=0.0, ignore_eos=True, seed=seed + number),
            )
            pending.append(request)
            running[request] = iter(request)
        found = [request.result(WAIT_S) for request in pending]
        spent_s = perf_counter() - begin
        answers = [(tuple(each.tokens), tuple(each.logprobs)) for each in found]
        for (got, _), number in zip(answers, numbers, strict=True):
            assert list(got) == task.answers[number][: len(got)], "an answer is not the recorded one"
        steps, drafted, accepted = (now - then for now, then in zip(self.counts(), before, strict=True))
        return Round(sum(len(got) for got, _ in answers) / spent_s, steps, drafted, accepted, answers)


def wait_for_end(running: dict[Request, Iterator[Token]]) -> None:
    """Wait until a request has ended, and remove those that have. running: each with its tokens that were not read."""
    for _ in next(iter(running.values())):  # each step has a token of the oldest
        if any(request.done for request in running):
            break
    for request in [request for request in running if request.done]:
        del running[request]


def verification(options: argparse.Namespace) -> dict[str, float]:
    """Return the median milliseconds of a step of one row, and of one with VERIFIED drafts, with the runner alone."""
    from kvforge.protocol.messages import GENERATED, RowStart, Step
    from kvforge.protocol.messages import SamplingParams as WireSampling

    from .step_runner import open_runner

    plan = Plan(
        options.model, (1, 1 + VERIFIED), options.prompt, 1, 256, not options.gpu, determinism="batch-invariant"
    )
    _, model, runner = open_runner(plan, drafts=VERIFIED)
    table = np.arange(plan.context_max // BLOCK_SIZE, dtype=np.int32)[None]
    one, mark = np.ones(1, np.int32), GENERATED * model.wants_kinds
    start = RowStart(slot=0, request_id=1, sampling=WireSampling(temperature=0.0), seed=1)
    took: dict[int, list[float]] = {0: [], VERIFIED: []}
    for number in range(2 * (WARM + STEPS)):
        drafts = VERIFIED * (number % 2)
        step = Step(
            number,
            begins=(start,),
            slots=0 * one,
            starts=(options.prompt - 1) * one,
            counts=(1 + drafts) * one,
            samples=one,
            tokens=np.full(1 + drafts, 5 + mark, np.int32),
            drafts=drafts * one,
        )
        begin = perf_counter()
        outcome = runner.finish(runner.launch(step, table))
        if number >= 2 * WARM:
            took[drafts].append((perf_counter() - begin) * 1e3)
        assert not outcome.errors, outcome.errors
    return {"one_row_ms": median(took[0]), "drafts_ms": median(took[VERIFIED])}


def other_process(options: argparse.Namespace) -> dict[str, float]:
    """Return what `verification` finds in a process of its own: its memory is free afterwards."""
    command = [sys.executable, "-m", "benchmarks.drafts", "--verification", "--model", options.model]
    command += ["--prompt", str(options.prompt), *(["--gpu"] if options.gpu else [])]
    done = subprocess.run(command, stdout=subprocess.PIPE, timeout=VERIFY_S, check=True)
    return dict(json.loads(done.stdout.splitlines()[-1]))


def installation(options: argparse.Namespace, tasks: dict[str, Task], drafts: int, answers: Path) -> Installation:
    """Return a service that replays the answers of tasks, with at most so many drafts."""
    rows = max(options.batch)
    context, blocks = 0, 64
    if set(tasks) - {SESSION}:
        context = 2 * options.prompt + options.tokens + 64
        blocks += len(set(tasks) - {SESSION}) * rows * -(-context // BLOCK_SIZE)
    if SESSION in tasks:  # all prompts of a round stay cached
        task = tasks[SESSION]
        lengths = [len(prompt) + len(answer) for prompt, answer in zip(task.prompts, task.answers, strict=True)]
        context = max(context, max(lengths) + 64)
        blocks += sum(2 + -(-length // BLOCK_SIZE) for length in lengths)
    worker: dict[str, Any] = {"model": options.model, "blocks": blocks}
    if drafts and options.draft_model:
        worker["draft_model"] = options.draft_model
    if not options.gpu:
        worker |= {"device": "cpu", "dtype": "float32", "threads": options.threads}
    schedule = {
        "step_rows_max": max(64, rows),
        "drafts_max": drafts,
        "draft_rows_max": options.draft_rows,
        "step_tokens_max": 2048,
    }
    schedule |= {"drafts_shared": AGAIN in options.tasks}
    return Installation(
        context_tokens=context,
        blocks=blocks,
        schedule=schedule,
        sequences=max(64, rows, options.draft_rows if drafts else 0),
        worker=worker,
        worker_command=("benchmarks.drafts_worker", str(answers), str(options.chance)),
    )


def config_of(model: str) -> dict[str, Any]:
    """Return the configuration of a model: the name of a shape, or a folder."""
    known = MODEL_CONFIGS / f"{model}.json"
    return dict(json.loads((known if known.is_file() else Path(model) / "config.json").read_text()))


def fewer_layers(model: str, layers: int, folder: Path) -> str:
    """Write the configuration of a model in fewer layers, and return its folder.

    Args:
        model: The name of a shape, or a folder.
        layers: How many layers it has.
        folder: Where to make the folder.
    """
    place = folder / f"{Path(model).name}-{layers}-layers"
    place.mkdir()
    (place / "config.json").write_text(json.dumps(config_of(model) | {"num_hidden_layers": layers}))
    return str(place)


def eagle_head(model: str, folder: Path) -> str:
    """Write the configuration of an EAGLE-3 head of a model's size, and return its folder; see `fewer_layers`."""
    config = config_of(model)
    names = (
        "hidden_size",
        "num_attention_heads",
        "num_key_value_heads",
        "vocab_size",
        "rms_norm_eps",
    )
    own = {name: config[name] for name in names}
    own["intermediate_size"] = config.get("intermediate_size", 4 * own["hidden_size"])  # a mixture may have none
    place = folder / "eagle3"
    place.mkdir()
    named = {"architectures": [ARCHITECTURE], "model_type": "llama", "num_hidden_layers": 1}
    (place / "config.json").write_text(json.dumps(own | named | {"draft_vocab_size": min(32_000, own["vocab_size"])}))
    return str(place)


def measure(
    services: dict[str, Service], task: Task, seed: int, batch: int, firsts: list[int], requests: int
) -> tuple[dict[str, list[float]], dict[str, Round]]:
    """Return the speeds of the rounds and the last round of each service.

    Args:
        services: The services by name.
        task: The task.
        seed: The seed of its first request.
        batch: Requests that run together.
        firsts: The first request of each round, before that the first of the round that is not counted.
        requests: Requests of a round.
    """
    speeds: dict[str, list[float]] = {name: [] for name in services}
    last: dict[str, Round] = {}
    for service in services.values():  # one token caches prompts that come again
        service.run(task, seed, batch, 0 if firsts[0] != firsts[1] else 1, firsts[0], requests)
    for number, first in enumerate(firsts[1:]):
        for name in reversed(services) if number % 2 else services:
            last[name] = services[name].run(task, seed, batch, first=first, requests=requests)
            speeds[name].append(last[name].speed)
        assert last["with"].answers == last["without"].answers, "drafts have changed an answer"
    return speeds, last


def make_tasks(parser: argparse.ArgumentParser, options: argparse.Namespace) -> dict[str, Task]:
    """Return the tasks that the options ask for."""
    if AGAIN in options.tasks and len(options.tasks) > 1:
        parser.error(f"the task {AGAIN} runs alone: other tasks repeat their answers, and would be drafted from those")
    # In `again`, each round has requests of its own.
    requests = (1 + options.rounds) * sum(options.batch) if AGAIN in options.tasks else max(options.batch)
    tasks = {}
    for name in options.tasks:
        if name == SESSION:
            config = config_of(options.model)
            config = config.get("text_config", config)
            context = config.get("max_position_embeddings", options.session_prompt + options.tokens)
            tasks[name] = make_asked(parser, options, config["vocab_size"], context)
        else:
            tasks[name] = make(name, requests, options.prompt, options.tokens)
    return tasks


def main() -> int:
    """Measure and print."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.drafts", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--gpu", action="store_true", help="on a GPU; otherwise on the CPU in float32")
    parser.add_argument("--model", default="", help="a shape that ships with kvforge, or a folder")
    parser.add_argument("--draft-model", default="", help="the shape of a draft model; without it, lookup drafts alone")
    parser.add_argument("--draft-layers", type=int, default=0, help="of a draft model of the model's shape; 0: none")
    parser.add_argument("--heads", choices=("mtp", "eagle3"), help="dummy heads draft")
    parser.add_argument("--chance", type=float, default=0.7, help="that a token of the draft model is right [0.7]")
    parser.add_argument("--drafts", type=int, default=8, help="schedule.drafts_max [8]")
    parser.add_argument("--draft-rows", type=int, default=64, help="schedule.draft_rows_max [64]")
    parser.add_argument("--batch", type=int, nargs="+", default=[1, 16], help="requests that run together [1 16]")
    parser.add_argument("--tasks", nargs="+", choices=(*TASKS, SESSION), default=list(TASKS[:-1]))
    parser.add_argument("--tokens", type=int, default=256, help="the most of an answer")
    parser.add_argument("--prompt", type=int, default=1024, help="tokens of a prompt, about")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--threads", type=int, default=1, help="of each worker on the CPU [1]")
    parser.add_argument("--json", help="write the results here too")
    parser.add_argument("--verification", action="store_true", help=argparse.SUPPRESS)
    add_options(parser)
    options = parser.parse_args()
    options.model = options.model or ("llama-3.1-8b" if options.gpu else "smollm2-135m")
    if options.verification:
        print(json.dumps(verification(options)))
        return 0
    tasks = make_tasks(parser, options)
    verified = other_process(options)
    share = verified["drafts_ms"] / verified["one_row_ms"]
    print(f"1 row: {verified['one_row_ms']:.3f} ms, 1 + {VERIFIED} rows: {verified['drafts_ms']:.3f} ms, {share:.3f} x")
    rounds = 1 + options.rounds
    is_new = AGAIN in tasks  # other requests in each round
    rows: list[list[object]] = []
    results: dict[str, Any] = {"verification": verified, "tasks": []}
    if SESSION in tasks:
        results[SESSION] = sizes(tasks[SESSION])
        print(f"{SESSION}:", ", ".join(f"{name.replace('_', ' ')} {size:g}" for name, size in results[SESSION].items()))
    with tempfile.TemporaryDirectory() as folder:
        if options.draft_layers:
            options.draft_model = fewer_layers(options.model, options.draft_layers, Path(folder))
        if options.heads:
            options.draft_model = MTP if options.heads == MTP else eagle_head(options.model, Path(folder))
        answers = Path(folder) / "answers.npy"
        replayed = [answer for task in tasks.values() for answer in task.answers]
        table = np.zeros((len(replayed), options.tokens), np.int64)
        for at, answer in enumerate(replayed):
            table[at, : len(answer)] = answer
        np.save(answers, table)
        services: dict[str, Service] = {}
        with (
            installation(options, tasks, 0, answers) as off,
            installation(options, tasks, options.drafts, answers) as on,
        ):
            for name, place in (("without", off), ("with", on)):
                client = Client(place.endpoint, timeout_s=WAIT_S, connect_timeout_s=60.0)
                wait_ready(client, place)
                services[name] = Service(client)
            seed = FIRST_SEED
            for name, task in tasks.items():
                requests = len(task.prompts) if name == SESSION else 0
                for batch in options.batch:
                    before = rounds * sum(options.batch[: options.batch.index(batch)])
                    firsts = [before + number * batch if is_new else 0 for number in range(rounds)]
                    speeds, last = measure(services, task, seed, batch, firsts, requests)
                    without, drafted = (median(speeds[side]) for side in ("without", "with"))
                    counts = {side: each.steps for side, each in last.items()}
                    used = last["with"]
                    results["tasks"].append(
                        {"task": name, "batch": batch, "tokens_per_s": speeds, "steps": counts}
                        | {"drafted": used.drafted, "accepted": used.accepted}
                    )
                    cells = [f"{without:.1f}", f"{drafted:.1f}", f"{drafted / without:.2f} x"]
                    rows.append([name, batch, *cells, *counts.values(), f"{used.accepted} of {used.drafted}"])
                    print(*rows[-1], file=sys.stderr, flush=True)
                seed += len(task.answers)
    header = ["task", "requests", "tokens/s without", "with drafts", "gain", "steps without", "steps with", "accepted"]
    where = "GPU" if options.gpu else f"CPU, {options.threads} threads a worker"
    drafter = (
        f"lookup and {Path(options.draft_model).name}, right in {options.chance:.0%}"
        if options.draft_model
        else "lookup"
    )
    title = (
        f"drafts by {drafter}, up to {options.drafts} tokens, replayed answers, {options.model}, dummy weights, {where}"
    )
    report(title, header, rows, results, options.json)
    return 0


if __name__ == "__main__":
    sys.exit(main())
