"""Cost of answers with a grammar: their masks, and tokens a second beside answers without, at 64 rows.

    python -m benchmarks.structured [--rows 64] [--steps 300] [--tokenizer smollm2-135m] [--json FILE]
    python -m benchmarks.structured --runner llama-3.1-8b [--context 1024] ...      # on a GPU: the worker's own runner

Masks: each row is a random walk through its grammar with a real tokenizer; a row that ends restarts. Measured for a
row alone, and for all rows in one call, as in a step. Compiling: the first compilation of each grammar.
Pace: steps run at the pace of an 8B table (`loadtest/fleet`), each launched before the previous one ends, as in the
worker: the host receives the tokens, advances the grammars and computes the masks while the next pass runs; host work
that does not fit delays the device. Waiting is real, the device is simulated.
Runner: a model with random weights on this machine's device, with a grammar in each row and in none.
"""

from __future__ import annotations

import argparse
import json
import lzma
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.report import report
from kvforge.loadtest.fleet import step_times
from kvforge.protocol.messages import NO_INT32, Grammar, Int32Array, RowStart, SamplingParams, Step
from kvforge.text.tokenizer import Tokenizer
from kvforge.worker.sampling.grammar import Grammars
from kvforge.worker.sampling.grammar_tokens import GrammarTokens, grammar_tokens

TABLE, CONTEXT = "h200-8b", 1024
SCHEMAS = Path(__file__).parents[1] / "tests" / "data" / "json_schemas" / "schemas.jsonl.xz"
TOOL = "Flights_4_SearchRoundtripFlights"
REAL = ("ninjs-1.3.json", "traefik-v2.json", "appsscript.json", "chart.json", "toleration-v1.json", TOOL)
OTHERS = {
    "any object": Grammar(kind="json_object"),
    "a date and a sentence": Grammar(kind="regex", text=r"\d{4}-\d\d-\d\d: [A-Za-z ,]{10,200}\."),
    "arithmetic": Grammar(kind="lark", text='start: e\ne: t (("+" | "-") t)*\nt: /[0-9]+/ | "(" e ")"'),
}
FREE_STEPS = 200  # steps of an answer before it is forced to end
WARM_STEPS = 20


class Rows:
    """Rows with several grammars that choose any allowed token."""

    def __init__(self, grammars: list[Grammar], rows: int, tokens: GrammarTokens, vocab: int, seed: int = 0) -> None:
        assert tokens.tokens is not None, tokens.problem
        self._given, self._vocab = grammars, vocab
        self._all, self._rng = Grammars(rows, vocab, lambda: tokens), np.random.default_rng(seed)
        self._ends = np.array(tokens.tokens.eos_tokens)
        self.masks = np.zeros((rows, self._all.words), np.int32)
        self._age = np.zeros(rows, np.int64)
        self._keys = self._rng.random((rows, vocab), dtype=np.float32)
        for slot in range(rows):
            self._begin(slot)
        self.compile_ms = self._compile()

    def fill(self, *slots: int) -> float:
        """Compute the masks of these rows, or of all; return seconds."""
        rows = [self._all.row(slot) for slot in slots or range(len(self.masks))]
        began = time.perf_counter()
        problems = self._all.fill(rows, self.masks[: len(rows)])
        took = time.perf_counter() - began
        assert not problems, problems
        return took

    def choose(self) -> list[int]:
        """Return a token of each row's mask: the end token once the answer is long enough, else any."""
        bits = np.unpackbits(self.masks.view(np.uint8), axis=1, bitorder="little")[:, : self._vocab]
        shifted = np.roll(self._keys, int(self._rng.integers(self._vocab)), axis=1)
        tokens: list[int] = (shifted * bits).argmax(axis=1).tolist()
        for slot in np.flatnonzero(bits[:, self._ends[0]] & (self._age > self._rng.integers(20, FREE_STEPS))).tolist():
            tokens[slot] = int(self._ends[0])
        return tokens

    def accept(self, tokens: list[int]) -> float:
        """Advance each row by its token; return seconds, without those of rows that restart."""
        rows = [self._all.row(slot) for slot in range(len(self.masks))]
        began = time.perf_counter()
        for row, token in zip(rows, tokens, strict=True):
            row.accept(token)
        took = time.perf_counter() - began
        self._age += 1
        for slot in np.flatnonzero(np.isin(tokens, self._ends) | (self._age > 2 * FREE_STEPS)).tolist():
            self._begin(slot)
        self._all.compile()
        return took

    def _begin(self, slot: int) -> None:
        self._all.begin(slot, self._given[slot % len(self._given)], NO_INT32)
        self._age[slot] = 0

    def _compile(self) -> float:
        began = time.perf_counter()
        assert not self._all.compile()
        return (time.perf_counter() - began) * 1e3


