"""The size of the pool, and the reported use of the device's memory."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import cast

import pytest
import torch

from kvforge.protocol.errors import GpuError, InvalidConfiguration, KernelError, KvforgeError, WorkerError
from kvforge.protocol.messages import ErrorInfo, RowError, WorkerWelcome
from kvforge.worker.attention.pool import KvPool
from kvforge.worker.config import CPU_KV_BYTES, WorkerConfig
from kvforge.worker.device.device import Device, open_device
from kvforge.worker.kernels.packed import stored_bytes
from kvforge.worker.loading.draft_model import join_draft_model
from kvforge.worker.loading.model import LoadedModel
from kvforge.worker.loading.weight_bytes import weight_bytes
from kvforge.worker.step import memory
from kvforge.worker.step.engine import Engine
from kvforge.worker.step.runner import ModelRunner
from tests.worker.conftest import TINY
from tests.worker.loading.random_models import HYBRIDS, NEEDS_CACHE


def welcome(**fields: int) -> WorkerWelcome:
    limits = {"slots_max": 16, "blocks_per_sequence_max": 8, "step_tokens_max": 64, "step_rows_max": 8, "block_size": 4}
    return WorkerWelcome(rid=0, version=1, boot="b", tables_path="", **(limits | fields))


def config(**fields: object) -> WorkerConfig:
    return WorkerConfig(**({"name": "w", "model": "m"} | fields))  # type: ignore[arg-type]


@pytest.fixture
def model(tiny: Callable[..., LoadedModel]) -> LoadedModel:
    return tiny("llama")


def test_blocks_are_what_is_configured(model: LoadedModel) -> None:
    each = model.geometry.bytes_per_block
    assert memory.pool_blocks(config(blocks=7), model, welcome(), 0) == 7
    assert memory.pool_blocks(config(kv_bytes=10 * each + 1), model, welcome(), 0) == 10
    assert memory.pool_blocks(config(), model, welcome(), 0) == CPU_KV_BYTES // each
    with pytest.raises(InvalidConfiguration):
        memory.pool_blocks(config(kv_bytes=each - 1), model, welcome(), 0)


@pytest.mark.parametrize(
    "fields",
    [
        {},
        {"step_rows_max": 1},
        {"step_tokens_max": 8},
        {"step_tokens_max": 4, "step_rows_max": 8},
        {"step_tokens_max": 500, "blocks_per_sequence_max": 2},
        {"slots_max": 2},
    ],
)
def test_the_largest_step_is_tried_within_all_limits(
    fields: dict[str, int], model: LoadedModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On a CPU the trial runs. A device with a shrinking count of free memory shows that all memory is counted."""
    counts = iter(range(10**9, 0, -(1 << 20)))
    monkeypatch.setattr(Device, "free_bytes", lambda _: next(counts) if model is not None else 0)
    limits = welcome(**fields)
    sizes = len(memory.bucket_sizes(min(8, limits.step_rows_max)))
    taken = memory._trial_bytes(model, limits, graph_rows_max=8)
    assert taken > 0
    assert taken >= sizes << 20


@pytest.mark.parametrize(("wanted", "rows", "given"), [(0, 8, 0), (3, 8, 3), (20, 8, 7), (3, 1, 0)])
def test_a_runner_takes_the_drafts_that_the_coordinator_allows(
    wanted: int, rows: int, given: int, model: LoadedModel
) -> None:
    pool = KvPool(model.geometry, 4, model.device)
    runner = memory.make_runner(model, pool, welcome(drafts_max=wanted, step_rows_max=rows), 0)
    assert runner.limits.drafts_max == given
    assert (runner.drafter is not None) == (given > 0)
    pool.close()


