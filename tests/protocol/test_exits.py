"""One kind of error has one exit status in all processes."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from kvforge.coordinator.__main__ import main as coordinator
from kvforge.process.installation import install_command
from kvforge.protocol import errors
from kvforge.protocol.exits import FAILED, TIMED_OUT, UNAVAILABLE, USAGE
from kvforge.worker.__main__ import _fail
from kvforge.worker.__main__ import main as worker
from tools.cluster.running import tiny_model


def test_a_wrong_setting_is_wrong_usage_everywhere(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    config = tmp_path / "config.toml"
    for text in ("colour = 1", "log_level = 'loud'", "not toml"):
        config.write_text(text)
        for main in (coordinator, worker):
            assert main(["--config", str(config)]) == USAGE
            assert capsys.readouterr().err.count("\n") == 1


def test_what_ends_a_worker_for_good_and_what_a_new_start_may_mend(capsys: pytest.CaptureFixture[str]) -> None:
    ends: dict[errors.KvforgeError, int] = {
        errors.ModelNotFound("m", "is not there"): USAGE,
        errors.InvalidConfiguration("dtype", "no"): USAGE,
        errors.UnsupportedModel("m", "no"): UNAVAILABLE,
        errors.CoordinatorUnavailable("nobody"): TIMED_OUT,
        errors.Conflict("a worker of that name is connected already"): FAILED,
        errors.CapacityExceeded("workers", 1, 0, "too many are connected"): FAILED,
        errors.ProtocolError("another version"): UNAVAILABLE,
        errors.GpuError("the device is lost"): FAILED,
        errors.KernelError("a kernel is wrong"): UNAVAILABLE,
        errors.WorkerError("a forward pass failed"): FAILED,
        errors.InternalError("stopped by a second signal"): FAILED,
    }
    assert {error: _fail(error) for error in ends} == ends
    assert capsys.readouterr().err.count("worker: ") == len(ends)


def test_a_worker_without_torch_says_what_to_install(tmp_path: Path) -> None:
    config = tmp_path / "w.toml"
    model = tiny_model(tmp_path)
    config.write_text(f'name = "w"\nmodel = "{model}"\nruntime_dir = "{tmp_path}"\nload_format = "dummy"')
    script = (
        "import sys; sys.modules['torch'] = None; "
        "from kvforge.worker.__main__ import main; sys.exit(main(sys.argv[1:]))"
    )
    command = [sys.executable, "-c", script, "--config", str(config)]
    ran = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert (ran.returncode, ran.stderr.count("\n")) == (UNAVAILABLE, 1)
    assert install_command("worker") in ran.stderr