def masks(grammar: Grammar, rows: int, steps: int, tokens: GrammarTokens, vocab: int) -> dict[str, float]:
    """Return milliseconds: compiling, a row's mask alone, and a step's masks and tokens for all rows."""
    walk, alone, together, followed = Rows([grammar], rows, tokens, vocab), list[float](), list[float](), list[float]()
    for step in range(steps):
        if step >= WARM_STEPS:
            alone += [walk.fill(slot) for slot in range(step % 4, rows, 4)]
        together.append(walk.fill())
        followed.append(walk.accept(walk.choose()))
    ms = np.array(alone) * 1e3
    return {
        "compile_ms": walk.compile_ms,
        "row_p50_ms": float(np.percentile(ms, 50)),
        "row_p99_ms": float(np.percentile(ms, 99)),
        "row_max_ms": float(ms.max()),
        "step_p50_ms": statistics.median(together[WARM_STEPS:]) * 1e3,
        "step_p99_ms": float(np.percentile(together[WARM_STEPS:], 99)) * 1e3,
        "follow_p50_ms": statistics.median(followed[WARM_STEPS:]) * 1e3,
    }


def pace(step_s: float, rows: int, steps: int, host: Callable[[], object]) -> float:
    """Return the tokens a second of a device with passes of `step_s`, where `host` must finish before a pass
    samples."""
    free_at = began = time.perf_counter() + step_s
    for _ in range(steps):
        _wait_until(free_at)
        passed = time.perf_counter() + step_s  # the queued next pass has started
        host()
        free_at = max(passed, time.perf_counter())
    _wait_until(free_at)
    return rows * steps / (time.perf_counter() - began)


def _wait_until(at: float) -> None:
    left = at - time.perf_counter() - 2e-3
    if left > 0:
        time.sleep(left)
    while time.perf_counter() < at:
        pass


