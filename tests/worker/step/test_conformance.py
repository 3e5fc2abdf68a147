"""SmolLM2-135M-Instruct gives the greedy float32 continuations of transformers, token for token."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from kvforge.protocol.messages import RowStart, SamplingParams, Step
from kvforge.worker.attention.pool import KvPool
from kvforge.worker.device.device import Device
from kvforge.worker.loading.load import load_model
from kvforge.worker.loading.model import LoadedModel
from kvforge.worker.step.runner import ModelRunner
from tests.amount import examples, thinned

pytestmark = pytest.mark.model

BLOCK_SIZE = 16
SAMPLE = json.loads((Path(__file__).parents[2] / "data" / "smollm2_sample.json").read_text(encoding="utf-8"))
CASES: list[dict[str, Any]] = SAMPLE["cases"]
# All in `make test-all`. In `make test` as many as let each row go on in another block.
STEPS = min(len(CASES[0]["tokens"]), examples(96))


@pytest.fixture(scope="module")
def smollm2(smollm2_path: Path, cpu: Device) -> LoadedModel:
    with smollm2_path.open("rb") as file:
        assert hashlib.file_digest(file, "sha256").hexdigest() == SAMPLE["gguf_sha256"]
    return load_model(smollm2_path, dtype="float32", device=cpu, block_size=BLOCK_SIZE)


def generate(model: LoadedModel, cases: list[dict[str, Any]], steps: int) -> list[list[int]]:
    """Generate all cases in one batch with interleaved, shuffled block tables."""
    rows = len(cases)
    lengths = np.array([len(case["prompt_tokens"]) for case in cases], np.int32)
    width = -(-(int(lengths.max()) + steps) // BLOCK_SIZE)
    pool = KvPool(model.geometry, rows * width, model.device)
    total = int(lengths.sum())
    runner = ModelRunner(model, pool, slots_max=rows, step_tokens_max=total, step_rows_max=rows)
    tables = np.random.default_rng(0).permutation(rows * width).astype(np.int32).reshape(rows, width)
    slots, ones = np.arange(rows, dtype=np.int32), np.ones(rows, np.int32)
    prompt = np.concatenate([np.array(case["prompt_tokens"], np.int32) for case in cases])
    begins = tuple(
        RowStart(slot=i, request_id=i, sampling=SamplingParams(temperature=0.0), seed=0) for i in range(rows)
    )
    step = Step(0, begins=begins, slots=slots, starts=0 * slots, counts=lengths, samples=ones, tokens=prompt)
    columns = []
    for index in range(steps):
        outcome = runner.run(step, tables)
        assert outcome.errors == ()
        assert outcome.slots.tolist() == slots.tolist()
        columns.append(outcome.tokens)
        step = Step(index + 1, slots=slots, starts=lengths + np.int32(index), counts=ones, samples=ones, tokens=-ones)
    pool.close()
    return np.stack(columns, axis=1).tolist()


def agree(case: dict[str, Any], tokens: list[int]) -> int:
    """Compare up to the first divergence, which must be a near tie; return the number of matching steps."""
    for index, (got, want) in enumerate(zip(tokens, case["tokens"], strict=False)):
        if got != want:
            assert case["margin"][index] < SAMPLE["min_margin"], f"{case['id']}: step {index} gave {got}, not {want}"
            return index
    return len(tokens)


# Here no rows share blocks, so that a second prompt behind the same prefix is one more of 34 blocks.
ALONE = [case for case in CASES if case["id"] != "shared-1"]
BATCHED = CASES if thinned(2) == 1 else ALONE


def test_all_prompts_batched(smollm2: LoadedModel) -> None:
    matched = [agree(c, t) for c, t in zip(BATCHED, generate(smollm2, BATCHED, STEPS), strict=True)]
    assert matched == [STEPS] * len(BATCHED)  # in float32 no case of the sample has a near tie


# In `make test` one token, a whole block, and five blocks.
IN_MAKE_TEST = ("len-1", "len-16", "uni-emoji")


@pytest.mark.parametrize(
    "case",
    [pytest.param(case, marks=[] if case["id"] in IN_MAKE_TEST else pytest.mark.soak, id=case["id"]) for case in ALONE],
)
def test_each_prompt_alone(case: dict[str, Any], smollm2: LoadedModel) -> None:
    # The prompt of one token fills its first block, and goes on in another. All tokens of all are compared above.
    steps = 18 if len(case["prompt_tokens"]) == 1 else 5
    assert agree(case, generate(smollm2, [case], steps)[0]) == steps
