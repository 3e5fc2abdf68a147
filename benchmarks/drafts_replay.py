"""What drafts save in steps, without a model: the tasks of `benchmarks.drafts_tasks` through the coordinator's core.

    python -m benchmarks.drafts_replay [--drafts 16] [--batch 1 16] [--row-us 30] [--json FILE]

The scheduler and the lookup of drafts are the real ones. The worker writes the recorded answers, and a step takes
`--step-us` and `--row-us` for each row, a draft being a row too, as the clock of the core sees it. The time between
steps is `--way-us`, hidden where two steps are in flight. Tokens per second follow from that clock: a prediction.

Each task runs three times: without drafts, with drafts that end with the last block of their row, and with blocks for
drafts.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterable
from typing import Any
from unittest.mock import patch

import msgspec

from kvforge.coordinator.core.cache.block_tables import BlockTables
from kvforge.protocol.messages import SamplingParams, Step, StepResult
from kvforge.worker.drafts.lookup import LookupDrafter
from tests.coordinator.driver import Driver, FakeWorker, fingerprint, model_info

from .drafts_tasks import TASKS, Task, make
from .report import report

BLOCK_SIZE, CONTEXT_BLOCKS, ROWS = 16, 128, 256
VOCABULARY, STEP_TOKENS = 1 << 16, 2048
MODES = ("without", "within the block", "with blocks")


class Replayer(FakeWorker):
    """A worker that writes recorded answers and proposes by lookup."""

    def __init__(self, *arguments: Any) -> None:
        super().__init__(*arguments)
        self.following: dict[int, int] = {}
        self.drafter = LookupDrafter(ROWS, CONTEXT_BLOCKS * BLOCK_SIZE)

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


def settings(blocks: int, drafts: int) -> dict[str, Any]:
    """Return the limits of a replay with so many blocks, and at most so many drafts of a row."""
    return {
        "block_size": BLOCK_SIZE,
        "blocks_per_sequence_max": CONTEXT_BLOCKS,
        "blocks_max": blocks,
        "sequences_max": ROWS,
        "step_rows_max": ROWS,
        "step_tokens_max": STEP_TOKENS,
        "steps_in_flight_max": 2,
        "drafts_max": drafts,
        "draft_rows_max": ROWS,
        "drafts_shared": False,
    }


def replay(task: Task, drafts: int, options: argparse.Namespace) -> dict[str, float]:
    """Run the requests of a task together, and return what they took."""
    driver = Driver(**settings(len(task.prompts) * CONTEXT_BLOCKS, drafts))
    driver.worker_type = Replayer
    worker = driver.add_worker(len(task.prompts) * CONTEXT_BLOCKS, model=model_info(vocabulary=VOCABULARY))
    assert isinstance(worker, Replayer)
    greedy = SamplingParams(temperature=0.0, seed=1, ignore_eos=True)
    requests = []
    for prompt, answer in zip(task.prompts, task.answers, strict=True):
        worker.record(prompt, answer)
        requests.append(driver.submit(prompt, len(answer), sampling=greedy))
    decode_us = steps = 0
    (group,) = driver.machine.cache.groups.values()
    while driver.machine.requests.live:
        driver.turn()
        step, is_alone = worker.inbox.popleft(), group.sent[0].sent_us >= group.result_us
        rows = step.slots.size + int(step.drafts.sum())
        took_us, way_us = options.step_us + options.row_us * rows, options.way_us * is_alone
        if step.counts.sum() == rows:  # no prompt tokens
            steps, decode_us = steps + 1, decode_us + took_us + way_us
        driver.advance(took_us + way_us)
        driver.report(worker, msgspec.structs.replace(worker.execute(step), duration_us=took_us))
    for request, answer in zip(requests, task.answers, strict=True):
        assert driver.answer_of(request) == answer, "an answer is not the recorded one"
    tokens, totals = sum(map(len, task.answers)), driver.machine.requests
    found = {"steps": steps, "tokens_per_s": 1e6 * tokens / decode_us, "drafted": totals.drafted_tokens_total}
    return found | {"accepted": totals.accepted_drafts_total, "times_drafted": totals.drafts_total}


def main() -> int:
    """Replay the tasks and print."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.drafts_replay",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--drafts", type=int, default=16, help="schedule.drafts_max [16]")
    parser.add_argument("--batch", type=int, nargs="+", default=[1, 16], help="requests that run together [1 16]")
    parser.add_argument("--tasks", nargs="+", choices=TASKS[:-1], default=list(TASKS[:-1]))
    parser.add_argument("--tokens", type=int, default=256, help="the most of an answer")
    parser.add_argument("--prompt", type=int, default=1024, help="tokens of a prompt, about")
    parser.add_argument("--step-us", type=int, default=4000, help="of a step without rows")
    parser.add_argument("--row-us", type=int, default=30, help="of each row")
    parser.add_argument("--way-us", type=int, default=2000, help="between a result and the next step")
    parser.add_argument("--json", help="write the results here too")
    options = parser.parse_args()
    rows: list[list[object]] = []
    results: list[dict[str, Any]] = []
    for name in options.tasks:
        for batch in options.batch:
            task = make(name, batch, options.prompt, options.tokens)
            tokens, found = sum(map(len, task.answers)), dict[str, dict[str, float]]()
            for mode in MODES:
                with patch.object(BlockTables, "grow_to", _none if mode == MODES[1] else BlockTables.grow_to):
                    found[mode] = replay(task, 0 if mode == MODES[0] else options.drafts, options)
            results.append({"task": name, "batch": batch, "tokens": tokens, "modes": found})
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
