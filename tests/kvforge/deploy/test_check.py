"""Findings of `kvforge deploy check` in a system with one defect."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from kvforge.commands.cli import main
from kvforge.deploy import check as checks
from kvforge.deploy.accounts import Account
from kvforge.deploy.check import check
from kvforge.deploy.findings import GOOD, WARNING, WRONG, Finding
from kvforge.deploy.folders import check_file_system, check_folders, file_system
from kvforge.deploy.gpus import check_devices
from kvforge.deploy.install import InstallOptions, install
from kvforge.deploy.places import Places
from kvforge.deploy.program import Outcome
from kvforge.deploy.units import _service, check_units

needs_systemd = pytest.mark.skipif(shutil.which("systemd-sysusers") is None, reason="needs systemd's programs")
USER = Account(os.geteuid(), os.getegid(), {"kvforge": os.getegid()})
MEANING = {
    "coordinator": {"runtime_dir": "/run/kvforge", "state_dir": "/var/lib/kvforge", "tables_bytes": 4096},
    "worker": {
        "runtime_dir": "/run/kvforge",
        "kind": "cpu",
        "name": "cpu",
        "rank": 0,
        "ranks": 1,
        "model": "m",
        "device": "CPU",
        "torch": "2",
    },
    "gateway": {"runtime_dir": "/run/kvforge", "address": "http://127.0.0.1:8000", "processes": 1, "keys": 0},
}
Spoil = Callable[[Places], None]


@pytest.fixture
def places(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Places:
    """Return a correct system, as far as possible without a running service."""
    made = Places(tmp_path)
    install(made, InstallOptions(("cpu",)), lambda _: None, dry_run=False)
    python = made.of("/opt/kvforge/.venv/bin/python")
    python.parent.mkdir(parents=True)
    python.touch(mode=0o755)
    monkeypatch.setattr(checks, "_run", answers)
    monkeypatch.setattr(checks, "check_services", lambda _: [])
    return made


def answers(python: Path, user: Account | None, *arguments: str) -> Outcome:
    """Return the output of coordinator and worker with --check."""
    from kvforge import __version__

    if "-c" in arguments:
        return Outcome(0, f"{__version__} 3.11.7\n", "")
    return Outcome(0, json.dumps(MEANING[arguments[2].removeprefix("kvforge.")]), "")


def bad(findings: list[Finding]) -> list[Finding]:
    return [finding for finding in findings if finding.kind == WRONG]


@needs_systemd
def test_a_good_one_has_nothing_wrong(places: Places) -> None:
    assert bad(check(places)) == []


def remove(path: str) -> Spoil:
    return lambda places: places.of(path).unlink()


@needs_systemd
@pytest.mark.parametrize(
    ("spoil", "what"),
    [
        (remove("/etc/systemd/system/kvforge.target"), "lacks kvforge.target"),
        (remove("/etc/kvforge/coordinator.toml"), "coordinator.toml is missing"),
        (remove("/etc/kvforge/gateway.toml"), "gateway.toml is missing"),
        (remove("/etc/kvforge/worker-cpu.toml"), "no worker is configured"),
        (remove("/opt/kvforge/.venv/bin/python"), "there is no environment"),
        (lambda places: places.of("/etc/passwd").write_text(""), "there is no user kvforge"),
        (lambda places: places.of("/var/lib/kvforge").chmod(0o755), "everyone can read it"),
        (lambda places: places.of("/etc/kvforge").chmod(0o777), "everyone can write it"),
        (lambda places: places.of("/var/cache/kvforge").rmdir(), "/var/cache/kvforge is missing"),
    ],
)
def test_what_is_wrong_is_named_with_a_remedy(places: Places, spoil: Spoil, what: str) -> None:
    spoil(places)
    found = [finding for finding in bad(check(places)) if what in finding.what]
    assert len(found) == 1, check(places)
    assert found[0].remedy


@needs_systemd
@pytest.mark.parametrize(
    ("role", "change", "kind", "what"),
    [
        (
            "coordinator",
            {"runtime_dir": "/srv/run"},
            WRONG,
            "runtime_dir is /srv/run, but the unit creates /run/kvforge",
        ),
        ("coordinator", {"state_dir": "/srv/state"}, WARNING, "state_dir is /srv/state, but the unit creates"),
        ("coordinator", {"tables_bytes": 1 << 60}, WRONG, "MiB are needed"),
        ("coordinator", {"on_stop": "drain"}, WARNING, "a restart of the coordinator hands requests back"),
        ("worker", {"runtime_dir": "/srv/run"}, WRONG, "the coordinator's is /run/kvforge"),
        ("gateway", {"runtime_dir": "/srv/run"}, WRONG, "the coordinator's is /run/kvforge"),
        ("gateway", {"runtime_dir": ""}, GOOD, "address http://127.0.0.1:8000"),
    ],
)
def test_settings_and_units_belong_together(
    places: Places, monkeypatch: pytest.MonkeyPatch, role: str, change: dict[str, Any], kind: str, what: str
) -> None:
    monkeypatch.setitem(MEANING, role, {**MEANING[role], **change})
    assert [finding.kind for finding in check(places) if what in finding.what] == [kind]


@needs_systemd
def test_two_workers_of_one_name_are_found(places: Places) -> None:
    shutil.copy(places.configuration / "worker-cpu.toml", places.configuration / "worker-other.toml")
    assert [finding.what.endswith("have one name") for finding in bad(check(places))] == [True]


@needs_systemd
def test_a_rank_that_is_not_configured_is_found(places: Places, monkeypatch: pytest.MonkeyPatch) -> None:
    shutil.copy(places.configuration / "worker-cpu.toml", places.configuration / "worker-other.toml")

    def ranks(python: Path, user: Account | None, *arguments: str) -> Outcome:
        done = answers(python, user, *arguments)
        rank = int(any("worker-other" in each for each in arguments))
        return Outcome(
            done.status, done.output.replace('"rank": 0, "ranks": 1', f'"rank": {rank}, "ranks": {count}'), ""
        )

    monkeypatch.setattr(checks, "_run", ranks)
    count = 2
    assert bad(check(places)) == []
    count = 3
    assert [finding.what for finding in bad(check(places))] == ["worker 'cpu': rank 2 is not configured"]


@needs_systemd
def test_what_a_role_says_of_its_file_is_passed_on(places: Places, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuses(python: Path, user: Account | None, *arguments: str) -> Outcome:
        done = answers(python, user, *arguments)
        return Outcome(2, "", "worker: colour: there is no such setting\n") if "kvforge.worker" in arguments else done

    monkeypatch.setattr(checks, "_run", refuses)
    [finding] = bad(check(places))
    assert finding.what == f"{places.configuration}/worker-cpu.toml: colour: there is no such setting"


@needs_systemd
def test_units_that_were_edited_and_what_systemd_says_of_them(places: Places) -> None:
    path = places.units / "kvforge-coordinator.service"
    path.write_text(path.read_text().replace("Type=notify", "Type=nothing"))
    findings = check_units(places)
    assert findings[0].kind == WARNING
    assert "is not this version's file" in findings[0].what
    if shutil.which("systemd-analyze") is not None:
        assert any("service type" in finding.what and finding.kind == WRONG for finding in findings), findings


@pytest.mark.parametrize(
    ("facts", "kind", "what"),
    [
        ({"ActiveState": "active", "StatusText": "serving m"}, GOOD, "x.service is active (serving m)"),
        ({"ActiveState": "active", "NRestarts": "3"}, WARNING, "x.service is active, restarted 3 times"),
        ({"ActiveState": "inactive", "UnitFileState": "disabled"}, WARNING, "x.service is inactive (disabled)"),
        (
            {"ActiveState": "inactive", "UnitFileState": "disabled", "Id": "kvforge-gateway.service"},
            GOOD,
            "kvforge-gateway.service is disabled: HTTP is off (systemctl enable --now kvforge-gateway.service)",
        ),
        (
            {"ActiveState": "inactive", "UnitFileState": "enabled", "Id": "kvforge-gateway.service"},
            WARNING,
            "kvforge-gateway.service is inactive (enabled)",
        ),
        (
            {"ActiveState": "failed", "Result": "exit-code", "ExecMainStatus": "3"},
            WRONG,
            "x.service has failed: it ended with exit status 3",
        ),
        (
            {"ActiveState": "failed", "Result": "exit-code", "ExecMainStatus": "1", "NRestarts": "5"},
            WRONG,
            "x.service has failed: it ended with exit status 1, after 5 restarts",
        ),
        ({"ActiveState": "failed", "Result": "watchdog"}, WRONG, "x.service has failed: it hung, and was ended"),
        ({"ActiveState": "failed", "Result": "start-limit-hit"}, WRONG, "x.service has failed: it ended too often"),
    ],
)
def test_how_a_service_is(facts: dict[str, str], kind: str, what: str) -> None:
    finding = _service({"Id": "x.service", "Result": "success", **facts})
    assert (finding.kind, finding.what[: len(what)]) == (kind, what)


MOUNTS = """\
21 1 254:0 / / rw - ext4 /dev/vda rw
22 21 0:20 / /run rw shared:1 - tmpfs tmpfs rw
23 21 0:21 / /var/lib rw - nfs4 server:/x rw
24 21 0:22 / /mnt/a\\040b rw - fuse.sshfs host: rw
25 21 0:23 / /var/lib rw - xfs /dev/vdb rw
"""


@pytest.mark.parametrize(
    ("path", "kind"),
    [
        ("/etc", "ext4"),
        ("/run/kvforge", "tmpfs"),
        ("/runner", "ext4"),
        ("/var/lib/kvforge", "xfs"),
        ("/mnt/a b/c", "fuse.sshfs"),
    ],
)
def test_the_file_system_of_a_path_is_the_last_one_mounted_above_it(path: str, kind: str, tmp_path: Path) -> None:
    (tmp_path / "mountinfo").write_text(MOUNTS)
    assert file_system(Path(path), tmp_path / "mountinfo") == kind


@pytest.mark.parametrize(
    ("kind", "lasting", "bytes_min", "found"),
    [
        ("ext4", True, 1, GOOD),
        ("tmpfs", False, 1, GOOD),
        ("tmpfs", True, 1, WARNING),
        ("nfs4", True, 1, WRONG),
        ("fuse.sshfs", False, 1, WRONG),
        ("ext4", True, 1 << 60, WRONG),
    ],
)
def test_what_a_folder_is_on(
    kind: str, lasting: bool, bytes_min: int, found: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("kvforge.deploy.folders.file_system", lambda _: kind)
    [finding] = check_file_system("state_dir", tmp_path / "not" / "there", bytes_min, lasting=lasting)
    assert finding.kind == found, finding


def test_a_folder_of_somebody_else_is_found(tmp_path: Path) -> None:
    places = Places(tmp_path)
    for folder in ("etc/kvforge", "var/lib/kvforge", "var/cache/kvforge"):
        (tmp_path / folder).mkdir(mode=0o700, parents=True)
    somebody = Account(os.geteuid() + 1, 1, {})
    told = [finding.what for finding in bad(check_folders(places, somebody))]
    assert sum(f"belongs to uid {os.geteuid()}" in what for what in told) >= 2


@pytest.mark.parametrize(
    ("mode", "groups", "found"), [(0o660, {"render": os.getegid()}, GOOD), (0o660, {}, WRONG), (0o666, {}, GOOD)]
)
def test_whether_the_user_may_use_the_gpu(mode: int, groups: dict[str, int], found: str, tmp_path: Path) -> None:
    (tmp_path / "dri").mkdir()
    for name in ("kfd", "dri/renderD128"):
        (tmp_path / name).touch()
        (tmp_path / name).chmod(mode)
    user = Account(os.geteuid() + 1, os.getegid() + 1, groups)
    assert {finding.kind for finding in check_devices("gpu0", "hip", user, tmp_path)} == {found}


def test_a_device_file_that_is_missing_is_named(tmp_path: Path) -> None:
    (tmp_path / "nvidia0").touch(mode=0o666)
    (tmp_path / "nvidiactl").touch(mode=0o666)
    [finding] = check_devices("gpu0", "cuda", None, tmp_path)
    assert f"needs {tmp_path}/nvidia-uvm, which is missing" in finding.what


def test_a_worker_that_computes_on_the_cpu_beside_a_gpu_is_told(tmp_path: Path) -> None:
    assert check_devices("gpu0", "cpu", None, tmp_path) == []
    (tmp_path / "kfd").touch()
    assert [finding.kind for finding in check_devices("gpu0", "cpu", None, tmp_path)] == [WRONG]
    assert check_devices("cpu", "cpu", None, tmp_path) == []


def test_only_root_sees_all_of_it(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(os, "geteuid", lambda: 1000)
    assert main(["deploy", "check"]) == 3
    assert capsys.readouterr().err == "kvforge: the check needs root to see all files: use sudo\n"


def test_the_exit_status_tells(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    found = [Finding(GOOD, "this"), Finding(WARNING, "that", "look")]
    monkeypatch.setattr("kvforge.commands.deploy.check", lambda _: found)
    assert main(["deploy", "check"]) == 0
    assert capsys.readouterr().out == "ok: this\nwarning: that: look\n"
    found.append(Finding(WRONG, "it", "mend it"))
    assert main(["deploy", "check", "--json"]) == 1
    said = capsys.readouterr()
    assert json.loads(said.out)[2] == {"kind": "wrong", "what": "it", "remedy": "mend it"}
    assert said.err == "kvforge: 1 problem found\n"
