"""Steps with few prompt tokens beside decodes: from a captured graph, and launched one kernel after the other.

    python -m benchmarks.prompt_steps --shape qwen3.5-35b-a3b [--device auto] [--layers N] [--json FILE]

Dummy weights of a shape that ships with kvforge. A step alternates between both ways over the same pool; medians of the
time from its launch to its tokens. In a graph there are places without a token.
"""

from __future__ import annotations

import argparse
import gc
import time
from statistics import median
from typing import Any

import numpy as np

from kvforge.protocol.messages import GENERATED, RowStart, SamplingParams, Step
from kvforge.worker.attention.pool import KvPool
from kvforge.worker.device.device import open_device
from kvforge.worker.loading.model import LoadedModel
from kvforge.worker.step.prompt_graphs import CAPTURE_USES
from kvforge.worker.step.runner import ModelRunner

from .gpu_families import load
from .gpu_layers import BLOCK_SIZE
from .report import report

CONTEXT, ROUNDS = 512, 20
STEPS = ((0, 1, 32), (0, 1, 200), (16, 1, 32), (64, 1, 32), (64, 1, 200), (64, 4, 500))  # decodes, prompt rows, tokens


class Steps:
    """Steps over one pool: decodes behind CONTEXT tokens, and prompt rows behind as many."""

    def __init__(self, model: LoadedModel) -> None:
        rows = max(decodes + prompts for decodes, prompts, _ in STEPS)
        tokens = CONTEXT + max(tokens for *_, tokens in STEPS)
        width, pages = -(-tokens // BLOCK_SIZE), model.geometry.state_blocks
        self.pool = KvPool(model.geometry, rows * (width + pages), model.device)
        self.pool.zero_blocks(np.arange(self.pool.blocks, dtype=np.int32))
        own = np.arange(self.pool.blocks, dtype=np.int32).reshape(rows, width + pages)
        self._tables, self._states = own[:, :width].copy(), own[:, width:].copy() if pages else None
        self._vocabulary, self._number = model.vocab_size, 0
        self._mark = GENERATED if model.wants_kinds else 0
        self.runner = ModelRunner(
            *(model, self.pool),
            slots_max=rows,
            step_tokens_max=2048,
            step_rows_max=rows,
            table_width=width,
            graph_rows_max=rows,
        )
        self.graphs = self.runner.prompt_graphs
        for slot in range(rows):
            self._run(
                [slot],
                [0],
                [[3, 4, 5]],
                begins=(RowStart(slot=slot, request_id=slot, sampling=SamplingParams(temperature=0.0), seed=0),),
            )

    def _run(self, slots: list[int], starts: list[int], tokens: list[list[int]], **fields: Any) -> float:
        self._number += 1
        step = Step(
            self._number,
            slots=np.array(slots, np.int32),
            starts=np.array(starts, np.int32),
            counts=np.array([len(each) for each in tokens], np.int32),
            samples=np.ones(len(slots), np.int32),
            tokens=np.array([token for each in tokens for token in each], np.int32),
            **fields,
        )
        states = None if self._states is None else self._states[slots]
        began = time.perf_counter()
        outcome = self.runner.run(step, self._tables[slots], states)
        taken = time.perf_counter() - began
        assert outcome.errors == (), outcome.errors
        return taken

    def once(self, decodes: int, prompts: int, tokens: int) -> float:
        """Run a step; return its seconds."""
        each = np.random.default_rng(self._number).integers(3, self._vocabulary, tokens // prompts).tolist()
        rows = [[7 + self._mark]] * decodes + [each] * prompts
        return self._run(list(range(len(rows))), [CONTEXT] * len(rows), rows)

    def measure(self, decodes: int, prompts: int, tokens: int) -> dict[str, float]:
        """Return the medians of both ways in milliseconds."""
        assert self.graphs is not None, "steps of this model cannot be captured"
        for _ in range(CAPTURE_USES + 2):
            self.once(decodes, prompts, tokens)
        captured = self.graphs.captured
        found: dict[str, list[float]] = {"graph": [], "eager": []}
        for _ in range(ROUNDS):
            for way, times in found.items():
                self.runner._launcher.prompt_graphs = self.graphs if way == "graph" else None
                times.append(1e3 * self.once(decodes, prompts, tokens))
        self.runner._launcher.prompt_graphs = self.graphs
        assert captured == self.graphs.captured, "a graph was captured while it was timed"
        return {way: median(times) for way, times in found.items()}


def main() -> None:
    """Measure a shape, and print a table or write JSON."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", nargs="+", default=["qwen3.5-35b-a3b"])
    parser.add_argument("--layers", type=int, default=0, help="of the first layers alone; 0: all")
    parser.add_argument("--device", default="auto")
    parser.add_argument("--json", default=None)
    arguments = parser.parse_args()
    device = open_device(arguments.device)
    found: dict[str, Any] = {"device": device.name}
    for shape in arguments.shape:
        steps = Steps(load(shape, device, arguments.layers))
        for step in STEPS:
            found[f"{shape} " + "/".join(map(str, step))] = steps.measure(*step)
        steps.runner.close()
        steps.pool.close()
        del steps
        gc.collect()
        device.release_cached()
    rows = [
        [name, f"{times['eager']:.2f}", f"{times['graph']:.2f}", f"{times['eager'] / times['graph']:.2f}"]
        for name, times in found.items()
        if name != "device"
    ]
    header = ["shape, decodes / prompt rows / prompt tokens", "eager, ms", "graph, ms", "times faster"]
    report(f"steps with prompt tokens, {device.name}", header, rows, found, arguments.json)


if __name__ == "__main__":
    main()
