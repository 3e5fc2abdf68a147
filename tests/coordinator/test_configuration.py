"""Limits are checked once, by name; and the core stays pure."""

from __future__ import annotations

import ast
import subprocess
import sys
from pathlib import Path

import msgspec
import pytest

from kvforge.coordinator import core
from kvforge.coordinator.config import CoordinatorConfig, LimitsSection
from kvforge.coordinator.core.limits import Quota, microseconds
from kvforge.protocol.errors import InvalidConfiguration, InvalidRequest
from kvforge.protocol.messages import GetHealth, WorkerHello
from tests.coordinator.driver import Driver, FakeWorker, model_info
from tools.simulation.limits import SECTIONS, counts, in_core, make_limits

COUNTS = counts()
IMPURE = frozenset(
    {"time", "random", "socket", "os", "threading", "asyncio", "zmq", "torch", "secrets", "uuid", "datetime"}
    | {"subprocess", "multiprocessing", "mmap"}
)
CORE = Path(core.__file__).parent
MODULES = sorted(CORE.rglob("*.py"))


# behaviour 1
@pytest.mark.parametrize("value", [0, -1])
@pytest.mark.parametrize("field", COUNTS)
def test_a_count_that_is_not_positive_is_refused_by_name(field: str, value: int) -> None:
    with pytest.raises(InvalidConfiguration) as caught:
        make_limits(**{field: value})
    name, per_us = in_core(caught.value.field.partition(".")[2])
    assert name == field
    assert f"not {value / per_us if per_us else value}" in str(caught.value)


# behaviour 1
def test_room_for_stop_tokens_is_bounded() -> None:
    with pytest.raises(InvalidConfiguration) as caught:
        make_limits(stop_tokens_max=1 << 20)
    assert caught.value.field == "limits.stop_tokens_max"


@pytest.mark.parametrize(("section", "name"), [("bounds", "limits"), ("cache", "cache"), ("schedule", "schedule")])
def test_every_limit_of_the_core_can_be_configured(section: str, name: str) -> None:
    default = CoordinatorConfig()
    for field in msgspec.structs.fields(SECTIONS[section]):
        if field.type is str:
            continue
        made = CoordinatorConfig(**{name: msgspec.structs.replace(getattr(default, name), **{field.name: 7})})
        assert getattr(getattr(made.core_limits(), section), field.name) == 7, field.name
        assert getattr(getattr(default.core_limits(), section), field.name) == field.default


def test_durations_are_counted_in_microseconds() -> None:
    assert [microseconds(seconds) for seconds in (1e-6, 0.2, 7, 86_400.0)] == [1, 200_000, 7_000_000, 86_400_000_000]


# behaviour 1
def test_all_ones_are_accepted_and_serve_one_token() -> None:
    limits = make_limits(**dict.fromkeys(COUNTS, 1), policy="none")
    assert limits.context_tokens_max == 1
    driver = Driver(**dict.fromkeys(COUNTS, 1))
    driver.add_worker(1)
    sequence = driver.create([7])
    assert driver.tokens(sequence) == [7]
    assert driver.info(sequence).blocks == 1


# behaviour 1
@pytest.mark.parametrize("field", ["blocks", "bytes_per_block"])
@pytest.mark.parametrize("value", [0, -1])
def test_a_worker_that_announces_an_impossible_pool_is_refused(field: str, value: int) -> None:
    driver = Driver()
    worker = driver.add_worker(4)
    other = FakeWorker(driver.machine, 9, "other", 4, model_info())
    driver.workers.append(other)
    hello_and_ready(driver, other, **{field: value})
    assert "blocks and bytes_per_block must be at least 1" in other.dropped
    assert driver.workers == [worker]
    assert len(driver.machine.cache.groups) == 1


def test_a_worker_with_more_blocks_than_the_core_can_name_is_refused() -> None:
    driver = Driver(blocks_max=8)
    worker = FakeWorker(driver.machine, 9, "large", 9, model_info())
    driver.workers.append(worker)
    hello_and_ready(driver, worker)
    assert "9 blocks exceed blocks_max = 8" in worker.dropped
    assert not driver.machine.cache.groups


