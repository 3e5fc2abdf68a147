"""Steps with few prompt tokens from captured graphs give the bits of eager steps. On a CPU a graph is the function."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from random import Random
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from kvforge.protocol.messages import GENERATED, SamplingParams
from kvforge.worker.attention.mixed_batch import MixedSize
from kvforge.worker.device.device import Device, open_device
from kvforge.worker.kernels.prompt_reference import PlainPrompts
from kvforge.worker.loading.load import load_model
from kvforge.worker.loading.model import LoadedModel
from kvforge.worker.step import prompt_graphs
from kvforge.worker.step.prompt_graphs import CAPTURE_USES, PROMPT_ROWS, PROMPT_TOKENS, PromptGraphs
from kvforge.worker.step.runner import StepOutcome
from tests.worker.loading.random_models import HYBRIDS
from tests.worker.loading.test_mixer_prompts import FEW, LAYERS, interpreted
from tests.worker.step import test_graphs, test_windows
from tests.worker.step.company import Alone, Company, compare, draw
from tests.worker.step.test_graphs import Decoding, OtherRank, gpu
from tests.worker.step.test_runner import BLOCK_SIZE, begin, replace_start
from tests.worker.step.test_states import Bench, play

Tiny = Callable[..., LoadedModel]
RNG = np.random.default_rng(11)
USES = "kvforge.worker.step.prompt_graphs.CAPTURE_USES"


@pytest.fixture(params=["cpu", pytest.param("gpu", marks=pytest.mark.gpu)])
def device(request: pytest.FixtureRequest) -> Device:
    return open_device("cpu") if request.param == "cpu" else gpu()


@pytest.fixture
def model(device: Device, write_config: Callable[..., Path]) -> LoadedModel:
    folder = write_config("llama")
    return load_model(folder, load_format="dummy", dtype="float32", device=device, block_size=BLOCK_SIZE)


@pytest.fixture
def pair(model: LoadedModel) -> Iterator[tuple[Decoding, Decoding]]:
    """Return a runner with graphs, and one without."""
    both = Decoding(model, graph_rows_max=32), Decoding(model, graph_rows_max=0)
    yield both
    for each in both:
        each.runner.close()
        each.pool.close()


@pytest.fixture
def replays(monkeypatch: pytest.MonkeyPatch) -> list[MixedSize]:
    """Return the sizes of the graphs that run, each of which is captured at its first step."""
    monkeypatch.setattr(USES, 0)
    found, launch = list[MixedSize](), PromptGraphs.launch

    def noted(graphs: PromptGraphs, rows: Any) -> Any:
        decodes = int((rows.generated[np.cumsum(rows.counts) - 1]).sum())
        size = graphs._size_for(len(rows.tokens) - decodes, decodes)
        assert size is not None
        found.append(size)
        return launch(graphs, rows)

    monkeypatch.setattr(PromptGraphs, "launch", noted)
    return found


def prompts_of(decoding: Decoding) -> PromptGraphs:
    assert decoding.runner.prompt_graphs is not None
    return decoding.runner.prompt_graphs


def starts(slots: list[int], sampling: SamplingParams | None = None) -> dict[str, Any]:
    given = sampling or SamplingParams(temperature=0.0)
    return {"begins": tuple(replace_start(begin(slot, seed=slot), sampling=given) for slot in slots)}


def text(count: int) -> list[int]:
    return RNG.integers(3, 97, count).tolist()


def same(got: StepOutcome, want: StepOutcome, model: LoadedModel) -> None:
    """Compare results: bit by bit, unless the model's bits depend on the number of rows on this CPU."""
    test_graphs.same(got, want)
    if not model.unsteady:
        assert got.logprobs.tolist() == want.logprobs.tolist()


def both(pair: tuple[Decoding, Decoding], rows: list[tuple[int, list[int], int]], **fields: Any) -> StepOutcome:
    """Run a step on both runners, compare, and return the result."""
    got, want = (each.runner.finish(each.launch(rows, **fields)) for each in pair)
    same(got, want, pair[0].runner.model)
    return got


