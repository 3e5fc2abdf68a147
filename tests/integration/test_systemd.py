"""The units in deploy/: checked by systemd itself, and booted for real with a tiny model of random weights."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

HERE = Path(__file__).parent
CHECKOUT = HERE.parents[1]
DEPLOY = CHECKOUT / "deploy"
SERVICES = ["kvforge-coordinator.service", "kvforge-worker@.service", "kvforge-drain.service"]
BOOT_S_MAX = 240
KEEP = "/mnt/keep"  # where the sandbox shows the folder of this test


def settings(unit: str) -> dict[str, list[str]]:
    """A unit file's settings, every value of each."""
    found: dict[str, list[str]] = {}
    for line in (DEPLOY / unit).read_text().splitlines():
        if "=" in line and not line.startswith("#"):
            key, _, value = line.partition("=")
            found.setdefault(key, []).append(value)
    return found


def test_systemd_accepts_the_units(tmp_path: Path) -> None:
    if shutil.which("systemd-analyze") is None:
        pytest.skip("systemd-analyze is not installed")
    for unit in [*SERVICES, "kvforge.target"]:
        # What the units start is installed later, and verify looks whether it is there.
        text = (DEPLOY / unit).read_text().replace("/opt/kvforge/.venv/bin/python", sys.executable)
        (tmp_path / unit).write_text(text)
    (tmp_path / "kvforge-worker@a.service").write_text((tmp_path / "kvforge-worker@.service").read_text())
    paths = [str(tmp_path / name) for name in (*SERVICES, "kvforge-worker@a.service", "kvforge.target")]
    done = subprocess.run(
        ["systemd-analyze", "verify", "--man=no", "--recursive-errors=no", *paths],
        capture_output=True,
        text=True,
        timeout=60,
        env={**os.environ, "SYSTEMD_UNIT_PATH": f"{tmp_path}:"},
    )
    ours = [line for line in done.stderr.splitlines() if "kvforge" in line]
    assert (done.returncode, ours) == (0, []), done.stderr


def test_only_the_coordinator_owns_the_runtime_folder() -> None:
    """systemd removes it when a unit that names it stops: a worker that does would cut off all the others."""
    owners = [unit for unit in SERVICES if "RuntimeDirectory" in settings(unit)]
    assert owners == ["kvforge-coordinator.service"]
    assert settings(owners[0])["RuntimeDirectoryPreserve"] == ["restart"]


def test_services_say_when_they_serve_and_give_up_on_a_wrong_configuration() -> None:
    for unit, final in zip(SERVICES[:2], (["2"], ["2 3"]), strict=True):
        found = settings(unit)
        assert found["Type"] == ["notify"]
        assert found["Restart"] == ["on-failure"]
        assert found["RestartPreventExitStatus"] == final
        assert found["KillSignal"] == ["SIGTERM"]


def test_example_configurations_agree_with_the_units() -> None:
    coordinator = tomllib.loads((DEPLOY / "coordinator.toml").read_text())
    worker = tomllib.loads((DEPLOY / "worker.toml").read_text())
    assert coordinator["runtime_dir"] == worker["runtime_dir"] == "/run/kvforge"
    assert settings("kvforge-worker@.service")["ExecStart"][0].endswith("--config /etc/kvforge/worker-%i.toml")
    assert coordinator["limits"]["blocks_per_sequence_max"] <= coordinator["limits"]["blocks_max"]


# ------------------------------------------------------------------------------------------------------ a real boot