def beside(grammars: list[Grammar], rows: int, steps: int, tokens: GrammarTokens, vocab: int) -> dict[str, float]:
    """Tokens a second at the table's pace, with a grammar in each row and in none, in alternation."""
    starts, ones = np.full(rows, CONTEXT, np.int32), np.ones(rows, np.int32)
    step_s = step_times.load(TABLE).step_s(starts, ones)
    walk, host_ms = Rows(grammars, rows, tokens, vocab), list[float]()
    walk.fill()
    chosen: list[list[int]] = [walk.choose()]

    def shaped() -> None:
        began = time.perf_counter()
        walk.accept(chosen[-1])
        walk.fill()
        host_ms.append((time.perf_counter() - began) * 1e3)

    found: dict[str, list[float]] = {"free": [], "shaped": []}
    for _ in range(5):
        found["free"].append(pace(step_s, rows, steps // 5, lambda: None))
        for _ in range(steps // 5):
            found["shaped"].append(pace(step_s, rows, 1, shaped))
            chosen[:] = [walk.choose()]  # the device's work, which costs no time here
    free, with_grammar = (statistics.fmean(found[name]) for name in ("free", "shaped"))
    return {
        "step_ms": step_s * 1e3,
        "host_p50_ms": statistics.median(host_ms),
        "host_p99_ms": float(np.percentile(host_ms, 99)),
        "free_tokens_per_s": free,
        "shaped_tokens_per_s": with_grammar,
        "share": with_grammar / free,
    }


@contextmanager
def model_folder(model: str, tokenizer: str) -> Iterator[Path]:
    """Write a folder with the shape of a model and another model's tokenizer; yield it."""
    from kvforge.worker.loading.source import MODEL_CONFIGS

    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        config = Path(model) if Path(model).exists() else MODEL_CONFIGS / f"{model}.json"
        spoken = Tokenizer.load(tokenizer)
        # The tokenizer's own end token: the model's may be outside the tokenizer's vocabulary.
        end = max(spoken.special_tokens.values())
        shape = {**json.loads(config.read_text(encoding="utf-8")), "eos_token_id": end}
        (folder / "config.json").write_text(json.dumps(shape), encoding="utf-8")
        (folder / "tokenizer.json").write_text(spoken.as_json(), encoding="utf-8")
        (folder / "tokenizer_config.json").write_text('{"tokenizer_class": "PreTrainedTokenizerFast"}')
        yield folder


def by_runner(model: str, tokenizer: str, rows: int, steps: int, context: int) -> dict[str, Any]:
    """Tokens a second of the worker's runner, steps launched ahead, with a grammar in every row and in none."""
    from benchmarks.step_runner import welcome
    from kvforge.worker.attention.pool import KvPool
    from kvforge.worker.device.device import open_device
    from kvforge.worker.loading.load import load_model
    from kvforge.worker.step.memory import make_runner

    device = open_device("auto")
    with model_folder(model, tokenizer) as folder:
        loaded = load_model(folder, load_format="dummy", dtype="auto", device=device, block_size=16)
        width = -(-(context + steps + WARM_STEPS + 2) // 16)
        pool = KvPool(loaded.geometry, rows * width, device)
        runner = make_runner(loaded, pool, welcome(rows, rows, width), rows)
        if runner.graphs is not None:
            runner.graphs.capture_one(runner.graphs.size_for(rows))
        problem = runner.shaping.grammars.prepare()
        assert not problem, problem
    tables = np.arange(rows * width, dtype=np.int32).reshape(rows, width)
    grammar = Grammar(kind="json_schema", text='{"type": "array", "items": {"type": "object"}, "minItems": 1000}')

    grammars = runner.shaping.grammars
    grammars.begin(0, grammar, np.zeros(0, np.int32))
    grammars.submit([0])
    grammars.wait(120.0)  # rows are deferred until compiled
    grammars.forget()

    def run(given: Grammar | None) -> float:
        slots, ones = np.arange(rows, dtype=np.int32), np.ones(rows, np.int32)
        sampling = SamplingParams(temperature=1.0, grammar=given)
        begins = tuple(RowStart(slot=slot, request_id=slot, sampling=sampling, seed=slot) for slot in range(rows))
        under_way, began = [], 0.0
        for index in range(WARM_STEPS + steps):
            starts: Int32Array = np.full(rows, context + index, np.int32)
            tokens = np.full(rows, -1 if index else 5, np.int32)
            step = Step(index, () if index else begins, slots, starts, ones, ones, tokens)
            under_way.append(runner.launch(step, tables))
            if len(under_way) > 1:
                outcome = runner.finish(under_way.pop(0))
                assert not outcome.errors, outcome.errors[0]
            if index == WARM_STEPS:
                began = time.perf_counter()
        runner.finish(under_way.pop())
        return rows * (steps - 1) / (time.perf_counter() - began)

    rounds = [(run(None), run(grammar)) for _ in range(3)]
    free, shaped = (statistics.median(each) for each in zip(*rounds, strict=True))
    print(runner.meter.line(), file=sys.stderr)
    runner.close()
    return {"device": device.name, "free_tokens_per_s": free, "shaped_tokens_per_s": shaped, "share": shaped / free}


def chosen_grammars() -> dict[str, Grammar]:
    """Real schemas of several sizes, and grammars of the other kinds."""
    found: dict[str, Grammar] = {}
    for line in lzma.decompress(SCHEMAS.read_bytes()).decode().splitlines():
        real = json.loads(line)
        if real["name"] in REAL:
            found[real["name"]] = Grammar(kind="json_schema", text=json.dumps(real["schema"]))
    return found | OTHERS


def main() -> None:
    """Measures and prints."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", type=int, default=64, help="[64]")
    parser.add_argument("--steps", type=int, default=300, help="[300]")
    parser.add_argument("--tokenizer", default="smollm2-135m", help="a model's name or folder [smollm2-135m]")
    parser.add_argument("--runner", metavar="MODEL", help="the shape of a model, or its config.json")
    parser.add_argument("--context", type=int, default=CONTEXT, help=f"tokens behind each row [{CONTEXT}]")
    parser.add_argument("--json", metavar="FILE", help="write the numbers here too")
    options = parser.parse_args()
    rows, steps = options.rows, options.steps
    if options.runner:
        found = by_runner(options.runner, options.tokenizer, rows, steps, options.context)
        report(f"{rows} rows of {options.runner}", list(found), [list(found.values())], found, options.json)
        return
    tokenizer = Tokenizer.load(options.tokenizer)
    vocab = tokenizer.vocab_size
    with model_folder("llama-3.1-8b", options.tokenizer) as folder:
        tokens = GrammarTokens(grammar_tokens(str(folder), vocab, (0,)).tokens)  # no trial process
    grammars = chosen_grammars()
    by_grammar = {name: masks(each, rows, steps, tokens, vocab) for name, each in grammars.items()}
    together = beside(list(grammars.values()), rows, steps, tokens, vocab)
    results = {"rows": rows, "steps": steps, "vocab": vocab, "table": TABLE, "masks": by_grammar, "pace": together}
    columns = ["compile_ms", "row_p50_ms", "row_p99_ms", "row_max_ms", "step_p50_ms", "step_p99_ms", "follow_p50_ms"]
    lines = [
        [name, f"{len(grammars[name].text)}", *(f"{found[column]:.3f}" for column in columns)]
        for name, found in by_grammar.items()
    ]
    report(
        f"grammars, {rows} rows, a vocabulary of {vocab}", ["grammar", "bytes", *columns], lines, results, options.json
    )
    print(", ".join(f"{name} {value:.3f}" for name, value in together.items()))


if __name__ == "__main__":
    main()
