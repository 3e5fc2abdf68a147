"""Blocks from another tenant are zeroed in every byte before the step that names them runs."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from kvforge.worker.device.device import open_device
from kvforge.worker.loading.load import load_model
from kvforge.worker.loading.model import LoadedModel
from kvforge.worker.step.loop import pool_local
from tests.worker.step.test_graphs import WIDTH, Decoding, gpu
from tests.worker.step.test_runner import BLOCK_SIZE, PROMPTS, Bench, begin, i4

PROMPT = PROMPTS[0]  # 9 tokens: blocks 0 to 2 of slot 0, one token in the last


@pytest.fixture
def model(tiny: Callable[..., LoadedModel]) -> LoadedModel:
    return tiny("llama", block_size=BLOCK_SIZE)


@pytest.fixture
def bench(model: LoadedModel) -> Iterator[Bench]:
    """Return a runner with a pool full of another tenant's data: NaN."""
    bench = Bench(model)
    yield bench
    bench.pool.close()


def test_nothing_is_left_behind_the_tokens_of_a_block_that_was_zeroed(bench: Bench) -> None:
    outcome = bench.run([(0, 0, PROMPT, 1)], begins=(begin(0),), zeros=i4(0, 1, 2))
    assert outcome.errors == ()
    for cache in bench.pool.tensors():
        assert torch.isfinite(cache[:3]).all()
        assert cache[2, 0].any(), "the token itself was written after it"
        assert not cache[2, 1:].any()
        assert torch.isnan(cache[3:]).all(), "no other block was touched"


def test_a_copy_comes_after_it(bench: Bench) -> None:
    """The part of the target outside the copy is zero."""
    bench.run([(0, 0, PROMPT, 1)], begins=(begin(0),))
    outcome = bench.run([(1, 9, [7], 1)], begins=(begin(1),), copies=i4(0, 8, 4, 1, 9, 4, 2, 10, 1), zeros=i4(8, 9, 10))
    assert outcome.errors == ()
    for cache in bench.pool.tensors():
        assert torch.equal(cache[8:10], cache[0:2])
        assert torch.equal(cache[10, 0], cache[2, 0])
        assert cache[10, 1].any() and not cache[10, 2:].any()


@pytest.mark.parametrize("graph_rows_max", [0, 8])
@pytest.mark.parametrize("on", ["cpu", pytest.param("gpu", marks=pytest.mark.gpu)])
def test_a_decode_into_a_new_block_finds_it_zeroed(
    on: str, graph_rows_max: int, write_config: Callable[..., Path]
) -> None:
    """Also from a captured graph: on a CPU this is the function itself, in the same order."""
    device = gpu() if on == "gpu" else open_device("cpu")
    model = load_model(
        write_config("llama"), load_format="dummy", dtype="float32", device=device, block_size=BLOCK_SIZE
    )
    decoding = Decoding(model, graph_rows_max)
    decoding.start([3])
    length = int(decoding.lengths[3])
    while length % BLOCK_SIZE:
        decoding.decode([3])
        length += 1
    block = 3 * WIDTH + length // BLOCK_SIZE
    outcome = decoding.runner.finish(decoding.launch([(3, [-1], 1)], zeros=i4(block)))
    assert outcome.errors == ()
    for cache in decoding.pool.tensors():
        assert cache[block, 0].any() and not cache[block, 1:].any()
    decoding.runner.close()
    decoding.pool.close()


def test_what_could_not_be_zeroed_is_zeroed_before_the_next_step(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    """The coordinator regards a block that it named once as zeroed, even if the step failed."""

    def no_memory(_ids: Any) -> None:
        raise RuntimeError("no memory for the ids")

    with monkeypatch.context() as broken:
        broken.setattr(bench.pool, "zero_blocks", no_memory)
        for _ in range(2):
            failed = bench.run([(0, 0, PROMPT, 1)], begins=(begin(0),), zeros=i4(0, 1, 2))
            assert [error.slot for error in failed.errors] == [0]
            assert all(torch.isnan(cache).all() for cache in bench.pool.tensors()), "nothing was computed either"
    outcome = bench.run([(1, 0, [5], 1)], begins=(begin(1),), zeros=i4(8))
    assert outcome.errors == ()
    for cache in bench.pool.tensors():
        assert not cache[:3].any()
        assert cache[8, 0].any() and not cache[8, 1:].any()


def test_a_step_of_which_no_row_can_be_read_zeroes_all_the_same(bench: Bench) -> None:
    outcome = bench.run([(0, 0, PROMPT, 1)], copies=i4(1, 2), zeros=i4(5))
    assert [error.slot for error in outcome.errors] == [0]
    assert not any(cache[5].any() for cache in bench.pool.tensors())


@pytest.mark.parametrize("block", [-1, 64])
def test_a_block_outside_the_pool_fails_the_step_and_touches_nothing(bench: Bench, block: int) -> None:
    outcome = bench.run([(0, 0, PROMPT, 1)], begins=(begin(0),), zeros=i4(3, block))
    assert outcome.errors[0].error.fields["field"] == "zeros"
    assert all(torch.isnan(cache).all() for cache in bench.pool.tensors())


def test_a_worker_makes_global_ids_its_own(bench: Bench) -> None:
    """A step's blocks to zero belong to all pools, as copies do."""
    step = bench.step([(0, 0, PROMPT, 1)], copies=i4(100, 101, 2), zeros=i4(103, 104))
    local = pool_local(step, 100)
    assert (local.copies.tolist(), local.zeros.tolist()) == ([0, 1, 2], [3, 4])
    assert np.array_equal(local.tokens, step.tokens)
