"""The files that `kvforge deploy uninstall` removes from a system in a folder, and the files that it leaves."""

from __future__ import annotations

import os
import shutil
from pathlib import Path

import pytest

from kvforge.commands.cli import main
from kvforge.deploy.install import InstallOptions, install
from kvforge.deploy.places import CACHE_DIR, STATE_DIR, UNITS, Places
from kvforge.deploy.uninstall import uninstall
from kvforge.protocol.errors import Unavailable

pytestmark = pytest.mark.skipif(shutil.which("systemd-sysusers") is None, reason="needs systemd's programs")
KEPT = ("etc/kvforge", "var/lib/kvforge", "var/cache/kvforge")


class System:
    """A system in a folder in which the service is installed, with state and an environment."""

    def __init__(self, root: Path) -> None:
        self.places = Places(root)
        install(self.places, InstallOptions(("cpu", "gpu0")), lambda _: None, dry_run=False)
        environment = self.places.environments / "1"
        environment.mkdir(parents=True)
        (environment / "pyvenv.cfg").touch()
        self.places.venv.symlink_to("environments/1")
        (self.places.of(STATE_DIR) / "00000001.journal").write_bytes(b"accepted")
        (self.places.of(CACHE_DIR) / "model.gguf").write_bytes(b"weights")
        wants = self.places.units / "multi-user.target.wants"
        wants.mkdir()
        (wants / "kvforge.target").symlink_to("/etc/systemd/system/kvforge.target")

    def uninstall(self, *, purge: bool = False, dry_run: bool = False) -> list[str]:
        said: list[str] = []
        count = uninstall(self.places, said.append, dry_run=dry_run, purge=purge)
        assert count == len(said)
        return said

    def ours(self) -> list[str]:
        """The paths named after the service, without the contents of its folders."""
        found = [str(path.relative_to(self.places.root)) for path in self.places.root.rglob("*kvforge*")]
        return sorted(name for name in found if not any(name.startswith(f"{kept}/") for kept in KEPT))


@pytest.fixture
def system(tmp_path: Path) -> System:
    return System(tmp_path)


def test_what_was_put_in_place_is_removed_and_state_stays(system: System) -> None:
    before = {path: path.read_bytes() for kept in KEPT for path in (system.places.root / kept).iterdir()}
    said = system.uninstall()
    assert system.ours() == sorted(KEPT)
    assert {path: path.read_bytes() for path in before} == before
    assert not system.places.venv.is_symlink() and not system.places.environments.exists()
    assert "kvforge:" in system.places.of("/etc/passwd").read_text()
    assert [f"remove {system.places.units / name}" in said for name in UNITS] == [True] * len(UNITS)
    assert system.uninstall() == []


def test_what_is_installed_again_finds_its_state(system: System) -> None:
    system.uninstall()
    said: list[str] = []
    install(system.places, InstallOptions(("cpu", "gpu0")), said.append, dry_run=False)
    assert not any("kvforge/coordinator.toml" in line or ".new" in line for line in said)
    assert (system.places.of(STATE_DIR) / "00000001.journal").read_bytes() == b"accepted"


def test_a_purge_leaves_nothing(system: System) -> None:
    drop_in = system.places.units / "kvforge-worker@gpu0.service.d" / "override.conf"
    drop_in.parent.mkdir()
    drop_in.touch()
    system.uninstall()
    assert drop_in.exists()
    system.uninstall(purge=True)
    assert system.ours() == []
    assert "kvforge:" not in system.places.of("/etc/passwd").read_text()
    assert system.uninstall(purge=True) == []


def test_a_dry_run_says_the_same_and_changes_nothing(system: System) -> None:
    would = system.uninstall(purge=True, dry_run=True)
    assert (system.places.units / UNITS[0]).exists() and system.places.venv.is_symlink()
    assert would == [f"would {words}" for words in system.uninstall(purge=True)]


def test_a_unit_that_was_edited_is_kept_under_another_name(system: System) -> None:
    unit = system.places.units / "kvforge.target"
    text = f"{unit.read_text()}# mine\n"
    unit.write_text(text)
    kept = unit.with_name("kvforge.target.edited")
    assert f"keep the edited {unit} as {kept}" in system.uninstall()
    assert not unit.exists() and kept.read_text() == text


def test_what_others_put_beside_the_environment_stays(system: System) -> None:
    other = system.places.record.parent / "notes"
    other.touch()
    system.uninstall(purge=True)
    assert other.exists()


def test_it_is_a_command_and_needs_root(
    system: System, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    assert main(["deploy", "uninstall", "--root", str(system.places.root)]) == 0
    assert " and the user kvforge; `kvforge deploy uninstall --purge` removes them" in capsys.readouterr().err
    assert main(["deploy", "uninstall", "--root", str(system.places.root)]) == 0
    assert capsys.readouterr().err == "nothing is installed\n"
    monkeypatch.setattr(os, "geteuid", lambda: 1000)
    with pytest.raises(Unavailable, match="only root can remove the service"):
        uninstall(Places(), lambda _: None, dry_run=False, purge=False)