def write_units(units: Path) -> None:
    """deploy/ as it is, with drop-ins that start this checkout as root instead of what is installed in /opt."""
    shutil.copytree(DEPLOY, units)
    config = {"kvforge-coordinator": "coordinator.toml", "kvforge-worker@": "worker-%i.toml", "kvforge-drain": ""}
    for name, file in config.items():
        [command] = settings(f"{name}.service")["ExecStop" if name == "kvforge-drain" else "ExecStart"]
        key = "ExecStop" if name == "kvforge-drain" else "ExecStart"
        command = command.replace("/opt/kvforge/.venv/bin/python", sys.executable)
        command = re.sub(r"/etc/kvforge/\S+", f"{KEEP}/{file}", command)
        drop_in = units / f"{name}.service.d" / "test.conf"
        drop_in.parent.mkdir()
        drop_in.write_text(
            # BindReadOnlyPaths: a checkout under /tmp is to be seen in spite of PrivateTmp.
            f"[Service]\nUser=root\nGroup=root\nBindReadOnlyPaths={CHECKOUT}\nWorkingDirectory={CHECKOUT}\n"
            f"Environment=PYTHONPATH={CHECKOUT} PYTHONDONTWRITEBYTECODE=1\n"
            f"StandardOutput=append:{KEEP}/{name}.log\nStandardError=append:{KEEP}/{name}.log\n{key}=\n{key}={command}\n"
        )
    (units / "kvforge.target.d").mkdir()
    (units / "kvforge.target.d" / "test.conf").write_text("[Unit]\nWants=kvforge-worker@a.service\n")
    (units / "check.service").write_text(
        "[Unit]\nWants=kvforge.target\nSuccessAction=exit\nFailureAction=exit\nFailureActionExitStatus=1\n"
        f"[Service]\nType=oneshot\nWorkingDirectory={CHECKOUT}\n"
        f"Environment=PYTHONPATH={CHECKOUT} PYTHONDONTWRITEBYTECODE=1 KVFORGE_RUNTIME_DIR=/run/kvforge\n"
        f"ExecStart={sys.executable} {HERE / 'systemd_check.py'} {KEEP}/found.json\n"
    )


def write_configuration(keep: Path) -> None:
    """The example configurations with a model of random weights, so that they are tried too."""
    shutil.copy(DEPLOY / "coordinator.toml", keep)
    worker = (DEPLOY / "worker.toml").read_text()
    for key, value in {
        "name": '"a"',
        "model": f'"{KEEP}/model"',
        "load_format": '"dummy"',
        "device": '"cpu"',
        "kv_bytes": "4194304",
        "threads": "1",
    }.items():
        worker, count = re.subn(rf"^{key} = .*$", f"{key} = {value}", worker, flags=re.MULTILINE)
        assert count == 1, key
    (keep / "worker-a.toml").write_text(worker)
    (keep / "model").mkdir()
    config = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "hidden_size": 64,
        "intermediate_size": 128,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "vocab_size": 256,
        "max_position_embeddings": 512,
    }
    (keep / "model" / "config.json").write_text(json.dumps(config))


@pytest.mark.root
def test_the_units_serve_drain_and_stop(tmp_path: Path) -> None:
    units, keep = tmp_path / "units", tmp_path / "keep"
    keep.mkdir()
    write_units(units)
    write_configuration(keep)
    command = [HERE / "systemd_sandbox.sh", "--units", units, "--keep", keep, "--start", "check.service"]
    command += ["--show", CHECKOUT, "--timeout", str(BOOT_S_MAX)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=BOOT_S_MAX + 30)
    if done.returncode == 77:
        pytest.skip(done.stderr.strip())
    logs = "\n".join(f"== {path.name}\n{path.read_text()}" for path in sorted(keep.glob("*.log")))
    assert (keep / "found.json").exists(), f"{done.stdout}\n{done.stderr}\n{logs}"
    found = json.loads((keep / "found.json").read_text())
    assert "error" not in found, f"{found['error']}\n{found['states']}\n{done.stdout}\n{logs}"
    assert done.returncode == 0

    assert len(found["tokens"]) == 8
    assert {row["ActiveState"] for row in found["serving"].values()} == {"active"}
    assert (found["drained_tokens"], found["drained_reason"]) == (480, "length")
    for unit, row in found["stopped"].items():
        assert row["ActiveState"] == "inactive", (unit, row, logs)
        if unit.endswith(".service"):
            assert (row["Result"], row["ExecMainStatus"], row["NRestarts"]) == ("success", "0", "0"), (unit, row, logs)
    assert found["runtime_files"]
    assert not found["runtime_dir_left"]
