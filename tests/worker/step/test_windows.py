"""Models with layers that keep a window: the bits of layers that keep everything, and transformers' own results."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch

from kvforge.protocol.errors import InvalidConfiguration, ProtocolError
from kvforge.protocol.messages import GENERATED, RowStart, SamplingParams, Step, WorkerWelcome
from kvforge.worker.attention.pool import KvPool
from kvforge.worker.attention.windows import WindowLimits, WindowTables
from kvforge.worker.device.device import Device
from kvforge.worker.loading.model import LoadedModel
from kvforge.worker.loading.serving_kernels import serving_kernels
from kvforge.worker.step import memory
from kvforge.worker.step.memory import check_states, ring_blocks
from kvforge.worker.step.runner import ModelRunner, StepOutcome
from tests.pairs import every_pair
from tests.worker.attention.window_rows import PagedRows

BLOCK_SIZE, WINDOW, CONTEXT = 16, 20, 1024
DRAFTS = 4
LIMITS = WindowLimits(ahead=512, blocks_max=CONTEXT // BLOCK_SIZE, columns_max=1024)
SLIDING, FULL = "sliding_attention", "full_attention"
COMMON = {"max_position_embeddings": CONTEXT, "sliding_window": WINDOW}
MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "gemma3": ("gemma3_text", {"head_dim": 16, "num_hidden_layers": 6, "layer_types": [SLIDING] * 5 + [FULL]}),
    "gpt_oss": (
        "gpt_oss",
        {
            "head_dim": 16,
            "num_hidden_layers": 4,
            "layer_types": [SLIDING, FULL] * 2,
            "num_local_experts": 4,
            "num_experts_per_tok": 4,
            "rope_parameters": {"rope_type": "default", "rope_theta": 1e4},
        },
    ),
    "qwen2": (  # Llama's layers, which a CPU runs in one call
        "qwen2",
        {"num_hidden_layers": 3, "layer_types": [FULL, SLIDING, SLIDING], "use_sliding_window": True},
    ),
    "cohere2": ("cohere2", {"head_dim": 16, "num_hidden_layers": 4, "layer_types": [SLIDING] * 3 + [FULL]}),
}
Row = tuple[int, int, list[int]]  # slot, start, tokens; the last token of a row is sampled after


class Bench:
    """A runner, and the pages that a coordinator would give to its rows."""

    def __init__(self, model: LoadedModel, graph_rows_max: int = 0) -> None:
        pages = 1 + model.geometry.window_pages
        self.pool = KvPool(model.geometry, 2 * pages * (CONTEXT // BLOCK_SIZE), model.device)
        self.rows = PagedRows(self.pool, 2, CONTEXT // BLOCK_SIZE, LIMITS.ahead)
        limits = {"slots_max": 2 + DRAFTS, "step_tokens_max": 512, "step_rows_max": 2 + DRAFTS, "drafts_max": DRAFTS}
        self.runner = ModelRunner(model, self.pool, **limits, graph_rows_max=graph_rows_max)

    def run(
        self, rows: list[Row], drafts: tuple[int, ...] = (), keep: int = 0, most: int = 0, propose: int = 0
    ) -> StepOutcome:
        """Run a step.

        Args:
            rows: The rows.
            drafts: Of each row.
            keep: How many of the first row's tokens may not count.
            most: The most drafts of rows that begin.
            propose: How many a draft model proposes for each row.
        """
        slots, starts, tokens = (list(each) for each in zip(*rows, strict=True))
        counts = [len(each) for each in tokens]
        for slot, start, count in zip(slots, starts, counts, strict=True):
            self.rows.reserve(slot, start, count)
        begins = tuple(
            RowStart(slot=slot, request_id=slot, sampling=SamplingParams(temperature=0.0), seed=0, drafts=most)
            for slot, start in zip(slots, starts, strict=True)
            if start == 0
        )
        numbers = {"slots": slots, "starts": starts, "counts": counts, "samples": [1] * len(slots)}
        arrays = {name: np.array(each, np.int32) for name, each in numbers.items()}
        arrays["drafts"] = np.array(drafts, np.int32)
        flat = np.concatenate([np.array(each, np.int32) for each in tokens])
        step = Step(0, begins=begins, tokens=flat, propose=propose, **arrays)
        width = -(-max(start + count for start, count in zip(starts, counts, strict=True)) // BLOCK_SIZE)
        tables = self.rows.tables[slots, :width]
        outcome = self.runner.run(step, tables, windows=self.rows.windows(slots, starts, counts))
        assert outcome.errors == ()
        for slot, start, count in zip(slots, starts, counts, strict=True):
            self.rows.release(slot, start + count - keep)
        return outcome


def prompt(count: int) -> list[int]:
    return np.random.default_rng(count).integers(3, 97, count).tolist()


def results(bench: Bench, decodes: int) -> list[tuple[int, float]]:
    """Return a greedy answer of slot 0 behind a prompt in chunks, beside another sequence."""
    text, other = prompt(560), prompt(45)
    bench.run([(0, 0, text[:300]), (1, 0, other[:7])])
    bench.run([(1, 7, other[7:]), (0, 300, text[300:537])])
    found = bench.run([(0, 537, text[537:])])
    answer = [(int(found.tokens[0]), float(found.logprobs[0]))]
    last = int(bench.run([(1, 45, [5])]).tokens[0])
    for at in range(decodes):
        outcome = bench.run([(1, 46 + at, [last]), (0, 560 + at, [answer[-1][0]])])
        last = int(outcome.tokens[0])
        answer.append((int(outcome.tokens[1]), float(outcome.logprobs[1])))
    return answer


@pytest.mark.parametrize(
    ("name", "kv_dtype", "graph_rows_max"),
    every_pair([*((name, "auto") for name in MODELS), ("gemma3", "int8"), ("gpt_oss", "fp8")], [0, 4]),
)
def test_answers_have_the_bits_of_whole_layers_and_are_transformers_own(
    name: str,
    kv_dtype: str,
    graph_rows_max: int,
    tiny: Callable[..., LoadedModel],
    eager_logits: Callable[..., torch.Tensor],
) -> None:
    model_type, fields = MODELS[name]
    settings = {"block_size": BLOCK_SIZE, "kv_dtype": kv_dtype, **COMMON, **fields}
    kept = tiny(model_type, windows=LIMITS, **settings)
    assert kept.geometry.window == WINDOW and kept.fused is not None
    layers = fields["layer_types"]
    text = f"{layers.count(SLIDING)} of {len(layers)} layers keep the KV of {WINDOW} tokens"
    assert serving_kernels(kept)["windows"] == text
    whole = tiny(model_type, **settings)
    assert whole.geometry.window == 0 and "windows" not in serving_kernels(whole)
    assert whole.geometry.bytes_per_block > kept.geometry.bytes_per_block
    found = results(Bench(kept, graph_rows_max), 20)  # the row at 560 tokens takes one page more
    assert found == results(Bench(whole), 20)
    if kv_dtype == "auto":
        text = prompt(560) + [token for token, _ in found[:-1]]
        wanted = torch.log_softmax(eager_logits(whole, text)[559:], -1)
        assert [token for token, _ in found] == wanted.argmax(-1).tolist()
        differences = wanted.max(-1).values - torch.tensor([logprob for _, logprob in found])
        assert float(differences.abs().max()) < 1e-4


def test_layers_of_transformers_read_their_window(tiny: Callable[..., LoadedModel]) -> None:
    """Without a description too: each layer takes the rows of its kind."""
    model_type, fields = MODELS["qwen2"]
    kept = tiny(model_type, windows=LIMITS, block_size=BLOCK_SIZE, **COMMON, **fields)
    whole = tiny(model_type, block_size=BLOCK_SIZE, **COMMON, **fields)
    for model in (kept, whole):
        object.__setattr__(model, "fused", None)
    assert results(Bench(kept), 10) == results(Bench(whole), 10)


def test_a_coordinator_without_room_for_a_ring_gets_whole_layers(
    tiny: Callable[..., LoadedModel], caplog: pytest.LogCaptureFixture
) -> None:
    model_type, fields = MODELS["gemma3"]
    narrow = WindowLimits(ahead=512, blocks_max=CONTEXT // BLOCK_SIZE, columns_max=100)
    with caplog.at_level("INFO", "worker"):
        model = tiny(model_type, windows=narrow, block_size=BLOCK_SIZE, **COMMON, **fields)
    assert model.geometry.window == 0
    assert "needs 180 pages beside its table, limits.state_blocks_max is 100" in caplog.text


def welcome(**fields: Any) -> WorkerWelcome:
    numbers = {"slots_max": 4, "blocks_per_sequence_max": 64, "step_tokens_max": 512, "step_rows_max": 4}
    text = {"rid": 1, "version": 1, "boot": "", "tables_path": "", "block_size": BLOCK_SIZE}
    return WorkerWelcome(**(text | numbers | {"window_ahead": 512, "state_blocks_max": 1024} | fields))


def test_another_coordinator_must_have_room_for_the_ring(tiny: Callable[..., LoadedModel]) -> None:
    model_type, fields = MODELS["gemma3"]
    model = tiny(model_type, windows=LIMITS, block_size=BLOCK_SIZE, **COMMON, **fields)
    assert ring_blocks(model, welcome()) == -(-(WINDOW + 512) // BLOCK_SIZE) + 2
    check_states(model, welcome())
    with pytest.raises(InvalidConfiguration, match="ring of windows of a sequence of gemma3_text takes 180 blocks"):
        check_states(model, welcome(state_blocks_max=179))
    with pytest.raises(ProtocolError, match="knows no windows"):
        check_states(model, welcome(window_ahead=0))


def test_the_largest_step_is_tried_with_window_pages(
    tiny: Callable[..., LoadedModel], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The free memory is a fixed number here: other processes change a machine's own meanwhile."""
    model_type, fields = MODELS["gemma3"]
    model = tiny(model_type, windows=LIMITS, block_size=BLOCK_SIZE, **COMMON, **fields)
    tried: list[tuple[Step, WindowTables | None, StepOutcome]] = []
    run = ModelRunner.run

    def recorded(runner: ModelRunner, step: Step, *tables: Any) -> StepOutcome:
        outcome = run(runner, step, *tables)
        tried.append((step, tables[-1], outcome))
        return outcome

    monkeypatch.setattr(ModelRunner, "run", recorded)
    monkeypatch.setattr(Device, "free_bytes", lambda _: 10**9)
    assert memory._trial_bytes(model, welcome(), 0) == 0
    ((step, windows, outcome),) = tried
    assert step.counts.tolist() == [509, 1, 1, 1] and not outcome.errors
    assert windows is not None and windows.pages.shape == (4, 32, model.geometry.window_pages)


