"""Installation of clients: once, atomically, and with a reason on failure."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.gateway.clients import installs

pytestmark = pytest.mark.skipif(installs.unlocked() is not None, reason="no builds are locked for this machine")


@pytest.fixture
def npm(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A stand-in for npm, and an empty cache folder."""
    program = tmp_path / "bin" / "npm"
    program.parent.mkdir()
    monkeypatch.setenv("PATH", f"{program.parent}:/usr/bin:/bin")
    monkeypatch.setenv("KVFORGE_CACHE_DIR", str(tmp_path / "cache"))
    return program


def plays(program: Path, script: str) -> None:
    program.write_text(f"#!/bin/sh\n{script}\n")
    program.chmod(0o755)


def test_clients_are_installed_once(npm: Path) -> None:
    plays(npm, f"mkdir -p .npm node_modules; echo once >> {npm}.runs")
    assert installs.node_modules() == installs.node_modules()
    assert Path(f"{npm}.runs").read_text() == "once\n"
    assert sorted(path.name for path in installs.node_modules().parent.iterdir()) == [
        ".ready",
        "node_modules",
        "package-lock.json",
        "package.json",
    ]


def test_what_failed_is_begun_anew(npm: Path) -> None:
    plays(npm, "touch half; echo 'npm error code ENOTFOUND' >&2; exit 1")
    with pytest.raises(installs.Missing, match="npm could not install the clients: npm error code ENOTFOUND"):
        installs.node_modules()
    plays(npm, "mkdir -p .npm node_modules")
    assert not (installs.node_modules().parent / "half").exists()


def test_an_installation_is_bounded(npm: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(installs, "INSTALL_S", 0.2)
    plays(npm, "exec sleep 60")
    with pytest.raises(installs.Missing, match="npm did not end"):
        installs.node_modules()


def test_without_npm(npm: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(npm.parent))
    with pytest.raises(installs.Missing, match="npm is not on the PATH"):
        installs.node_modules()


@pytest.mark.parametrize("script", ["exit 0", "echo no index >&2; exit 1"])
def test_pip_installs_what_uv_cannot(script: str, npm: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    ran: list[str] = []
    run = installs._run
    monkeypatch.setattr(installs, "HERE", tmp_path)
    monkeypatch.setattr(installs, "_run", lambda command, folder: (ran.append(" ".join(command)), run(command, folder)))
    monkeypatch.setattr(installs, "_uv", lambda: str(npm))
    plays(npm, f"mkdir .uv; {script}")
    (tmp_path / "requirements").mkdir()
    (tmp_path / "requirements" / "none.txt").write_text("")
    python = installs.python_with("none")
    assert python.exists() and not (python.parents[2] / ".uv").exists()
    assert [" pip --python " in command for command in ran] == [False, False, True][: 2 + ("exit 1" in script)]
