"""The configuration files that `kvforge up` writes for its children."""

from __future__ import annotations

import os
import tomllib
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest

from kvforge.launch import host
from kvforge.launch.settings import Settings, toml
from kvforge.protocol import errors
from kvforge.protocol.configuration import convert

ROOT = Path(__file__).parents[3]


def test_toml_survives_any_text() -> None:
    nasty = 'quote " back \\ tab \t line \n nul-ish \x01 del \x7f snow ☃ clef 𝄞 [x] # y'
    text = toml({"a": nasty, "n": 3, "f": 0.5}, {"empty": {}, "t": {"k": "v"}})
    assert tomllib.loads(text) == {"a": nasty, "n": 3, "f": 0.5, "t": {"k": "v"}}
    with pytest.raises(errors.InvalidConfiguration):
        toml({"a": "\udc80"}, {})


def test_toml_holds_dates_as_the_gateway_reads_them() -> None:
    expires = datetime(2030, 1, 2, 3, 4, 5, tzinfo=UTC)
    assert tomllib.loads(toml({}, {"keys": {"ada": {"expires": expires}}})) == {"keys": {"ada": {"expires": expires}}}


def test_the_children_accept_what_is_written_for_them() -> None:
    from kvforge.coordinator.config import CoordinatorConfig
    from kvforge.worker.config import WorkerConfig

    settings = Settings(
        model=Path('/a "model"'),
        runtime_dir=Path("/run/x"),
        workers=2,
        threads=3,
        devices=(4, 5),
        worker={"blocks": 64, "load_format": "dummy", "dtype": "float32", "kv_dtype": "float32", "device": "cpu"},
        limits={"queue_max": 7, "sequences_max": 8},
        cache={"block_size": 4},
    )
    coordinator = convert(tomllib.loads(settings.coordinator_file()), CoordinatorConfig)
    assert str(coordinator.runtime_path) == "/run/x"
    assert (coordinator.limits.queue_max, coordinator.limits.sequences_max, coordinator.cache.block_size) == (7, 8, 4)
    worker = convert(tomllib.loads(settings.worker_file(1)), WorkerConfig)
    assert (worker.name, worker.model, worker.threads, worker.device_index) == ("worker-1", '/a "model"', 3, 5)
    assert (worker.blocks, worker.load_format, str(worker.runtime_path)) == (64, "dummy", "/run/x")


@pytest.mark.parametrize(
    ("worker", "cache", "limits", "tokens"),
    [
        ({}, {}, {}, 131_072),
        ({}, {"block_size": 64}, {}, 131_072),
        ({"context_tokens_max": 100}, {}, {}, 131_072),
        ({"context_tokens_max": 262_144}, {}, {}, 262_144),
        ({"context_tokens_max": 262_145}, {}, {}, 262_160),
        ({"context_tokens_max": 262_144}, {"block_size": 4}, {}, 262_144),
        ({"context_tokens_max": 32768}, {}, {"blocks_per_sequence_max": 10}, 160),
    ],
)
def test_the_coordinator_holds_the_context_that_is_named(
    worker: dict[str, int], cache: dict[str, int], limits: dict[str, int], tokens: int
) -> None:
    from kvforge.coordinator.config import CoordinatorConfig

    settings = Settings(model=Path("m"), runtime_dir=Path("/run/x"), worker=worker, cache=cache, limits=limits)
    coordinator = convert(tomllib.loads(settings.coordinator_file()), CoordinatorConfig)
    assert coordinator.cache.block_size * coordinator.limits.blocks_per_sequence_max == tokens


@pytest.mark.parametrize(
    ("settings", "rows", "tokens", "sequences", "queue"),
    [
        ({"worker": {"device": "cpu"}}, 64, 512, 256, 1024),
        ({"worker": {"device": "cuda"}}, 256, 2048, 1024, 4096),
        ({"worker": {"device": "hip"}, "workers": 8}, 256, 2048, 4096, 4096),
        ({"worker": {"device": "cuda"}, "schedule": {"step_rows_max": 32}}, 32, 2048, 1024, 4096),
        ({"worker": {"device": "cuda"}, "limits": {"sequences_max": 9, "queue_max": 7}}, 256, 2048, 9, 7),
    ],
)
def test_steps_fit_the_device_of_the_workers(
    settings: dict[str, Any], rows: int, tokens: int, sequences: int, queue: int
) -> None:
    from kvforge.coordinator.config import CoordinatorConfig

    written = Settings(model=Path("m"), runtime_dir=Path("/run/x"), **settings).coordinator_file()
    found = convert(tomllib.loads(written), CoordinatorConfig)
    assert (found.schedule.step_rows_max, found.schedule.step_tokens_max) == (rows, tokens)
    assert (found.limits.sequences_max, found.limits.queue_max) == (sequences, queue)


def test_the_steps_of_a_gpu_are_those_of_the_service() -> None:
    service = tomllib.loads((ROOT / "deploy" / "coordinator.toml").read_text())
    found = tomllib.loads(
        Settings(model=Path("m"), runtime_dir=Path("/run/x"), worker={"device": "cuda"}).coordinator_file()
    )
    for section, names in {
        "schedule": ("step_rows_max", "step_tokens_max"),
        "limits": ("sequences_max", "queue_max", "blocks_max", "blocks_per_sequence_max"),
    }.items():
        assert {name: found[section][name] for name in names} == {name: service[section][name] for name in names}


@pytest.mark.parametrize(
    ("device", "files", "torch", "expected"),
    [
        ("auto", [], "2.13.0", False),
        ("auto", ["nvidia0"], "2.13.0", True),
        ("auto", ["kfd"], "2.13.0+rocm7.1", True),
        ("auto", ["nvidia0"], "2.13.0+cpu", False),
        ("cpu", ["nvidia0"], "2.13.0", False),
        ("cuda", [], "2.13.0", True),
    ],
)
def test_a_gpu_is_expected_where_a_worker_would_take_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, device: str, files: list[str], torch: str, *, expected: bool
) -> None:
    for name in files:
        (tmp_path / name).touch()
    monkeypatch.setattr(host, "version", lambda _: torch)
    assert host.expects_gpu(device, tmp_path) is expected


def test_the_cores_are_shared_out_and_a_worker_alone_counts_them_itself() -> None:
    def threads(workers: int = 1, threads: int | None = None) -> list[int]:
        settings = Settings(model=Path("/m"), runtime_dir=Path("/run/x"), workers=workers, threads=threads)
        return [tomllib.loads(settings.worker_file(index))["threads"] for index in range(settings.workers)]

    cores = len(os.sched_getaffinity(0))
    assert threads() == [0]
    assert threads(workers=2) == [max(1, cores // 2)] * 2
    assert threads(workers=64) == [max(1, cores // 64)] * 64
    assert threads(workers=2, threads=1) == [1, 1]


def test_each_rank_of_a_worker_has_its_file_and_its_device() -> None:
    from kvforge.worker.config import WorkerConfig

    settings = Settings(model=Path("/m"), runtime_dir=Path("/run/x"), workers=2, tensor_parallel=2)
    made = [convert(tomllib.loads(settings.worker_file(at)), WorkerConfig) for at in range(settings.processes)]
    told = [(each.name, each.rank, each.ranks, each.device_index) for each in made]
    assert told == [("worker-0", 0, 2, 0), ("worker-0", 1, 2, 1), ("worker-1", 0, 2, 2), ("worker-1", 1, 2, 3)]
    assert [settings.process_name(at) for at in range(4)] == ["worker-0.0", "worker-0.1", "worker-1.0", "worker-1.1"]
