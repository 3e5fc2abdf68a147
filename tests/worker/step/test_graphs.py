"""Decode steps from captured graphs give the results of eager steps. On a CPU a graph is the function itself."""

from __future__ import annotations

import gc
import json
from collections import Counter, deque
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from kvforge.protocol.messages import SamplingParams, Step
from kvforge.worker.attention import ReferenceAttention
from kvforge.worker.attention.pool import KvPool
from kvforge.worker.device.device import Device, open_device
from kvforge.worker.loading import determinism
from kvforge.worker.loading.load import load_model
from kvforge.worker.loading.model import LoadedModel
from kvforge.worker.step.graphs import CAPTURE_USES, DecodeGraphs, bucket_sizes, start_sizes
from kvforge.worker.step.runner import ModelRunner, PendingStep, StepOutcome
from tests.worker.conftest import TINY
from tests.worker.step.test_runner import BLOCK_SIZE, begin, i4, replace_start

SLOTS, WIDTH = 40, 8
RNG = np.random.default_rng(5)
PROMPTS = [RNG.integers(3, 97, 1 + n % 9).tolist() for n in range(SLOTS)]


class Decoding:
    """A runner with or without graphs over a pool full of NaN; each slot owns `width` blocks.

    The first `common` blocks of all slots are those of slot 0.
    """

    def __init__(
        self, model: LoadedModel, graph_rows_max: int, rows_max: int = 32, width: int = WIDTH, common: int = 0
    ) -> None:
        self.width, self.common = width, common
        self.pool = KvPool(model.geometry, width * SLOTS, model.device)
        for cache in self.pool.tensors():
            cache.fill_(float("nan"))
        limits = {"slots_max": SLOTS, "step_tokens_max": 512, "step_rows_max": rows_max}
        self.runner = ModelRunner(model, self.pool, **limits, table_width=width, graph_rows_max=graph_rows_max)
        self.lengths = np.zeros(SLOTS, np.int32)

    def launch(self, rows: list[tuple[int, list[int], int]], **fields: Any) -> PendingStep:
        """rows: (slot, tokens, sample)."""
        slots, tokens, samples = zip(*rows, strict=True)
        counts = i4(*map(len, tokens))
        starts = self.lengths[list(slots)].copy()
        self.lengths[list(slots)] += counts
        flat = i4(*[token for part in tokens for token in part])
        step = Step(0, slots=i4(*slots), starts=starts, counts=counts, samples=i4(*samples), tokens=flat, **fields)
        tables = np.array([range(self.width * slot, self.width * (slot + 1)) for slot in slots], np.int32)
        tables[:, : self.common] = np.arange(self.common)
        tables[:, -(-int(self.lengths[list(slots)].max()) // self.pool.block_size) :] = -7  # must not be read
        return self.runner.launch(step, tables)

    def start(self, slots: list[int], sampling: SamplingParams | None = None) -> StepOutcome:
        starts = tuple(
            replace_start(begin(s, seed=s), sampling=sampling or SamplingParams(temperature=0.0)) for s in slots
        )
        return self.runner.finish(self.launch([(slot, PROMPTS[slot], 1) for slot in slots], begins=starts))

    def decode(self, slots: list[int]) -> StepOutcome:
        return self.runner.finish(self.launch([(slot, [-1], 1) for slot in slots]))


def gpu() -> Device:
    device = open_device("auto")
    if not device.runs_kernels:
        pytest.skip("no GPU here")
    return device


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


def graphs_of(decoding: Decoding) -> Any:
    assert decoding.runner.graphs is not None
    return decoding.runner.graphs


def same(got: StepOutcome, want: StepOutcome) -> None:
    assert got.errors == want.errors == ()
    assert got.slots.tolist() == want.slots.tolist()
    assert got.tokens.tolist() == want.tokens.tolist()
    assert got.logprobs.tolist() == pytest.approx(want.logprobs.tolist(), abs=1e-4)
    assert got.top_tokens.tolist() == want.top_tokens.tolist()


@pytest.mark.parametrize(
    ("rows_max", "sizes"),
    [
        (1, (1,)),
        (3, (1, 2, 3)),
        (8, (1, 2, 4, 8)),
        (20, (1, 2, 4, 8, 16, 20)),
        (64, (1, 2, 4, 8, 16, 24, 32, 40, 48, 56, 64)),
    ],
)
def test_buckets(rows_max: int, sizes: tuple[int, ...]) -> None:
    assert bucket_sizes(rows_max) == sizes
    assert bucket_sizes(4096)[-3:] == (448, 480, 512)


@pytest.mark.parametrize("count", [1, 2, 3, 4, 5, 8, 9, 16, 17, 31, 32])
def test_a_graph_gives_what_the_step_gives_without_it(count: int, pair: tuple[Decoding, Decoding]) -> None:
    graphed, eager = pair
    slots = list(range(count))[::-1]
    same(graphed.start(slots), eager.start(slots))
    for _ in range(3):
        same(graphed.decode(slots), eager.decode(slots))
    assert graphs_of(graphed).captured == 1


def test_batches_that_grow_and_shrink_across_buckets(pair: tuple[Decoding, Decoding]) -> None:
    graphed, eager = pair
    slots = list(range(30))
    for each in pair:
        each.start(slots)
    for count in (30, 3, 30, 1, 17, 8, 9, 2, 30):
        chosen = sorted(RNG.permutation(30)[:count].tolist())
        same(graphed.decode(chosen), eager.decode(chosen))
    assert sorted(graphs_of(graphed)._buckets) == [1, 4, 8, 32], "17, 9 and 2 rows ran in graphs of up to twice as many"


def test_padding_writes_nowhere(pair: tuple[Decoding, Decoding]) -> None:
    graphed, eager = pair
    slots = [3, 4, 5, 6, 7]  # in a bucket of 8
    for each in pair:
        each.start(slots)
        for _ in range(4):
            each.decode(slots)
    for got, want in zip(graphed.pool.tensors(), eager.pool.tensors(), strict=True):
        assert torch.equal(got.isnan(), want.isnan())
        assert torch.allclose(got.nan_to_num(), want.nan_to_num(), atol=1e-4)


def test_what_a_larger_step_left_is_not_read_by_a_smaller_one(pair: tuple[Decoding, Decoding]) -> None:
    """The same bucket, first full, then with padding in place of rows."""
    graphed, eager = pair
    slots = list(range(8))
    for each in pair:
        each.start(slots)
        each.decode(slots)
    before = [cache.clone() for cache in graphed.pool.tensors()]
    same(graphed.decode(slots[:5]), eager.decode(slots[:5]))
    for cache, old in zip(graphed.pool.tensors(), before, strict=True):
        gone = slice(5 * WIDTH, None)
        assert torch.equal(cache[gone].nan_to_num(7.0), old[gone].nan_to_num(7.0))
    same(graphed.decode(slots), eager.decode(slots))


SAMPLINGS = [
    SamplingParams(temperature=0.0),
    SamplingParams(temperature=1.2),
    SamplingParams(temperature=0.0, logprobs=3),
    SamplingParams(temperature=1.1, top_k=20, top_p=0.9),
    SamplingParams(temperature=0.0, frequency_penalty=1.5),
    SamplingParams(temperature=0.0, logit_bias=((5, 2.0),)),
    SamplingParams(temperature=0.0),
]


@pytest.mark.parametrize("kernels", [False, True])
def test_rows_that_are_not_plain_are_sampled_behind_the_graph(kernels: bool, pair: tuple[Decoding, Decoding]) -> None:
    graphed, eager = pair
    if kernels and not graphed.pool.device.runs_kernels:
        pytest.importorskip("triton")  # its interpreter
        graphed.runner._state.runs_kernels = True
    for slot, sampling in enumerate(SAMPLINGS):
        same(graphed.start([slot], sampling), eager.start([slot], sampling))
    mixed = [(slot, [-1] if slot else [7, 8], 1) for slot in range(len(SAMPLINGS))]  # not a decode step
    same(graphed.runner.finish(graphed.launch(mixed)), eager.runner.finish(eager.launch(mixed)))
    for slots in ([0, 1, 2, 3, 4, 5, 6], [6, 5, 4, 3, 2, 1, 0], [1, 3], [0, 6], [2]):
        for _ in range(2):
            same(graphed.decode(slots), eager.decode(slots))


def test_rows_that_are_not_sampled_and_chunks(pair: tuple[Decoding, Decoding]) -> None:
    graphed, eager = pair
    for each in pair:
        each.start([0, 1, 2])
    rows = [(0, [-1], 1), (5, [9], 0), (1, [-1], 1)]  # one token of an incomplete prompt
    begins = (begin(5),)
    same(
        graphed.runner.finish(graphed.launch(rows, begins=begins)),
        eager.runner.finish(eager.launch(rows, begins=begins)),
    )
    rows = [(5, [8, 7, 6], 1), (0, [-1], 1)]  # a chunk: not a decode step
    same(graphed.runner.finish(graphed.launch(rows)), eager.runner.finish(eager.launch(rows)))
    same(graphed.decode([5, 0, 1]), eager.decode([5, 0, 1]))


def test_two_steps_under_way(pair: tuple[Decoding, Decoding]) -> None:
    graphed, eager = pair
    slots = list(range(12))
    same(graphed.start(slots), eager.start(slots))
    under_way = [graphed.launch([(slot, [-1], 1) for slot in slots])]
    for index in range(12, 4, -1):
        slots = slots[:index]
        under_way.append(graphed.launch([(slot, [-1], 1) for slot in slots]))
        same(graphed.runner.finish(under_way.pop(0)), eager.decode(list(range(min(12, index + 1)))))
    same(graphed.runner.finish(under_way.pop()), eager.decode(slots))


def test_a_row_that_is_not_finite_is_found_in_a_graph(pair: tuple[Decoding, Decoding], model: LoadedModel) -> None:
    graphed, _ = pair
    graphed.start([0, 1, 2])
    for cache in graphed.pool.tensors():
        cache[WIDTH] = float("nan")  # the first block of slot 1
    first = graphed.launch([(slot, [-1], 1) for slot in (0, 1, 2)])
    second = graphed.launch([(slot, [-1], 1) for slot in (0, 1, 2)])
    for outcome in (graphed.runner.finish(first), graphed.runner.finish(second)):
        assert [error.slot for error in outcome.errors] == [1]
        assert "not finite" in outcome.errors[0].error.message
        assert outcome.slots.tolist() == [0, 2]


def test_capturing_without_memory_leaves_fewer_graphs(
    pair: tuple[Decoding, Decoding], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    graphed, eager = pair
    graphs, capture = graphs_of(graphed), Device.capture
    monkeypatch.setattr(Device, "capture", lambda *_: (_ for _ in ()).throw(torch.OutOfMemoryError("planted")))
    assert not graphs.capture_one(32)
    assert graphs.sizes[-1] == 24
    monkeypatch.setattr(Device, "capture", capture)
    graphs.capture()
    assert graphs.captured == len(graphs.sizes) == 6
    assert "no memory for the graph of 32 decodes" in caplog.text
    slots = list(range(30))  # more rows than any graph
    same(graphed.start(slots), eager.start(slots))
    same(graphed.decode(slots), eager.decode(slots))
    same(graphed.decode(slots[:20]), eager.decode(slots[:20]))


def test_a_model_that_cannot_be_captured_runs_without(
    pair: tuple[Decoding, Decoding], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    graphed, eager = pair
    monkeypatch.setattr(Device, "capture", lambda *_: (_ for _ in ()).throw(RuntimeError("it waits for the device")))
    graphs_of(graphed).capture()
    assert graphs_of(graphed).sizes == ()
    assert "it waits for the device" in caplog.text
    same(graphed.start([1, 2]), eager.start([1, 2]))
    same(graphed.decode([1, 2]), eager.decode([1, 2]))


def test_nothing_is_captured_when_time_is_up(pair: tuple[Decoding, Decoding]) -> None:
    graphed, eager = pair
    graphs_of(graphed).capture(seconds=-1.0)
    assert graphs_of(graphed).captured == 0
    same(graphed.start([1, 2, 3]), eager.start([1, 2, 3]))
    same(graphed.decode([1, 2, 3]), eager.decode([1, 2, 3]))
    assert graphs_of(graphed).captured == 1


def test_a_start_captures_few_graphs_that_hold_every_step(pair: tuple[Decoding, Decoding]) -> None:
    assert start_sizes(bucket_sizes(400)) == (1, 2, 4, 8, 16, 32, 64, 128, 256, 400)
    graphed, eager = pair
    graphs = graphs_of(graphed)
    graphs.capture(few=True)
    assert sorted(graphs._buckets) == [1, 2, 4, 8, 16, 32]
    slots = list(range(20))  # their own graph has 24 rows
    same(graphed.start(slots), eager.start(slots))
    for _ in range(2):
        same(graphed.decode(slots), eager.decode(slots))
    assert 24 not in graphs._buckets, "it ran in the graph of 32 rows"


def test_a_size_that_is_used_often_gets_its_own_graph(pair: tuple[Decoding, Decoding]) -> None:
    """One capture at one step, and the tokens before, at and after it are those without graphs."""
    graphed, eager = pair
    graphs, slots, captured = graphs_of(graphed), list(range(20)), []
    graphs.capture(few=True)
    same(graphed.start(slots), eager.start(slots))
    graphs._uses[24] = CAPTURE_USES - 2
    for _ in range(5):
        same(graphed.decode(slots), eager.decode(slots))
        captured.append(24 in graphs._buckets)
    assert captured == [False, False, True, True, True]


def test_missing_graphs_are_captured_one_at_a_time_the_most_used_first(pair: tuple[Decoding, Decoding]) -> None:
    graphed, eager = pair
    graphs, slots = graphs_of(graphed), list(range(20))
    graphs.capture(few=True)
    graphs._sizes = sorted({*graphs._sizes, 12, 28})
    same(graphed.start(slots), eager.start(slots))
    same(graphed.decode(slots), eager.decode(slots))
    seen = []
    for more in (True, True, False, False):
        assert graphs.capture_missing() is more
        seen.append([size for size in (12, 24, 28) if size in graphs._buckets])
    assert seen[0] == [24]
    assert [len(each) for each in seen] == [1, 2, 3, 3]
    same(graphed.decode(slots), eager.decode(slots))
    same(graphed.decode(slots[:10]), eager.decode(slots[:10]))


def test_a_missing_graph_that_cannot_be_captured_is_left_out(
    pair: tuple[Decoding, Decoding], monkeypatch: pytest.MonkeyPatch
) -> None:
    graphed, _ = pair
    graphs = graphs_of(graphed)
    graphs.capture(few=True)
    monkeypatch.setattr(Device, "capture", lambda *_: (_ for _ in ()).throw(torch.OutOfMemoryError("planted")))
    assert graphs.capture_missing() is False
    assert graphs.sizes == (1, 2, 4, 8, 16, 32)


# ------------------------------------------------------------------------------------------------------- on a GPU only


@pytest.fixture
def wide(write_config: Callable[..., Path]) -> LoadedModel:
    """Return two layers of a real model's width in bfloat16, on the GPU."""
    shape = {"hidden_size": 1024, "intermediate_size": 2048, "num_attention_heads": 8, "head_dim": 128}
    fields = TINY | shape | {"vocab_size": 32_000, "max_position_embeddings": 4096, "initializer_range": 0.02}
    device = gpu()
    folder = write_config("llama")
    (folder / "config.json").write_text(json.dumps(fields | {"model_type": "llama"}))
    return load_model(folder, load_format="dummy", dtype="bfloat16", device=device, block_size=16)


@pytest.mark.gpu
def test_what_copies_from_the_host_is_never_captured(wide: LoadedModel, caplog: pytest.LogCaptureFixture) -> None:
    """The reference plans on the host: captured, it would attend to the first step's tokens in every replay."""
    assert wide.fused is not None
    reference = replace(wide, fused=replace(wide.fused, attention=ReferenceAttention()))
    graphed, eager = Decoding(reference, graph_rows_max=32), Decoding(reference, graph_rows_max=0)
    for each in (graphed, eager):
        each.start([1, 2, 3])
    for _ in range(4):
        same(graphed.decode([1, 2, 3]), eager.decode([1, 2, 3]))
    assert graphs_of(graphed).sizes == ()
    assert "cannot be part of a graph" in caplog.text


@pytest.mark.gpu
@pytest.mark.usefixtures("alone_on_gpu")
def test_nothing_else_settles_in_a_pools_memory() -> None:
    """Torch would give the megabyte and a half behind this tensor to another one, and could then free neither."""
    device = gpu()
    device.release_cached()
    free, mib = device.free_bytes(), 1 << 20
    large = device.allocate((1024 * mib + 600_000,), torch.uint8)
    small = torch.zeros(mib + 1000, dtype=torch.uint8, device=device.torch_device)
    assert free - device.free_bytes() >= 1024 * mib
    del large
    device.release_cached()
    assert free - device.free_bytes() <= 64 * mib  # torch's allocation for a small tensor
    assert int(small.sum()) == 0


@pytest.mark.gpu
@pytest.mark.usefixtures("alone_on_gpu")
def test_the_pool_gives_its_memory_back(wide: LoadedModel) -> None:
    device = wide.device
    device.release_cached()
    allocated, free = torch.cuda.memory_allocated(device.torch_device), device.free_bytes()
    pool = KvPool(wide.geometry, (4 << 30) // wide.geometry.bytes_per_block, device)
    assert torch.cuda.memory_allocated(device.torch_device) - allocated == pytest.approx(pool.bytes, rel=1e-3)
    assert free - device.free_bytes() == pytest.approx(pool.bytes, rel=1e-2)
    pool.close()
    assert torch.cuda.memory_allocated(device.torch_device) == allocated
    assert device.free_bytes() == pytest.approx(free, rel=1e-3)


@pytest.mark.gpu
@pytest.mark.usefixtures("alone_on_gpu")
def test_graphs_give_their_memory_back(wide: LoadedModel) -> None:
    device = wide.device
    pool = KvPool(wide.geometry, 64, device)
    limits = {"slots_max": SLOTS, "step_tokens_max": 512, "step_rows_max": 32}
    for _ in range(2):  # the first round leaves compiled code and the attention's workspace
        gc.collect()
        device.release_cached()
        allocated, free = torch.cuda.memory_allocated(device.torch_device), device.free_bytes()
        runner = ModelRunner(wide, pool, **limits, table_width=WIDTH, graph_rows_max=32)
        assert runner.graphs is not None
        runner.graphs.capture()
        assert runner.graphs.captured == len(runner.graphs.sizes) == 7
        runner.close()
        del runner
    gc.collect()
    device.release_cached()
    assert torch.cuda.memory_allocated(device.torch_device) == pytest.approx(allocated, abs=1 << 20)
    assert device.free_bytes() == pytest.approx(free, abs=64 << 20)


@pytest.mark.gpu
@pytest.mark.usefixtures("alone_on_gpu")
def test_real_lack_of_memory_fails_rows_not_the_process(wide: LoadedModel) -> None:
    device = wide.device
    decoding = Decoding(wide, graph_rows_max=32)
    want = decoding.start([0])
    hoard = []
    device.release_cached()
    size = 1 << 30
    while size >= 1 << 16:
        try:
            hoard.append(torch.empty(size, dtype=torch.uint8, device=device.torch_device))
        except torch.OutOfMemoryError:
            size //= 2
    slots = list(range(1, 33))
    outcome = decoding.start(slots)
    codes = {error.error.code for error in outcome.errors}
    assert codes <= {"gpu_error"}
    hoard.clear()
    device.release_cached()
    assert device.survives()
    decoding.lengths[:] = 0
    same(decoding.start([0]), want)
    assert decoding.decode([0]).errors == ()
    decoding.runner.close()
    decoding.pool.close()


class OtherRank:
    """Agreement of two ranks as seen by one. says: the other rank's answers in order."""

    def __init__(self, *says: bool) -> None:
        self.says = deque(says)

    def agreed(self, mine: bool) -> bool:
        return mine & self.says.popleft()


def graphs_beside(other: OtherRank, problems: dict[int, Exception]) -> DecodeGraphs:
    """Return graphs of 2, 4 and 8 rows, without a model. problems: error raised by the capture of a size."""
    graphs = DecodeGraphs.__new__(DecodeGraphs)
    model: Any = SimpleNamespace(ranks=other, device=SimpleNamespace(release_cached=lambda: None))
    graphs._model, graphs._sizes, graphs._buckets, graphs._uses = model, [2, 4, 8], {}, Counter()
    graphs._sharing = {}
    graphs._chained = {}

    def capture(size: int) -> Any:
        if size in problems:
            raise problems[size]
        return size

    graphs._capture = capture  # type: ignore[method-assign]
    return graphs


@pytest.mark.parametrize(
    ("says", "problems", "left"),
    [
        ((True, True) * 3, {}, [2, 4, 8]),
        # The other rank lacks the memory for 8 rows only.
        ((True, False, True, *(True, True) * 2), {}, [2, 4]),
        # It runs without graphs from then on, as 8 rows cannot be captured there at all.
        ((True, False, False, True, True), {}, []),
        ((True, True, True, True, True), {8: RuntimeError("it waits")}, []),
        ((True, True, True, *(True, True) * 2), {8: torch.OutOfMemoryError("planted")}, [2, 4]),
        ((False,), {}, [2, 4, 8]),  # out of time: captured on demand
    ],
)
def test_ranks_have_the_same_graphs(says: tuple[bool, ...], problems: dict[int, Exception], left: list[int]) -> None:
    """If only one rank padded a step of 7 rows to 8, it would wait for the other rank forever."""
    graphs = graphs_beside(OtherRank(*says), problems)
    graphs.capture()
    assert graphs._sizes == left
    assert sorted(graphs._buckets) == (left if len(says) > 1 else [])


@pytest.mark.parametrize("idle", [False, True])
def test_steps_that_share_reads_run_in_graphs_of_their_own(
    idle: bool, write_config: Callable[..., Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Common blocks are read once after a few steps, or after idle time, and no bit changes."""
    pytest.importorskip("triton")
    from kvforge.worker.attention import decode_plan, triton_attention
    from kvforge.worker.step import graphs

    auto = open_device("auto")
    device = replace(auto if auto.runs_kernels else open_device("cpu"), steady=True)
    folder = write_config("llama", max_position_embeddings=512, num_hidden_layers=1)
    monkeypatch.setattr(decode_plan, "STEADY_MIN", 32)
    monkeypatch.setattr(triton_attention, "SAVED_BYTES_MIN", 1)
    monkeypatch.setattr(determinism, "_unsteady", lambda *_: "")  # of products, which takes the interpreter long
    formats = {"load_format": "dummy", "dtype": "float32", "attention": "triton"}
    model = load_model(folder, **formats, device=device, block_size=BLOCK_SIZE)
    launches: list[int] = []
    launch = triton_attention.shared_decode

    def counted(*arguments: Any) -> None:
        launches.append(1)
        launch(*arguments)

    monkeypatch.setattr(triton_attention, "shared_decode", counted)
    monkeypatch.setattr(graphs, "CAPTURE_USES", 2)
    prompt, blocks = RNG.integers(3, 97, 40).tolist(), 40 // BLOCK_SIZE  # a common part and one behind it
    found = []
    for common in (blocks, 0):
        decoding = Decoding(model, graph_rows_max=4, rows_max=4, width=24, common=common)
        begins = tuple(replace_start(begin(s, seed=s), sampling=SamplingParams(temperature=1.0)) for s in range(3))
        for slot, start in enumerate(begins):  # one after the other: they write the same blocks
            decoding.runner.finish(decoding.launch([(slot, [*prompt, slot + 3], 1)], begins=(start,)))
        steps = [decoding.decode([0, 1, 2]) for _ in range(1 if idle else 3)]
        while idle and graphs_of(decoding).capture_missing():
            pass
        assert (4 in graphs_of(decoding)._sharing) == (common > 0)
        launches.clear()
        steps += [decoding.decode([0, 1, 2]) for _ in range(2)]
        if device.computes_on_cores:  # there a graph is the function, which launches again
            assert len(launches) == (2 * len(model.geometry.layers) if common else 0)
        found.append([(each.tokens.tolist(), each.logprobs.tolist()) for each in steps])
        decoding.runner.close()
        decoding.pool.close()
    assert found[0] == found[1]


def test_a_graph_with_shared_reads_that_cannot_be_captured_is_left_out(
    pair: tuple[Decoding, Decoding], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    graphed, eager = pair
    held = graphs_of(graphed)
    monkeypatch.setattr(held, "_gains_from_sharing", lambda _rows, _bytes: True)
    capture = held._capture

    def refused(size: int, **keywords: bool) -> Any:
        if keywords.get("shares_reads"):
            raise RuntimeError("out of memory")
        return capture(size)

    monkeypatch.setattr(held, "_capture", refused)
    for each in pair:
        each.start([0, 1, 2])
    for _ in range(CAPTURE_USES + 2):
        same(graphed.decode([0, 1, 2]), eager.decode([0, 1, 2]))
    assert held._sharing == {4: None} and held.captured == 1
    assert caplog.text.count("run without shared reads: capturing their graph failed: RuntimeError: out of memory") == 1
