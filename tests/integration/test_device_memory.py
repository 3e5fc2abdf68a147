"""A killed worker's GPU memory is free again, as the driver reports it to another process."""

from __future__ import annotations

import os
import select
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from time import monotonic

import pytest
import torch

from kvforge import Client, SamplingParams
from kvforge.process.leash import leashed
from kvforge.protocol.transport import client_endpoint
from tools.cluster.running import tiny_model, wait_gone

BESIDE_OTHERS = int(os.environ.get("PYTEST_XDIST_WORKER_COUNT", "1")) > 1
pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU here"),
    # The driver reports the free memory of the whole GPU: 14 parallel test processes allocate and free gigabytes.
    pytest.mark.skipif(BESIDE_OTHERS, reason="other tests use the GPU's memory at the same time: run it without -n"),
]
KV_BYTES = 2 << 30
SLACK_BYTES = 64 << 20  # the drivers' own memory
DEADLINE_S = 120.0
FREE = "import torch; print(torch.cuda.mem_get_info()[0], flush=True)"


@pytest.fixture
def folder() -> Iterator[Path]:
    with tempfile.TemporaryDirectory(prefix="kvf-", dir="/tmp") as path:  # a socket's path must be short
        yield Path(path)


def free_bytes() -> int:
    """Return the free memory as an unrelated process sees it; its own use is constant."""
    done = subprocess.run([sys.executable, "-c", FREE], check=True, capture_output=True, text=True, timeout=DEADLINE_S)
    return int(done.stdout)


def start(folder: Path, role: str, *settings: str) -> subprocess.Popen[bytes]:
    config = folder / f"{role}.toml"
    config.write_text("\n".join([f'runtime_dir = "{folder / "r"}"', *settings]))
    with (folder / f"{role}.log").open("ab") as log:
        command = leashed([sys.executable, "-m", role, "--config", str(config)])
        return subprocess.Popen(command, stdout=log, stderr=log)


@pytest.mark.parametrize("how", ["idle", "in a step"])
def test_a_killed_workers_memory_is_back(folder: Path, how: str) -> None:
    before = free_bytes()
    coordinator = start(folder, "coordinator")
    settings = ('name = "w"', f'model = "{tiny_model(folder)}"', 'load_format = "dummy"', f"kv_bytes = {KV_BYTES}")
    worker = start(folder, "worker", *settings)
    try:
        with Client(client_endpoint(folder / "r"), connect_timeout_s=DEADLINE_S) as client:
            client.wait_ready(DEADLINE_S)
            request = client.submit(
                [1, 2, 3], max_tokens=1500, sampling=SamplingParams(temperature=0.0, ignore_eos=True)
            )
            next(iter(request))
            if how == "idle":
                request.result(timeout_s=DEADLINE_S)
            assert free_bytes() < before - KV_BYTES
            worker.send_signal(signal.SIGKILL)
            wait_gone(worker.pid)
            worker.wait()
            deadline = monotonic() + DEADLINE_S
            while (free := free_bytes()) < before - SLACK_BYTES:
                assert monotonic() < deadline, f"{before - free} bytes are not back"
                select.select([], [], [], 0.1)
    finally:
        for process in (worker, coordinator):
            process.kill()
            process.wait()
    assert not [name for name in os.listdir("/dev/shm") if "kvforge" in name]  # noqa: PTH208