def test_prompts_beside_decodes_in_any_order(pair: tuple[Decoding, Decoding], replays: list[MixedSize]) -> None:
    both(pair, [(3, text(9), 1), (1, text(14), 1)], **starts([1, 3]))
    both(pair, [(1, [-1], 1), (0, text(7), 0), (3, [-1], 1), (2, text(2), 1)], **starts([0, 2]))
    both(pair, [(2, [-1], 1), (0, text(20), 1), (1, [-1], 1), (3, [-1], 1)])
    for _ in range(2):
        both(pair, [(slot, [-1], 1) for slot in (0, 1, 2, 3)])
    sizes = [MixedSize(PROMPT_ROWS, 32, count) for count in (0, 8, 8)]
    assert replays == sizes and prompts_of(pair[0]).captured == 2


def test_a_graph_holds_what_a_larger_step_left(pair: tuple[Decoding, Decoding], replays: list[MixedSize]) -> None:
    slots = list(range(8))
    both(pair, [(slot, text(4), 1) for slot in slots], **starts(slots))
    both(pair, [(slot, [-1], 1) for slot in slots] + [(9, text(29), 1), (8, text(2), 0)], **starts([9, 8]))
    both(pair, [(8, text(1), 1), (2, [-1], 1)])
    both(pair, [(slot, [-1], 1) for slot in (8, 9, 2, 0)] + [(10, text(3), 1)], **starts([10]))
    ahead = pair[0].runner.model.wants_kinds  # others take a prompt's single token for a decode
    assert replays == [MixedSize(PROMPT_ROWS, 32, count) for count in (0, *[8] * (2 + ahead))]


def test_rows_that_are_not_plain_are_sampled_behind_it(
    pair: tuple[Decoding, Decoding], replays: list[MixedSize]
) -> None:
    filtered = SamplingParams(temperature=0.9, top_k=5, presence_penalty=0.5, logprobs=2)
    both(pair, [(0, text(5), 1), (1, text(6), 1)], **starts([0], filtered))
    begins = (*starts([2], filtered)["begins"], *starts([3])["begins"])
    both(pair, [(0, [-1], 1), (2, text(4), 1), (3, text(6), 1), (1, [-1], 0)], begins=begins)
    both(pair, [(2, [-1], 1), (0, [-1], 1), (3, [-1], 1), (4, text(3), 1)], **starts([4]))
    assert len(replays) == 3


def test_what_a_graph_does_not_hold_runs_eagerly(pair: tuple[Decoding, Decoding], replays: list[MixedSize]) -> None:
    slots = list(range(PROMPT_ROWS + 1))
    both(pair, [(slot, text(3), 1) for slot in slots], **starts(slots))  # too many prompt rows
    asked = {"scored": np.arange(2, dtype=np.int32), "following": np.array([4, 5], np.int32)}
    both(pair, [(21, [3, 4, 5], 1)], **starts([21], SamplingParams(temperature=0.0, prompt_logprobs=0)), **asked)
    assert replays == []


def test_a_graph_is_captured_in_idle_time_or_at_the_second_step(pair: tuple[Decoding, Decoding]) -> None:
    prompts = prompts_of(pair[0])
    for slot in range(CAPTURE_USES):
        both(pair, [(slot, text(5), 1)], **starts([slot]))
        assert prompts.captured == 0
    both(pair, [(CAPTURE_USES, text(5), 1)], **starts([CAPTURE_USES]))
    assert prompts.captured == 1
    both(pair, [(0, [-1], 1), (10, text(20), 1), (11, text(20), 0)], **starts([10, 11]))
    assert prompts.captured == 1 and prompts.capture_missing() and prompts.captured == 2
    assert MixedSize(PROMPT_ROWS, 64, 8) in prompts._graphs, "the one that was missing is first"
    for count in range(3, len(prompts.sizes) + 1):
        assert prompts.capture_missing() and prompts.captured == count
    assert not prompts.capture_missing()


def test_a_start_captures_the_smallest_for_a_limited_time(pair: tuple[Decoding, Decoding]) -> None:
    prompts = prompts_of(pair[0])
    prompts.capture(0.0)
    assert prompts.captured <= 1
    prompts.capture(60.0)
    assert prompts.captured == len(prompts.sizes) == len(PROMPT_TOKENS) * 3  # 0, 8 or 32 decodes