@NEEDS_CACHE
@pytest.mark.filterwarnings("ignore:.*:UserWarning:transformers.*")
def test_the_pages_of_states_are_tried_and_bounded(
    tiny: Callable[..., LoadedModel], monkeypatch: pytest.MonkeyPatch
) -> None:
    model_type, fields = HYBRIDS["granite"]
    model = tiny(model_type, block_size=16, **fields)
    assert model.geometry.state_blocks == 4
    monkeypatch.setattr(Device, "free_bytes", lambda _: 10**9)
    assert memory._trial_bytes(model, welcome(block_size=16), graph_rows_max=8) == 0
    memory.check_states(model, welcome(state_blocks_max=4))
    for most, remedy in ((3, "raise it, or the coordinator's cache.block_size"), (0, "update it")):
        with pytest.raises(InvalidConfiguration, match=remedy) as caught:
            memory.check_states(model, welcome(state_blocks_max=most))
        assert caught.value.field == "limits.state_blocks_max"
        assert f"is {most}, and the recurrent state of a sequence of granitemoehybrid takes 4" in str(caught.value)


@pytest.mark.parametrize(
    ("failed", "kind"), [(WorkerError("no room"), GpuError), (KernelError("no such instruction"), KernelError)]
)
def test_why_the_largest_step_failed_decides_whether_a_new_start_may_help(
    failed: KvforgeError, kind: type[KvforgeError], model: LoadedModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    outcome = SimpleNamespace(errors=(RowError(0, ErrorInfo.of(failed)),))
    monkeypatch.setattr(memory, "make_runner", lambda *_: SimpleNamespace(run=lambda *_: outcome))
    with pytest.raises(kind, match=f"the largest step, 39 tokens in 8 rows: {failed}") as caught:
        memory._trial_bytes(model, welcome(), graph_rows_max=8)
    assert type(caught.value) is kind


@pytest.mark.parametrize(("rows_max", "step_rows_max"), [(1, 8), (2, 8), (8, 8), (64, 20), (300, 512)])
def test_the_graphs_that_are_tried_tell_what_all_will_take(rows_max: int, step_rows_max: int) -> None:
    """The largest graph of a kind allocates the shared buffers, each further graph only its own nodes."""
    free, captured, prompts, drafts = [10**9], [], [], []

    def capture_one(rows: int) -> None:
        free[0] -= 10**4 if captured else 10**7 + rows * 10**4
        captured.append(rows)

    def capture_prompts(size: int) -> None:
        free[0] -= 10**3 if prompts else 10**6
        prompts.append(size)

    def capture_drafts(rows: int) -> None:
        free[0] -= 10**2 if drafts else 10**5
        drafts.append(rows)

    runner = SimpleNamespace(
        graphs=SimpleNamespace(capture_one=capture_one),
        prompt_graphs=SimpleNamespace(capture_one=capture_prompts, sizes=(1, 2, 3)),
        draft_graphs=SimpleNamespace(capture_one=capture_drafts, sizes=(1, 2, 4, 8)),
        model=SimpleNamespace(device=SimpleNamespace(free_bytes=lambda: free[0])),
        limits=SimpleNamespace(step_rows_max=step_rows_max),
    )
    told = memory._graph_bytes(cast(ModelRunner, runner), rows_max)
    sizes = memory.bucket_sizes(min(rows_max, step_rows_max))
    assert captured == list(sizes[::-1][:2]) and prompts == [3, 2] and drafts == [8, 4]
    for rows in sizes[::-1][2:]:
        capture_one(rows)
    capture_prompts(1)
    capture_drafts(2)
    capture_drafts(1)
    assert told == 10**9 - free[0]


def test_a_report_is_one_line() -> None:
    report = memory.DeviceBytes(
        weights=3 << 20, pool=5 << 20, graphs=1 << 20, other=2 << 20, free=7 << 20, total=1 << 30
    )
    assert report.line() == (
        "device memory: weights 3 MiB, graphs 1 MiB, KV pool 5 MiB, other 2 MiB; 7 of 1024 MiB free"
    )


def test_purposes_that_take_nothing_are_not_named() -> None:
    report = memory.DeviceBytes(weights=3, pool=5, graphs=0, other=2, free=7, total=17)
    assert report.by_purpose() == {"weights": 3, "pool": 5, "other": 2}


def test_a_weight_that_two_layers_share_is_counted_once(tiny: Callable[..., LoadedModel]) -> None:
    untied, tied = (tiny("llama", tie_word_embeddings=tie, kernels=False) for tie in (False, True))
    head = untied.module.get_output_embeddings().weight
    assert head.nbytes == untied.vocab_size * untied.module.config.hidden_size * 4
    assert weight_bytes(untied) - weight_bytes(tied) == head.nbytes


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "config.json").write_text(json.dumps(TINY | {"model_type": "llama"}))
    return tmp_path


