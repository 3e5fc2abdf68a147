"""Runs as root in the sandboxed systemd of test_systemd_boot.py: installs, serves, kills, stops, writes its findings.

Arguments: the file for its findings (JSON), the service's Python, a model, folders with kvforge's dependencies.
Exit status: 0 when it ran to its end.
"""

from __future__ import annotations

import json
import os
import re
import select
import signal
import socket
import subprocess
import sys
import tomllib
import traceback
import urllib.request
from pathlib import Path
from time import monotonic
from typing import Any

from kvforge import Client, KvforgeError, SamplingParams

COORDINATOR, WORKER = "kvforge-coordinator.service", "kvforge-worker@cpu.service"
TWIN = "kvforge-worker@twin.service"
GATEWAY = "kvforge-gateway.service"
UNITS = [COORDINATOR, WORKER, GATEWAY, "kvforge-drain.service", "kvforge.target"]
PROPERTIES = "Id,ActiveState,SubState,Result,ExecMainCode,ExecMainStatus,NRestarts,MainPID"
GREEDY = SamplingParams(temperature=0.0, ignore_eos=True)
PROMPT, LONG = [4, 5, 6], 480
DEADLINE_S = 300.0  # ends a step that hangs: beside busy tests a first start of a worker took 64 s
SERVICE_FOLDERS = (
    "/opt/kvforge",
    "/etc/kvforge",
    "/etc/sysusers.d/kvforge.conf",
    "/etc/tmpfiles.d/kvforge.conf",
    "/var/lib/kvforge",
    "/var/cache/kvforge",
)
CONFIGURATION = Path("/etc/kvforge")


def systemctl(*arguments: str) -> str:
    done = subprocess.run(["systemctl", *arguments], check=True, capture_output=True, text=True, timeout=DEADLINE_S)
    return done.stdout


def states(*units: str) -> dict[str, dict[str, str]]:
    blocks = systemctl("show", "--property", PROPERTIES, *units).strip().split("\n\n")
    rows = [dict(line.split("=", 1) for line in block.splitlines()) for block in blocks]
    return {row["Id"]: row for row in rows}


def kvforge(*arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "kvforge", *arguments]
    return subprocess.run(command, capture_output=True, text=True, timeout=DEADLINE_S)


def install(found: dict[str, Any], python: str, model: str, packages: list[str]) -> None:
    """Install as an administrator would, with local dependencies instead of downloads."""
    arguments = ["deploy", "install", "--python", python, "--worker", "cpu", "--model", model]
    arguments += ["--pip=--no-index", "--pip=--no-deps"]
    done = kvforge(*arguments)
    assert done.returncode == 0, done.stderr
    found["installed"] = done.stderr
    found["installed_again"] = kvforge(*arguments).stderr
    [site] = Path("/opt/kvforge/.venv/lib").glob("python*/site-packages")
    (site / "packages.pth").write_text("\n".join(map(shown, packages)))
    edit("worker-cpu.toml", load_format='"dummy"', kv_bytes="4194304", threads="1")
    edit("coordinator.toml", idle_timeout_s="2.0")
    with socket.create_server(("127.0.0.1", 0)) as free:  # other tests share the network
        edit("gateway.toml", port=str(free.getsockname()[1]))
    with (CONFIGURATION / "coordinator.toml").open("a") as file:
        file.write("\n[journal]\nreplay_ms_max = 50.0\n")  # forces snapshots
    done = kvforge("deploy", "check", "--json")
    found["checked"] = {"status": done.returncode, "findings": json.loads(done.stdout), "said": done.stderr}


def shown(folder: str) -> str:
    """Return the path at which services see a folder that may be in a home or /tmp, which are hidden from them."""
    place = Path("/opt/needed") / folder.strip("/").replace("/", "-")
    place.mkdir(parents=True)
    subprocess.run(["mount", "--bind", folder, place], check=True, timeout=DEADLINE_S)
    return str(place)


def edit(name: str, **settings: str) -> None:
    """Change settings of a configuration file."""
    text = (CONFIGURATION / name).read_text()
    for key, value in settings.items():
        text, count = re.subn(rf"^{key} = \S+", f"{key} = {value}", text, flags=re.MULTILINE)
        assert count == 1, key
    (CONFIGURATION / name).write_text(text)


def ask(prompt: list[int], count: int) -> list[int]:
    """Return a request's tokens, once the service is ready."""
    with Client(connect_timeout_s=DEADLINE_S) as client:
        client.wait_ready(timeout_s=DEADLINE_S)
        return list(client.submit(prompt, max_tokens=count, sampling=GREEDY).result(timeout_s=DEADLINE_S).tokens)


def disturb(unit: str, number: signal.Signals) -> dict[str, Any]:
    """Signal the unit's process while a request runs; return the outcome of both."""
    before = pid_of(unit)
    request: list[int] | str
    with Client(connect_timeout_s=DEADLINE_S) as client:
        running = client.submit(PROMPT, max_tokens=LONG, sampling=GREEDY)
        next(iter(running))
        os.kill(before, number)
        wait_gone(before)
        try:
            request = list(running.result(timeout_s=DEADLINE_S).tokens)
        except KvforgeError as error:
            request = repr(error)
    return {"request": request, "tokens_after": ask([1, 2, 3], 8), "pids": [before, pid_of(unit)]}