def test_a_row_without_its_window_fails_alone(tiny: Callable[..., LoadedModel]) -> None:
    model_type, fields = MODELS["gemma3"]
    model = tiny(model_type, windows=LIMITS, block_size=BLOCK_SIZE, **COMMON, **fields)
    bench = Bench(model)
    bench.run([(0, 0, prompt(40)), (1, 0, prompt(45))])
    bench.rows.reserve(0, 40, 1)
    bench.rows.reserve(1, 45, 1)
    windows = bench.rows.windows([0, 1], [40, 45], [1, 1])
    assert windows is not None
    pages = windows.pages.copy()
    pages[0, 0, 2] = bench.pool.blocks
    step = Step(
        1,
        slots=np.array([0, 1], np.int32),
        starts=np.array([40, 45], np.int32),
        counts=np.ones(2, np.int32),
        samples=np.ones(2, np.int32),
        tokens=np.array([4, 5], np.int32),
    )
    outcome = bench.runner.run(step, bench.rows.tables[:, :3], windows=WindowTables(windows.first, pages))
    (error,) = outcome.errors
    assert error.slot == 0 and error.error.fields["field"] == "windows" and outcome.slots.tolist() == [1]
    broken = bench.runner.run(step, bench.rows.tables[:, :3])
    assert {each.slot for each in broken.errors} == {0, 1}