def test_an_engine_for_two_coordinators(folder: Path) -> None:
    told: list[str] = []
    engine = Engine(
        config(model=str(folder), load_format="dummy", device="cpu", dtype="float32", blocks=40, graphs="on"),
        welcome(),
        lambda phase, _: told.append(phase),
    )
    runner = engine.runner
    assert runner.graphs is not None
    assert runner.graphs.captured == 4
    assert "capturing graphs" in told
    plain = {*engine.model.module.parameters(), *engine.model.module.buffers()}
    assert engine.model.fused is not None
    packed = [weight for weight in engine.model.fused.product_weights() if weight.is_mkldnn]
    weights = sum(stored_bytes(tensor) for tensor in (*plain, *packed))
    held = {"weights": weights, "pool": 40 * engine.model.geometry.bytes_per_block}
    assert engine.device_bytes().by_purpose() == held
    engine.adopt(welcome())
    assert engine.runner is runner
    engine.adopt(welcome(step_rows_max=2))
    assert engine.runner is not runner
    assert engine.runner.graphs is not None and engine.runner.graphs.sizes == (1, 2)
    assert engine.device_bytes().by_purpose() == held
    engine.close()


@pytest.mark.parametrize(("when", "at_start"), [("idle", 6), ("start", 7)])
def test_graphs_are_captured_when_the_setting_says(folder: Path, when: str, at_start: int) -> None:
    settings = {"load_format": "dummy", "device": "cpu", "dtype": "float32", "blocks": 40, "graphs": "on"}
    limits = welcome(step_rows_max=28, slots_max=28)
    engine = Engine(config(model=str(folder), graph_capture=when, **settings), limits, lambda *_: None)
    graphs = engine.runner.graphs
    assert graphs is not None
    assert graphs.sizes == (1, 2, 4, 8, 16, 24, 28)
    assert graphs.captured == at_start
    while engine.use_idle_time():
        pass
    assert graphs.captured == 7
    engine.close()


@pytest.mark.gpu
@pytest.mark.usefixtures("alone_on_gpu")
def test_the_pool_takes_what_steps_and_graphs_leave(folder: Path) -> None:
    fields = {"model_type": "llama", "vocab_size": 32_000, "hidden_size": 512, "max_position_embeddings": 4096}
    (folder / "config.json").write_text(json.dumps(TINY | fields))
    limits = welcome(block_size=16, blocks_per_sequence_max=256, step_tokens_max=2048, step_rows_max=64, slots_max=80)
    device = open_device()
    if not device.runs_kernels:
        pytest.skip("no GPU here")
    device.synchronize()
    others = device.total_bytes() - device.free_bytes()  # memory of idle processes does not count
    engine = Engine(config(model=str(folder), load_format="dummy", dtype="bfloat16"), limits, lambda *_: None)
    found = engine.device_bytes()
    parts = found.weights + found.pool + found.graphs + found.other
    assert found.pool > 0.8 * (found.total - others)
    assert found.free > 0.02 * found.total
    assert parts + others + found.free == pytest.approx(found.total, rel=0.02)
    assert engine.runner.graphs is not None
    while engine.use_idle_time():
        pass
    assert engine.runner.graphs.captured == len(engine.runner.graphs.sizes)
    after = engine.device_bytes()
    assert after.free > 0.01 * after.total, "the pool left room for all graphs"
    free_before = engine.device.free_bytes()
    engine.close()
    assert engine.device.free_bytes() - free_before == pytest.approx(found.pool, rel=0.05)


