"""What drafts save in steps, without a model: the tasks of `benchmarks.drafts_tasks` through the coordinator's core.

    python -m benchmarks.drafts_replay [--drafts 16] [--batch 1 16] [--row-us 30] [--json FILE]
    python -m benchmarks.drafts_replay --tasks session --sessions FOLDER [--requests 32] ...

The scheduler and the lookup of drafts are the real ones. The worker writes the recorded answers, and a step takes
`--step-us` and `--row-us` for each row, a draft being a row too, as the clock of the core sees it. The time between
steps is `--way-us`, hidden where two steps are in flight. Tokens per second follow from that clock: a prediction.

Each task runs three times: without drafts, with drafts that end with the last block of their row, and with blocks for
drafts. Steps with prompt tokens do not count.

The task `session` has more requests than run together. Their prompts are cached first, as in `benchmarks.drafts`, and
all steps count, those with the few prompt tokens behind the last cached block too.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterable, Sequence
from typing import Any
from unittest.mock import patch

import msgspec

from kvforge.coordinator.core.cache.block_tables import BlockTables
from kvforge.protocol.messages import SamplingParams, Step, StepResult
from kvforge.worker.drafts.lookup import LookupDrafter
from tests.coordinator.driver import Driver, FakeWorker, fingerprint, model_info

from .drafts_sessions import SESSION, add_options, make_asked, sizes
from .drafts_tasks import TASKS, Task, make
from .report import report

BLOCK_SIZE, CONTEXT_BLOCKS, ROWS = 16, 128, 256
CONTEXT_MAX = 1 << 16  # tokens of a prompt of a session, and its answer
CHECK_EVERY = 100  # events; a check looks at every block
VOCABULARY, STEP_TOKENS = 1 << 16, 2048
MODES = ("without", "within the block", "with blocks")


class Replayer(FakeWorker):
    """A worker that writes recorded answers and proposes by lookup."""

    def __init__(self, *arguments: Any) -> None:
        super().__init__(*arguments)
        self.following: dict[int, int] = {}
        self.drafter = LookupDrafter(ROWS, self.machine.limits.context_tokens_max)

    def record(self, prompt: Iterable[int], answer: Iterable[int]) -> None:
        """Take an answer that follows a prompt."""
        context = 1
        for token in prompt:
            context = fingerprint(context, token)
        for token in answer:
            self.following[context] = token
            context = fingerprint(context, token)

    def choose(self, slot: int, context: int) -> int:  # noqa: ARG002 - the context has the slot's tokens
        """Return the recorded token; behind a wrong draft, any."""
        return self.following.get(context, 0)

    def execute(self, step: Step) -> StepResult:
        """Execute a step, and propose what follows its tokens."""
        at = 0
        for start in step.begins:
            middle, end = at + start.prompt_history, at + start.prompt_history + start.generated_history
            parts = step.history[at:middle], step.history[middle:end]
            self.drafter.begin(start.slot, *parts, start.drafts, start.shared_drafts)
            at = end
        result = super().execute(step)
        slots = result.slots.tolist()
        for slot, token in zip(slots, result.tokens.tolist(), strict=True):
            self.drafter.append(slot, [token])
        found = self.drafter.propose(list(dict.fromkeys(slots)))
        columns = {"draft_slots": found.slots, "draft_counts": found.counts, "draft_tokens": found.tokens}
        return msgspec.structs.replace(result, **columns)


def settings(blocks: int, drafts: int, context_blocks: int = CONTEXT_BLOCKS) -> dict[str, Any]:
    """Return the limits of a replay with so many blocks, and at most so many drafts of a row."""
    return {
        "block_size": BLOCK_SIZE,
        "blocks_per_sequence_max": context_blocks,
        "blocks_max": blocks,
        "sequences_max": ROWS,
        "step_rows_max": ROWS,
        "step_tokens_max": STEP_TOKENS,
        "steps_in_flight_max": 2,
        "drafts_max": drafts,
        "draft_rows_max": ROWS,
        "drafts_shared": False,
    }


def replay(
    task: Task, drafts: int, costs: argparse.Namespace, batch: int = 0, is_cached: bool = False
) -> dict[str, float]:
    """Run the requests of a task, and return what they took.

    Args:
        task: The requests.
        drafts: The most drafts of a row; 0: none.
        costs: step_us, row_us and way_us.
        batch: How many run together; 0: all.
        is_cached: Whether prompts are cached before, and all steps count.
    """
    longest = max(len(prompt) + len(answer) for prompt, answer in zip(task.prompts, task.answers, strict=True))
    context_blocks = max(CONTEXT_BLOCKS, -(-longest // BLOCK_SIZE) + 2)
    blocks = len(task.prompts) * context_blocks
    driver = Driver(**settings(blocks, drafts, context_blocks))
    driver.worker_type, driver.check_every = Replayer, CHECK_EVERY
    worker = driver.add_worker(blocks, model=model_info(vocabulary=VOCABULARY))
    assert isinstance(worker, Replayer)
    for prompt, answer in zip(task.prompts, task.answers, strict=True):
        worker.record(prompt, answer)
    batch, totals = batch or len(task.prompts), driver.machine.requests
    if is_cached:
        run(driver, worker, task.prompts, [1] * len(task.prompts), batch, costs)
    before = totals.drafted_tokens_total, totals.accepted_drafts_total, totals.drafts_total
    requests, steps = run(driver, worker, task.prompts, list(map(len, task.answers)), batch, costs)
    for request, answer in zip(requests, task.answers, strict=True):
        assert driver.answer_of(request) == answer, "an answer is not the recorded one"
    took_us = [us for us, is_decode in steps if is_cached or is_decode]
    drafted, accepted, times = (
        now - then
        for now, then in zip(
            (totals.drafted_tokens_total, totals.accepted_drafts_total, totals.drafts_total), before, strict=True
        )
    )
    found = {"steps": len(took_us), "tokens_per_s": 1e6 * sum(map(len, task.answers)) / sum(took_us)}
    return found | {"drafted": drafted, "accepted": accepted, "times_drafted": times}


def run(
    driver: Driver,
    worker: Replayer,
    prompts: Sequence[Sequence[int]],
    tokens: Sequence[int],
    batch: int,
    costs: argparse.Namespace,
) -> tuple[list[int], list[tuple[int, bool]]]:
    """Run requests, `batch` at a time: as one ends, the next is submitted.

    Args:
        driver: The coordinator's core.
        worker: Its worker.
        prompts: Their prompts.
        tokens: How many tokens each generates.
        batch: How many run together.
        costs: As in `replay`.

    Returns:
        Their ids, and of each step the microseconds with the way before it, and whether it had no prompt tokens.
    """
    greedy = SamplingParams(temperature=0.0, seed=1, ignore_eos=True)
    requests: list[int] = []
    steps: list[tuple[int, bool]] = []
    (group,) = driver.machine.cache.groups.values()
    live = driver.machine.requests.live
    while live or len(requests) < len(prompts):
        while len(live) < batch and len(requests) < len(prompts):
            number = len(requests)
            requests.append(driver.submit(prompts[number], tokens[number], sampling=greedy))
        driver.turn()
        step, is_alone = worker.inbox.popleft(), group.sent[0].sent_us >= group.result_us
        rows = int(step.counts.sum())
        took_us, way_us = costs.step_us + costs.row_us * rows, costs.way_us * is_alone
        steps.append((took_us + way_us, rows == step.slots.size + int(step.drafts.sum())))
        driver.advance(took_us + way_us)
        driver.report(worker, msgspec.structs.replace(worker.execute(step), duration_us=took_us))
    return requests, steps


def main() -> int:
    """Replay the tasks and print."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.drafts_replay",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--drafts", type=int, default=16, help="schedule.drafts_max [16]")
    parser.add_argument("--batch", type=int, nargs="+", default=[1, 16], help="requests that run together [1 16]")
    parser.add_argument("--tasks", nargs="+", choices=(*TASKS[:-1], SESSION), default=list(TASKS[:-1]))
    parser.add_argument("--tokens", type=int, default=256, help="the most of an answer")
    parser.add_argument("--prompt", type=int, default=1024, help="tokens of a prompt, about")
    parser.add_argument("--step-us", type=int, default=4000, help="of a step without rows")
    parser.add_argument("--row-us", type=int, default=30, help="of each row")
    parser.add_argument("--way-us", type=int, default=2000, help="between a result and the next step")
    parser.add_argument("--json", help="write the results here too")
    add_options(parser)
    options = parser.parse_args()
    read = {SESSION: make_asked(parser, options, VOCABULARY, CONTEXT_MAX)} if SESSION in options.tasks else {}
    rows: list[list[object]] = []
    results: list[dict[str, Any]] = []
    for name in options.tasks:
        for batch in options.batch:
            task = read.get(name) or make(name, batch, options.prompt, options.tokens)
            tokens, found = sum(map(len, task.answers)), dict[str, dict[str, float]]()
            for mode in MODES:
                with patch.object(BlockTables, "grow_to", _none if mode == MODES[1] else BlockTables.grow_to):
                    drafts = 0 if mode == MODES[0] else options.drafts
                    found[mode] = replay(task, drafts, options, batch, is_cached=name in read)
            results.append({"task": name, "batch": batch, "tokens": tokens, "modes": found} | sizes(task))
            for mode, each in found.items():
                gain = each["tokens_per_s"] / found[MODES[0]]["tokens_per_s"]
                cells = [int(each["steps"]), f"{tokens / each['steps']:.2f}", f"{gain:.2f} x"]
                rows.append([name, batch, mode, *cells, f"{each['accepted']} of {each['drafted']}"])
    header = ["task", "requests", "drafts", "steps", "tokens a step", "tokens/s, predicted", "accepted"]
    costs = f"{options.step_us} us a step, {options.row_us} us a row, {options.way_us} us between steps"
    report(f"drafts by lookup replayed, up to {options.drafts} tokens; {costs}", header, rows, results, options.json)
    return 0


def _none(*_: Any) -> bool:
    return False


if __name__ == "__main__":
    sys.exit(main())