@pytest.mark.parametrize(("name", "graph_rows_max"), every_pair(MODELS, [0, 2 + DRAFTS]))
def test_answers_with_drafts_have_the_bits_of_answers_without(
    name: str, graph_rows_max: int, tiny: Callable[..., LoadedModel]
) -> None:
    """Drafts go on behind the last block, and blocks that hold no token are taken back: windows see what is right."""
    model_type, fields = MODELS[name]
    model = tiny(model_type, windows=LIMITS, block_size=BLOCK_SIZE, **COMMON, **fields)
    mark, text, want = GENERATED * model.wants_kinds, prompt(45), list[tuple[int, float]]()
    bench = Bench(model, graph_rows_max)
    outcome = bench.run([(0, 0, text)])
    for at in range(45, 100):
        want.append((int(outcome.tokens[0]), float(outcome.logprobs[0])))
        outcome = bench.run([(0, at, [want[-1][0] + mark])])
    bench, found, accepted, returned = Bench(model, graph_rows_max), list[tuple[int, float]](), 0, 0
    outcome = bench.run([(0, 0, text)])
    while len(found) < len(want):
        found += zip(outcome.tokens.tolist(), outcome.logprobs.tolist(), strict=True)
        at = 44 + len(found)
        drafted = [token + mark for token, _ in want[len(found) :][:DRAFTS]]
        right = len(found) % (1 + len(drafted))
        drafted[right:] = [(token - mark + 1) % 97 + mark for token in drafted[right:]]
        drafts = len(drafted)
        outcome = bench.run([(0, at, [found[-1][0] + mark, *drafted])], (drafts,) if drafts else (), drafts - right)
        assert len(outcome.tokens) == 1 + right
        held = bench.rows.held[0]
        bench.rows.give_back(0, at + 1 + right)
        returned += held - bench.rows.held[0]
        accepted += right
    assert accepted > 20 and returned > 0
    del found[len(want) :]
    assert [token for token, _ in found] == [token for token, _ in want]
    if not model.unsteady:
        assert found == want