@pytest.mark.parametrize(
    ("device_bytes", "problem"),
    [
        ({"weights": 1, "pool": -1}, "device_bytes.pool: must be 0 to 9223372036854775807, not -1"),
        ({"pool": 1 << 63}, "device_bytes.pool: must be 0 to"),
        ({"": 1}, "device_bytes: a purpose has 1 to 32 printable characters"),
        ({"x" * 33: 1}, "device_bytes: a purpose has 1 to 32 printable characters"),
        ({"po\x1bol": 1}, "device_bytes: a purpose has 1 to 32 printable characters"),
        ({f"purpose {i}": 1 for i in range(17)}, "device_bytes: at most 16 purposes"),
    ],
)
def test_a_worker_whose_device_bytes_cannot_be_is_refused(device_bytes: dict[str, int], problem: str) -> None:
    driver = Driver()
    worker = FakeWorker(driver.machine, 9, "odd", 4, model_info())
    driver.workers.append(worker)
    hello_and_ready(driver, worker, device_bytes=device_bytes)
    assert f"worker odd: {problem}" in worker.dropped
    assert not driver.machine.cache.groups
    assert driver.ask(GetHealth(rid=1)).workers == ()


@pytest.mark.parametrize(
    ("kernels", "problem"),
    [
        ({"decode": "x" * 1001}, "kernels: 1 to 1000 printable characters each"),
        ({"": "x"}, "kernels: 1 to 1000 printable"),
        ({"decode": "\x1b[2J"}, "kernels: 1 to 1000 printable"),
        ({f"kernel {i}": "x" for i in range(17)}, "kernels: at most 16"),
    ],
)
def test_a_worker_whose_kernels_cannot_be_told_is_refused(kernels: dict[str, str], problem: str) -> None:
    driver = Driver()
    worker = FakeWorker(driver.machine, 9, "odd", 4, model_info())
    driver.workers.append(worker)
    hello_and_ready(driver, worker, kernels=kernels)
    assert f"worker odd: {problem}" in worker.dropped
    assert driver.ask(GetHealth(rid=1)).workers == ()


def test_device_bytes_are_as_many_purposes_and_as_large_as_the_bounds_say() -> None:
    driver = Driver()
    worker = FakeWorker(driver.machine, 9, "full", 4, model_info())
    driver.workers.append(worker)
    most = {f"{i:032}": (1 << 63) - 1 for i in range(15)} | {"n": 0}
    hello_and_ready(driver, worker, device_bytes=most)
    assert driver.ask(GetHealth(rid=1)).workers[0].device_bytes == most


def hello_and_ready(driver: Driver, worker: FakeWorker, **fields: object) -> None:
    """Connect a worker that announces a pool with some fields changed."""
    driver.report(worker, WorkerHello(rid=1, name=worker.name, pid=1))
    driver.report(worker, msgspec.structs.replace(driver.ready(worker), **fields))


# behaviour 2 (in the core: positions and contexts fit 32 bits)
def test_a_context_that_does_not_fit_32_bits_is_refused() -> None:
    with pytest.raises(InvalidConfiguration, match="do not fit a message"):
        make_limits(block_size=1 << 15, blocks_per_sequence_max=(1 << 8) + 1)
    assert make_limits(block_size=1 << 15, blocks_per_sequence_max=1 << 8).context_tokens_max == 1 << 23
    with pytest.raises(InvalidConfiguration) as caught:
        make_limits(block_size=1 << 15, blocks_per_sequence_max=1 << 16)
    assert caught.value.field == "limits.blocks_per_sequence_max"


def test_an_unknown_policy_is_refused_by_name() -> None:
    with pytest.raises(InvalidConfiguration) as caught:
        make_limits(policy="fifo")
    assert caught.value.field == "cache.policy"


@pytest.mark.parametrize("quota", [Quota(floor=-1), Quota(ceiling=-1), Quota(floor=3, ceiling=2)])
def test_a_quota_that_contradicts_itself_is_refused_naming_the_tenant(quota: Quota) -> None:
    with pytest.raises(InvalidConfiguration) as caught:
        make_limits(quotas={"a": quota})
    assert caught.value.field.startswith("quotas.a")


def test_more_quotas_than_tenants_are_refused() -> None:
    with pytest.raises(InvalidConfiguration) as caught:
        make_limits(tenants_max=1, quotas={"a": Quota(), "b": Quota()})
    assert caught.value.field == "quotas"


# behaviour 3 (in the core: bytes follow the worker's dtype)
def test_bytes_follow_the_worker_everywhere() -> None:
    driver = Driver()
    worker = FakeWorker(driver.machine, 9, "half", 4, model_info())
    driver.workers.append(worker)
    hello_and_ready(driver, worker, bytes_per_block=100)
    sequence = driver.create([1, 2, 3, 4, 5], tenant="a")
    assert driver.info(sequence).bytes == 200
    assert driver.stats().pools[0].bytes_per_block == 100
    assert driver.stats().tenants[0].bytes == 200
    assert driver.explain(tenant="a").facts["bytes"] == 200


