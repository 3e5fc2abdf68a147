"""Shared fixtures of the worker's tests: the CPU device, and tiny random-weight models of any architecture."""

from __future__ import annotations

import fcntl
import json
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import tests.interpreted  # noqa: F401 - before a kernel is imported
from kvforge.text.grammar_trials import GrammarTrials
from kvforge.worker.attention.pool import KvPool
from kvforge.worker.attention.windows import WindowLimits
from kvforge.worker.device.device import Device, open_device
from kvforge.worker.loading.load import load_model
from kvforge.worker.loading.model import ATTENTION_NAME, LoadedModel, use_attention
from tests.worker.kept_memory import trim_rarely
from tests.worker.quick_loads import load_alike, load_quickly
from tests.worker.undefined import fill_with_nan

TRIAL_S_MAX = 120.0
# Weights larger than usual: at transformers' 0.02 attention of a tiny model is almost uniform and hides mistakes.
TINY = {
    "vocab_size": 97,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 128,
    "initializer_range": 0.2,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
}


@pytest.fixture
def grammars_known(monkeypatch: pytest.MonkeyPatch) -> None:
    """Finish every grammar's trial before a step needs the result."""
    ask = GrammarTrials.problem

    def known(self: GrammarTrials, grammar: str) -> str | None:
        if (problem := ask(self, grammar)) is None:
            self.wait(TRIAL_S_MAX)
            problem = ask(self, grammar)
        return problem

    monkeypatch.setattr(GrammarTrials, "problem", known)


@pytest.fixture(autouse=True, scope="session")
def _one_torch_thread() -> None:
    torch.set_num_threads(1)  # tests run in parallel


@pytest.fixture(autouse=True, scope="session")
def _memory_is_kept() -> None:
    trim_rarely()


@pytest.fixture(autouse=True)
def _undefined_is_nan(monkeypatch: pytest.MonkeyPatch) -> None:
    fill_with_nan(monkeypatch)


@pytest.fixture
def quick_loads(monkeypatch: pytest.MonkeyPatch) -> None:
    """For tests that plant no fault that a load would find."""
    load_quickly(monkeypatch)


@pytest.fixture
def alike_loads(quick_loads: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """For tests that plant no fault in layers or their descriptions either."""
    load_alike(monkeypatch)


@pytest.fixture
def alone_on_gpu() -> None:
    """For tests that take most of the GPU's memory or read its use from the driver: see `_share_gpu`."""


@pytest.fixture(autouse=True)
def _share_gpu(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Run tests of several processes in parallel on one GPU, except those that request `alone_on_gpu`."""
    if request.node.get_closest_marker("gpu") is None or not torch.cuda.is_available():
        yield
        return
    alone = "alone_on_gpu" in request.fixturenames
    with (tmp_path_factory.getbasetemp().parent / "gpu.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX if alone else fcntl.LOCK_SH)
        yield
        torch.cuda.empty_cache()


@pytest.fixture(scope="session")
def cpu() -> Device:
    return open_device("cpu")


@pytest.fixture
def write_config(tmp_path: Path) -> Callable[..., Path]:
    """write_config(model_type, **fields) -> folder with a config.json of a tiny model."""

    def write(model_type: str, **fields: Any) -> Path:
        folder = tmp_path / model_type
        folder.mkdir(exist_ok=True)
        config = {**TINY, "model_type": model_type, **fields}
        (folder / "config.json").write_text(json.dumps(config))
        return folder

    return write


@pytest.fixture
def tiny(write_config: Callable[..., Path], cpu: Device) -> Callable[..., LoadedModel]:
    """tiny(model_type, block_size=4, dtype="float32", kernels=True, **fields) -> a loaded model with random weights."""

    def load(
        model_type: str,
        block_size: int = 4,
        seed: int = 0,
        dtype: str = "float32",
        kernels: bool = True,
        weight_dtype: str = "dtype",
        kv_dtype: str = "auto",
        state_dtype: str = "float32",
        windows: WindowLimits | None = None,
        **fields: Any,
    ) -> LoadedModel:
        folder, device = write_config(model_type, **fields), replace(cpu, kernels=kernels)
        formats = {"dtype": dtype, "weight_dtype": weight_dtype, "kv_dtype": kv_dtype, "state_dtype": state_dtype}
        settings = {"load_format": "dummy", "seed": seed, **formats}
        return load_model(folder, device=device, block_size=block_size, windows=windows, **settings)

    return load


@pytest.fixture(scope="session")
def eager_logits() -> Callable[..., torch.Tensor]:
    """eager_logits(model, token ids) -> [tokens, vocab] float32: transformers' own eager attention, one sequence."""

    @torch.inference_mode()
    def run(model: LoadedModel, token_ids: Any) -> torch.Tensor:
        use_attention(model.module, "eager")
        try:
            ids = torch.as_tensor(np.asarray(token_ids), dtype=torch.int64)[None]
            return model.module(input_ids=ids, use_cache=False).logits[0].float()
        finally:
            use_attention(model.module, ATTENTION_NAME)

    return run


@pytest.fixture(scope="session")
def paged_logits() -> Callable[..., list[torch.Tensor]]:
    """paged_logits(model, sequences, chunks) -> each sequence's logits [tokens, vocab].

    chunks: one list per pass with the token count that each sequence feeds in it (0: it skips this pass). Blocks are
    allocated at random and the pool starts full of NaN. prompts: how many of the passes have prompt tokens alone, also
    in rows of one token; the others have generated tokens there.
    """

    def run(model: LoadedModel, sequences: list[Any], chunks: list[list[int]], prompts: int = 0) -> list[torch.Tensor]:
        block_size = model.geometry.block_size
        blocks, count = -(-max(map(len, sequences)) // block_size), len(sequences)
        width = blocks + model.geometry.state_blocks
        pool = KvPool(model.geometry, width * count + 3, model.device)
        for cache in pool.tensors():
            if cache.itemsize > 1:
                cache.fill_(float("nan"))
            else:
                cache.view(torch.int8).fill_(127)  # NaN in fp8
        order = np.random.default_rng(1).permutation(pool.blocks)[: width * count]
        tables = order.astype(np.int32).reshape(count, width)
        done = np.zeros(count, np.int32)
        got: list[list[torch.Tensor]] = [[] for _ in sequences]
        for number, chunk in enumerate(chunks):
            rows = [row for row in range(count) if chunk[row]]
            counts = np.array([chunk[row] for row in rows], np.int32)
            alike = np.zeros(len(rows), np.bool_) if number < prompts else None
            batch = pool.batch(tables[rows, :blocks], done[rows], counts, alike, states=tables[rows, blocks:])
            spans = [np.arange(done[row], done[row] + chunk[row]) for row in rows]
            ids = np.concatenate([np.asarray(sequences[row])[span] for row, span in zip(rows, spans, strict=True)])
            place = model.device.torch_device
            logits = model.forward(
                torch.as_tensor(ids, dtype=torch.int64, device=place),
                torch.as_tensor(np.concatenate(spans), device=place),
                torch.arange(batch.tokens, device=place),
                batch,
                pool,
            )
            for row, part in zip(rows, torch.split(logits, counts.tolist()), strict=True):
                got[row].append(part)
                done[row] += len(part)
        pool.close()
        return [torch.cat(parts) for parts in got]

    return run