def rolling() -> dict[str, Any]:
    """Replace worker and coordinator one by one while a request runs, as after an upgrade."""
    with Client(connect_timeout_s=DEADLINE_S) as client:
        running = client.submit(PROMPT, max_tokens=LONG, sampling=GREEDY)
        tokens = iter(running)
        came = [next(tokens).token_id]
        before = [pid_of(WORKER), pid_of(COORDINATOR)]
        systemctl("restart", WORKER)  # returns when the worker is ready with its model loaded
        ready = client.health().ready
        came.append(next(tokens).token_id)
        systemctl("restart", COORDINATOR)
        worker = pid_of(WORKER)
        came += [token.token_id for token in tokens]
        return {
            "request": came,
            "reason": running.result(timeout_s=DEADLINE_S).reason,
            "ready": ready,
            "pids": [*before, worker, pid_of(COORDINATOR)],
            "worker_after": pid_of(WORKER),
        }


def over_http() -> dict[str, Any]:
    """Send a request with a key, before and after the gateway is killed."""
    before, first = pid_of(GATEWAY), complete()
    os.kill(before, signal.SIGKILL)
    wait_gone(before)
    second = complete()
    with Client(connect_timeout_s=DEADLINE_S) as client:
        client.purge_finished(0)  # a kept answer would otherwise be in the journal at the end
    return {
        "pids": [before, pid_of(GATEWAY)],
        "answers": [first["choices"][0]["token_ids"], second["choices"][0]["token_ids"]],
        "requests": [first["id"], second["id"]],
    }


def complete() -> dict[str, Any]:
    """Retry until a gateway answers."""
    body = {"prompt": PROMPT, "max_tokens": 40, "temperature": 0, "ignore_eos": True, "return_token_ids": True}
    headers = {"content-type": "application/json", "idempotency-key": "one"}
    port = tomllib.loads((CONFIGURATION / "gateway.toml").read_text())["port"]
    url = f"http://127.0.0.1:{port}/v1/completions"
    deadline = monotonic() + DEADLINE_S
    while True:
        request = urllib.request.Request(url, json.dumps(body).encode(), headers)
        try:
            with urllib.request.urlopen(request, timeout=DEADLINE_S) as answer:  # noqa: S310 - ours
                return json.loads(answer.read())  # type: ignore[no-any-return]
        except OSError:
            assert monotonic() < deadline
            select.select([], [], [], 0.1)


def cannot_go_on() -> dict[str, dict[str, str]]:
    """Check a coordinator that no restart can help: a damaged journal, a wrong configuration."""
    rows = {}
    damaged = Path("/var/lib/kvforge/state-0000000000000001")
    damaged.write_bytes(b"nothing that a coordinator wrote")
    rows["damaged"] = fails(COORDINATOR)
    damaged.unlink()
    before = (CONFIGURATION / "coordinator.toml").read_text()
    edit("coordinator.toml", durability='"for_ever"')
    rows["wrong"] = fails(COORDINATOR)
    (CONFIGURATION / "coordinator.toml").write_text(before)
    return rows


def fails(unit: str) -> dict[str, str]:
    """Start a unit that fails; return its state."""
    subprocess.run(["systemctl", "start", unit], check=False, capture_output=True, timeout=DEADLINE_S)
    row = wait_state(unit, "failed")
    systemctl("reset-failed", unit)
    return row


def wait_gone(pid: int) -> None:
    descriptor = os.pidfd_open(pid)
    assert select.select([descriptor], [], [], DEADLINE_S)[0], f"process {pid} still runs"
    os.close(descriptor)


def pid_of(unit: str) -> int:
    return int(systemctl("show", "--property", "MainPID", "--value", unit))


def cannot_start() -> dict[str, Any]:
    """Check a worker with a device that its required kernels do not support."""
    before = (CONFIGURATION / "worker-cpu.toml").read_text()
    systemctl("stop", WORKER)
    spoilt = Path("/var/lib/spoilt")
    spoilt.mkdir(mode=0o755)
    (spoilt / "config.json").write_text('{"architectures": ["NobodyKnows"], "model_type": "nobody_knows"}')
    edit("worker-cpu.toml", model=f'"{spoilt}"')
    subprocess.run(["systemctl", "start", WORKER], check=False, capture_output=True, timeout=DEADLINE_S)
    row = wait_state(WORKER, "failed")
    health = kvforge("health")
    (CONFIGURATION / "worker-cpu.toml").write_text(before)
    systemctl("reset-failed", WORKER)
    systemctl("start", WORKER)
    return {"state": row, "health": health.stdout + health.stderr}