# behaviour 4
def test_the_context_is_block_size_times_blocks_of_a_sequence() -> None:
    driver = Driver(block_size=4, blocks_per_sequence_max=3)
    driver.add_worker(16)
    assert driver.machine.limits.context_tokens_max == 12
    assert driver.submit(range(11), max_tokens=1) == 1
    assert driver.refused(driver.submit_message(range(12), 1), InvalidRequest).field == "prompt"
    error = driver.refused(driver.submit_message(range(11), 2), InvalidRequest)
    assert error.field == "max_tokens"
    assert (error.prompt_tokens, error.max_tokens, error.context_tokens) == (11, 2, 12)


# behaviour 4
def test_a_request_larger_than_the_largest_pool_is_refused_at_submit() -> None:
    driver = Driver()
    driver.add_worker(2, "small")
    driver.add_worker(3, "large")
    assert driver.submit(range(10), max_tokens=2) == 1
    error = driver.refused(driver.submit_message(range(10), 3), InvalidRequest)
    assert error.field == "max_tokens"
    assert "the largest pool has 3" in str(error)
    assert (error.prompt_tokens, error.max_tokens, error.context_tokens) == (10, 3, 12)


# ------------------------------------------------------------------------------------------------------------- purity


@pytest.mark.parametrize("path", MODULES, ids=[str(path.relative_to(CORE)) for path in MODULES])
def test_no_module_of_the_core_imports_the_outside_world(path: Path) -> None:
    imported = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            imported |= {alias.name.split(".")[0] for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.level == 0:
            module = node.module or ""
            imported.add("kvforge.protocol" if module.startswith("kvforge.protocol") else module.split(".")[0])
        elif isinstance(node, ast.Name):
            assert node.id not in {"open", "input", "print", "exec", "eval", "__import__"}, node.lineno
    assert not imported & IMPURE
    assert imported <= {
        "__future__",
        "bisect",
        "collections",
        "dataclasses",
        "hashlib",
        "heapq",
        "itertools",
        "math",
        "typing",
        "msgspec",
        "numpy",
        "kvforge.protocol",
    }


def test_importing_the_core_loads_no_socket_and_no_tensor_library() -> None:
    program = (
        "import sys, kvforge.coordinator.core.machine; "
        "print(*sorted({'zmq', 'torch', 'transformers', 'sqlite3'} & set(sys.modules)))"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=120, check=True)
    assert done.stdout.strip() == ""


def test_the_core_runs_where_clock_randomness_and_environment_are_forbidden() -> None:
    program = """
import numpy, msgspec, hashlib, tempfile
from kvforge.coordinator.core.machine import Machine
from kvforge.coordinator.core.limits import Bounds, Limits
from kvforge.coordinator.core.events import Boot, ClientCame, FromClient, Turn
from kvforge.protocol.messages import CreateSequence, GetStats, Submit
import os, time, random, socket, secrets, threading, numpy.random

def forbidden(*_args, **_kwargs):
    raise SystemExit("the core reached outside")

for module, names in {
    os: ["getenv", "urandom", "getpid", "open"], time: ["time", "monotonic", "sleep", "time_ns", "perf_counter"],
    random: ["random", "Random", "getrandbits"], socket: ["socket"], secrets: ["token_bytes"],
    threading: ["Thread"], numpy.random: ["default_rng", "rand"],
}.items():
    for name in names:
        setattr(module, name, forbidden)
machine = Machine(Boot("boot", b"key", Limits(bounds=Bounds(blocks_max=16, sequences_max=4))), 0)
effects = machine.apply(ClientCame(1), 0).effects
for message in (CreateSequence(rid=1), Submit(rid=2, max_tokens=1, prompt=numpy.ones(3, numpy.int32)), GetStats(rid=3)):
    effects += machine.apply(FromClient(1, message), 0).effects
effects += machine.apply(Turn(), 1).effects
print(*(type(effect.message).__name__ for effect in effects))
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=120, check=False)
    assert done.stdout.split() == ["SequenceInfo", "Accepted", "Stats"], done.stderr


def test_the_import_contracts_hold() -> None:
    program = "import sys; from importlinter.cli import lint_imports_command; sys.exit(lint_imports_command())"
    root = CORE.parents[2]
    done = subprocess.run(
        [sys.executable, "-c", program, "--no-cache"],
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
        cwd=root,
    )
    assert "the core is pure: no I/O, no clock, no randomness, no sockets, no threads KEPT" in done.stdout, done.stderr


def test_the_time_of_a_turn_for_clients_is_one_setting() -> None:
    config = CoordinatorConfig(limits=LimitsSection(client_ms_per_turn_max=7.5))
    assert config.client_limits().turn_us == 7_500