@pytest.mark.parametrize(
    ("problem", "left"), [(torch.OutOfMemoryError("none left"), (32,)), (RuntimeError("cannot"), ())]
)
def test_a_failed_capture_leaves_smaller_graphs_or_none(
    problem: Exception, left: tuple[int, ...], pair: tuple[Decoding, Decoding], monkeypatch: pytest.MonkeyPatch
) -> None:
    prompts = prompts_of(pair[0])

    def fail(*_: Any) -> Any:
        raise problem

    monkeypatch.setattr(type(pair[0].runner.model.device), "capture", fail)
    monkeypatch.setattr(USES, 0)
    both(pair, [(0, text(25), 1), (1, text(25), 1)], **starts([0, 1]))
    assert {size.prompt_tokens for size in prompts.sizes} == set(left) and prompts.captured == 0


@pytest.mark.parametrize(
    ("says", "problems", "left"),
    [
        ((True, True) * 6, {}, [32, 64, 128]),
        ((True, True, True, False, True), {}, [32]),  # the other rank lacks memory for 64 tokens
        ((True, True, True, False, False), {}, []),  # and has no graph at all
        ((True, True, True, True, True), {64: RuntimeError("it waits")}, []),
        ((True, True, True, True, True), {64: torch.OutOfMemoryError("planted")}, [32]),
        ((False,), {}, [32, 64, 128]),  # out of time: captured on demand
    ],
)
def test_ranks_have_the_same_graphs(says: tuple[bool, ...], problems: dict[int, Exception], left: list[int]) -> None:
    """If only one rank padded a step, it would wait for the other rank forever."""
    graphs = PromptGraphs.__new__(PromptGraphs)
    model: Any = SimpleNamespace(ranks=OtherRank(*says), device=SimpleNamespace(release_cached=lambda: None))
    graphs._model, graphs._tokens, graphs._decodes, graphs._graphs = model, (32, 64, 128), (0,), {}

    def capture(size: MixedSize) -> Any:
        if size.prompt_tokens in problems:
            raise problems[size.prompt_tokens]
        return size

    graphs._capture = capture  # type: ignore[method-assign]
    graphs.capture(60.0)
    assert list(graphs._tokens) == left
    assert [size.prompt_tokens for size in graphs._graphs if size in graphs.sizes] == (left if len(says) > 1 else [])


def test_two_steps_under_way(pair: tuple[Decoding, Decoding], replays: list[MixedSize]) -> None:
    found = []
    for each in pair:
        each.runner.finish(each.launch([(0, [5, 6, 7], 1)], **starts([0])))
        pending = [each.launch([(0, [-1], 1), (slot, [4, slot, 9], 1)], **starts([slot])) for slot in (1, 2)]
        found.append([each.runner.finish(step) for step in pending])
    for got, want in zip(*found, strict=True):
        same(got, want, pair[0].runner.model)
    assert len(replays) == 3


# gpt-oss has experts too, beside sinks and windows.
@pytest.mark.parametrize("model_type", ["qwen3", pytest.param("qwen3_moe", marks=pytest.mark.soak), "gpt_oss"])
def test_company_changes_no_bit(model_type: str, tiny: Tiny, replays: list[MixedSize]) -> None:
    """behaviours 15, 28: prompts, decodes, forks, evictions and deaths in random batches, from graphs."""
    experts = {} if model_type == "qwen3" else {"num_local_experts": 4, "num_experts_per_tok": 2}
    model, random = tiny(model_type, block_size=16, **experts), Random(3)
    if model.unsteady:
        pytest.skip(f"not promised here: {model.unsteady}")
    requests = [draw(random, number, [text(30), text(60)], 60, model.vocab_size) for number in range(8)]
    company, alone = Company(model, random, 8, 256, 8), Alone(model, 0)
    try:
        requests += company.play(requests, forks=2, deaths=1)
        assert not compare(alone, requests)
    finally:
        company.close()
        alone.close()
    assert {size.decodes for size in replays} == {0, 8} and {size.prompt_tokens for size in replays} >= {32, 64}