def gives_up() -> dict[str, Any]:
    """Check a worker that a restart might help but does not: another one has its name."""
    text = (CONFIGURATION / "worker-cpu.toml").read_text()
    (CONFIGURATION / "worker-twin.toml").write_text(text)
    subprocess.run(["systemctl", "start", TWIN], check=False, capture_output=True, timeout=DEADLINE_S)
    row = wait_state(TWIN, "failed")
    checked = kvforge("deploy", "check")
    (CONFIGURATION / "worker-twin.toml").unlink()
    return {"state": row, "checked": checked.stdout, "status": checked.returncode}


def wait_state(unit: str, state: str) -> dict[str, str]:
    deadline = monotonic() + DEADLINE_S
    while (row := states(unit)[unit])["ActiveState"] != state:
        assert monotonic() < deadline, row
        select.select([], [], [], 0.1)
    return row


def processes_of(user: str) -> list[str]:
    done = subprocess.run(["ps", "-u", user, "-o", "args="], capture_output=True, text=True, timeout=30)
    return done.stdout.splitlines()


def look(found: dict[str, Any]) -> None:
    python, model, *packages = sys.argv[2:]
    install(found, python, model, packages)
    systemctl("start", "kvforge.target", WORKER, GATEWAY)
    found["tokens"] = ask([1, 2, 3], 8)
    found["undisturbed"] = ask(PROMPT, LONG)
    found["serving"] = states(*UNITS)
    found["users"] = {unit: Path(f"/proc/{pid_of(unit)}").owner() for unit in (COORDINATOR, WORKER)}
    found["runtime_files"] = sorted(path.name for path in Path("/run/kvforge").iterdir())
    killed = disturb(WORKER, signal.SIGKILL)
    found["worker_killed"] = {"tokens": killed["request"], "pids": killed["pids"]}
    found["coordinator_killed"] = disturb(COORDINATOR, signal.SIGKILL)
    found["coordinator_hung"] = disturb(COORDINATOR, signal.SIGSTOP)
    hung = disturb(WORKER, signal.SIGSTOP)
    found["worker_hung"] = {"tokens": hung["request"], "pids": hung["pids"]}
    found["rolling"] = rolling()
    found["gateway"] = over_http()
    found["gives_up"] = gives_up()
    found["cannot_start"] = cannot_start()
    ask([1, 2, 3], 8)
    found["state_files"] = sorted(path.name for path in Path("/var/lib/kvforge").iterdir())
    with Client() as client:
        # One more request runs during the stop of everything: it must finish, not be dropped.
        last = client.submit(PROMPT, max_tokens=LONG, sampling=GREEDY)
        tokens = iter(last)
        first = next(tokens)
        systemctl("stop", "--no-block", "kvforge.target")
        found["drained"] = [token.token_id for token in (first, *tokens)]
        found["drained_reason"] = last.result(timeout_s=30).reason
    systemctl("stop", "kvforge.target")  # joins the running stop and waits for its end
    found["stopped"] = states(*UNITS)
    found["runtime_dir_left"] = Path("/run/kvforge").exists()
    found["processes_left"] = processes_of("kvforge")
    found["state_left"] = sorted(path.name for path in Path("/var/lib/kvforge").iterdir())
    found["cannot_go_on"] = cannot_go_on()
    found["uninstalled"] = uninstalled()


def uninstalled() -> dict[str, Any]:
    """Uninstall while the coordinator runs and is enabled; then purge."""
    for path in Path("/var/lib/kvforge").iterdir():
        path.unlink()
    systemctl("reset-failed", COORDINATOR)
    systemctl("enable", "--now", COORDINATOR)
    (Path("/var/lib/kvforge") / "mine").touch()
    ran = kvforge("deploy", "uninstall")
    facts: dict[str, Any] = {"status": ran.returncode, "printed": ran.stderr}
    facts["active"] = subprocess.run(
        ["systemctl", "is-active", COORDINATOR], capture_output=True, text=True
    ).stdout.strip()
    listed = subprocess.run(["systemctl", "list-unit-files", "--no-legend", "kvforge*"], capture_output=True, text=True)
    facts["listed"] = listed.stdout.split()
    facts["loaded"] = systemctl("list-units", "--all", "--no-legend", "--plain", "kvforge*").split()
    facts["places"] = sorted(str(path) for path in map(Path, SERVICE_FOLDERS) if path.exists())
    facts["state"] = (Path("/var/lib/kvforge") / "mine").exists()
    facts["purge"] = kvforge("deploy", "uninstall", "--purge").returncode
    facts["purged"] = sorted(str(path) for path in map(Path, SERVICE_FOLDERS) if path.exists())
    facts["user"] = subprocess.run(["getent", "passwd", "kvforge"], capture_output=True).returncode == 0
    return facts


def main() -> None:
    found: dict[str, Any] = {}
    try:
        look(found)
    except Exception:  # noqa: BLE001 - the test reports any failure
        found["error"] = traceback.format_exc()
        found["states"] = states(*UNITS)
    Path(sys.argv[1]).write_text(json.dumps(found, indent=1))
    sys.exit("error" in found)


if __name__ == "__main__":
    main()