def test_more_than_all_memory_is_refused_by_name(tiny: Callable[..., LoadedModel], cpu: Device) -> None:
    """Refused before the model load for a size in bytes, before the pool's allocation for a number of blocks."""
    total = cpu.total_bytes()
    memory.check_kv_bytes(config(kv_bytes=total), cpu)
    with pytest.raises(InvalidConfiguration, match=f"^kv_bytes: {total + 1} is more than all {total} bytes"):
        memory.check_kv_bytes(config(kv_bytes=total + 1), cpu)
    model = tiny("llama")
    with pytest.raises(InvalidConfiguration, match=r"^blocks: \d+ blocks of this model take"):
        memory.pool_blocks(config(blocks=total // model.geometry.bytes_per_block + 1), model, welcome(), 0)


def test_a_draft_model_needs_a_coordinator_that_verifies_drafts(model: LoadedModel) -> None:
    memory.check_drafts(config(), welcome())
    memory.check_drafts(config(draft_model="d"), welcome(drafts_max=1))
    with pytest.raises(InvalidConfiguration, match=r"'d', but the coordinator's schedule\.drafts_max is 0") as caught:
        memory.check_drafts(config(draft_model="d"), welcome())
    assert caught.value.field == "draft_model"
    with pytest.raises(InvalidConfiguration, match="'d', but ranks is 2: leave it out, or set ranks to 1"):
        config(draft_model="d", ranks=2)
    joined = join_draft_model(model, model)
    assert weight_bytes(joined) == 2 * weight_bytes(model)
    assert memory.pool_blocks(config(kv_bytes=1 << 20), joined, welcome(), 0) == joined.geometry.blocks_for(1 << 20)


def test_the_largest_step_is_tried_with_a_draft_model(model: LoadedModel, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its pass of the same tokens, its scratch blocks and its graphs count."""
    joined, written = join_draft_model(model, model), list[int]()
    write = LoadedModel.write

    def watched(self: LoadedModel, tokens: torch.Tensor, *rest: object) -> None:
        written.append(len(tokens))
        write(self, tokens, *rest)  # type: ignore[arg-type]

    monkeypatch.setattr(LoadedModel, "write", watched)
    memory._trial_bytes(joined, welcome(drafts_max=3), graph_rows_max=4)
    assert written[0] == 39


@NEEDS_CACHE
@pytest.mark.filterwarnings("ignore:.*:UserWarning:transformers.*")
def test_states_of_drafts_take_a_32nd_of_the_pool_or_as_many_as_are_set(
    tiny: Callable[..., LoadedModel], model: LoadedModel, caplog: pytest.LogCaptureFixture
) -> None:
    model_type, fields = HYBRIDS["granite"]
    hybrid = tiny(model_type, block_size=16, **fields)
    each = hybrid.geometry.state_blocks

    def count(drafts_max: int = 4, rows: int = 64, **settings: object) -> int:
        limits = welcome(block_size=16, slots_max=rows, step_rows_max=rows, drafts_max=drafts_max)
        return memory.with_draft_states(hybrid, config(**settings), limits).geometry.draft_states

    assert count(blocks=32 * each * 5) == 5
    assert count(blocks=32 * each * 5, draft_states=7) == 7
    assert count(kv_bytes=32 * each * 3 * hybrid.geometry.bytes_per_block) == 3
    assert count(blocks=10_000) == 32, "no more without a setting"
    assert count(blocks=10_000, rows=8) == 7, "one row is no draft"
    assert count(drafts_max=0, blocks=10_000) == 0
    caplog.set_level("WARNING", "worker")
    assert count(blocks=each) == 0
    assert "set draft_states to have some" in caplog.text
    assert memory.with_draft_states(model, config(), welcome(drafts_max=4)) is model