@pytest.mark.filterwarnings("ignore:.*encountered in:RuntimeWarning:triton.*")  # padding computes with any numbers
@pytest.mark.parametrize(
    ("way", "name"),
    [("plain", "lfm2"), pytest.param("plain", "qwen3_next", marks=pytest.mark.soak), ("Triton", "qwen3_next")],
)
def test_recurrent_states_have_the_same_bits(
    way: str, name: str, tiny: Tiny, replays: list[MixedSize], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Through checkpoints, forks, rewinds and recomputation: see `test_states.play`."""
    model_type, fields = HYBRIDS[name]
    if way == "Triton":
        pytest.importorskip("triton")
        from kvforge.worker.attention.triton_attention import is_interpreted

        if not is_interpreted():
            pytest.skip("needs Triton's interpreter")
        fields = fields | FEW | {"layer_types": LAYERS[name]}
    model = tiny(model_type, block_size=16, **fields)
    assert model.fused is not None
    form = PlainPrompts if way == "plain" else interpreted
    monkeypatch.setattr(type(model.fused.operations), "for_prompts", lambda _self, _dtype: form)
    if way == "plain":
        assert play(model, graph_rows_max=4) == play(model)
        assert {size.decodes for size in replays} == {0} and {size.prompt_tokens for size in replays} >= {32, 64, 128}
    graphed, eager = Bench(model, graph_rows_max=4), Bench(model)
    for rows in (
        [(0, 0, text(70), 1), (1, 0, text(20), 1), (2, 0, text(63), 0)],
        [(1, 20, [7 + GENERATED], 1), (2, 63, text(2), 1), (3, 0, text(65), 0), (0, 70, [8 + GENERATED], 1)],
        [(3, 65, text(30), 1), (2, 65, [9 + GENERATED], 1), (0, 71, [9 + GENERATED], 1), (4, 0, text(1), 1)],
        # Prompt tokens and generated ones in one row, and two generated ones of a sequence.
        [(4, 1, [5, 6, 7 + GENERATED], 1), (0, 72, [9 + GENERATED], 1)],
        [(4, 4, [5 + GENERATED, 6 + GENERATED], 1), (3, 95, text(3), 1)],
    ):
        same(graphed.run(rows), eager.run(rows), model)
    sizes = [(size.prompt_tokens, size.decodes) for size in replays[-3:]]
    assert sizes == [(256, 0), (128, 4), (32, 4)]


@pytest.mark.parametrize("name", ["gemma3", "gpt_oss"])
def test_layers_that_keep_a_window_have_the_same_bits(
    name: str, device: Device, write_config: Callable[..., Path], replays: list[MixedSize]
) -> None:
    model_type, fields = test_windows.MODELS[name]
    model = load_model(
        write_config(model_type, **test_windows.COMMON, **fields),
        load_format="dummy",
        dtype="float32" if device.computes_on_cores else "bfloat16",
        device=device,
        block_size=test_windows.BLOCK_SIZE,
        windows=test_windows.LIMITS,
    )
    assert model.geometry.window and model.fused is not None
    graphed, eager = test_windows.Bench(model, graph_rows_max=4), test_windows.Bench(model)
    assert test_windows.results(graphed, 5) == test_windows.results(eager, 5)
    for rows in ([(0, 565, [7]), (1, 51, text(40))], [(1, 91, text(300)), (0, 566, [8])], [(1, 391, text(3))]):
        same(graphed.run(rows), eager.run(rows), model)
    sizes = [(size.prompt_tokens, size.decodes) for size in replays]
    if not model.wants_kinds:  # otherwise the tokens would have to be marked, and are prompts
        assert sizes == [(512, 0), (512, 0), (32, 0), (64, 4), (512, 4), (32, 0)]
    assert {tokens for tokens, _ in sizes} == {32, 64, 512}


def test_a_mixer_whose_prompts_run_row_by_row_has_no_such_graphs(tiny: Tiny) -> None:
    model_type, fields = HYBRIDS["granite"]
    model = tiny(model_type, block_size=16, kernels=False, **fields)
    assert not prompt_graphs.can_capture(model, Decoding(model, 0).pool)
