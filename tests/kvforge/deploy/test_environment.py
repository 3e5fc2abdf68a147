"""Environments side by side, and the link by which services find the newest."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from kvforge.deploy import environment as environments
from kvforge.deploy.environment import PIN, PINNED, Python, environment
from kvforge.deploy.install_step import Record
from kvforge.deploy.places import Places
from kvforge.protocol.errors import Unavailable

DEADLINE_S = 60.0
During = Callable[[], None]


class Wheel:
    """A wheel of some kvforge version."""

    version = digest = "1"

    def write(self, folder: Path) -> Path:
        return folder / "kvforge.whl"


class Service:
    """A system that creates its environment without a network. during: called during the installation of packages."""

    def __init__(self, root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self.places, self.wheel, self.python = Places(root), Wheel(), Python(Path(sys.executable))
        self.during: During = lambda: None
        self.installed: list[str] = []  # arguments of the last `pip install`
        monkeypatch.setattr(environments, "must", self._must)
        monkeypatch.setattr(environments, "Wheel", lambda: self.wheel)

    def _must(self, command: list[str | Path], show: bool = False) -> None:
        assert show == ("pip" in command)
        if show:
            assert command[0] != self.places.venv / "bin" / "python", "nothing is installed where services run"
            self.during()
            self.installed = [str(each) for each in command[6:]]
            (Path(command[0]).parent / "kvforge").write_text(f"#!{command[0]}\n")
            return
        made = Path(command[-1])
        site = made / "lib" / "python3.11" / "site-packages"
        for folder in (site, made / "bin"):
            folder.mkdir(parents=True)
        (site / "version").write_text(self.wheel.version)
        (made / "bin" / "pip").touch()
        (made / "pyvenv.cfg").touch()

    def install(self) -> list[str]:
        """Install; return the actions, cut after the folder's name."""
        said = []
        for step in environment(self.places, self.python, Record(self.places)):
            assert step.act is not None
            step.act()
            said.append(step.words.replace(f"{self.places.root}/opt/kvforge/", ""))
        return said

    def upgrade(self, version: str) -> list[str]:
        self.wheel.version = self.wheel.digest = version
        return self.install()

    @property
    def started(self) -> str:
        """Return the version that a new process runs."""
        (found,) = (self.places.venv / "lib").glob("python*/site-packages/version")
        return found.read_text()

    @property
    def kept(self) -> list[str]:
        return sorted(path.name for path in self.places.environments.iterdir())


@pytest.fixture
def service(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Service:
    return Service(tmp_path, monkeypatch)


def test_another_version_is_made_beside_the_one_that_runs_and_then_found_in_its_place(service: Service) -> None:
    said = service.install()
    assert [words.split()[:2] for words in said] == [["create", "the"], ["install", "kvforge"], ["link", ".venv"]]
    assert service.install() == [] and service.started == "1"
    seen: list[Any] = []
    service.during = lambda: seen.append((service.started, service.kept))
    said = service.upgrade("2")
    assert seen == [("1", ["1", "2"])]
    assert service.started == "2" and not service.places.venv.readlink().is_absolute()
    assert service.install() == ["remove the unused environment environments/1"]
    assert service.kept == ["2"] and service.install() == []


def test_what_is_still_used_is_not_removed(service: Service, monkeypatch: pytest.MonkeyPatch) -> None:
    used = [True]
    monkeypatch.setattr(Places, "here", property(lambda _: True))
    monkeypatch.setattr(environments, "_in_use", lambda _: used[0])
    service.install()
    service.upgrade("2")
    assert service.install() == [] and service.kept == ["1", "2"]
    service.upgrade("3")
    assert service.kept == ["1", "2", "3"]
    used[0] = False
    assert len(service.install()) == 2 and service.kept == ["3"] and service.started == "3"


def test_where_packages_cannot_be_installed_services_have_what_they_had(service: Service) -> None:
    def fails() -> None:
        raise Unavailable("no network")

    service.install()
    service.during = fails
    with pytest.raises(Unavailable):
        service.upgrade("2")
    assert service.started == "1"
    service.during = lambda: None
    assert service.install()[0] == "remove the unused environment environments/2"
    assert service.started == "2"


def test_an_environment_that_an_earlier_kvforge_made_in_place_is_kept_until_nothing_uses_it(service: Service) -> None:
    service._must([service.places.venv])
    service.upgrade("2")
    assert service.started == "2" and service.kept == ["0", "1"]
    service.install()
    assert service.kept == ["1"]


def test_programs_of_a_system_that_is_made_in_a_folder_name_their_interpreter_where_it_will_be(
    service: Service,
) -> None:
    service.install()
    program = service.places.venv / "bin" / "kvforge"
    assert program.read_text() == "#!/opt/kvforge/environments/1/bin/python\n"


def test_what_runs_imports_from_the_environment_that_it_was_started_from(tmp_path: Path) -> None:
    """Also if the link points elsewhere meanwhile; a running process counts as a user of its environment."""
    link = tmp_path / ".venv"
    for name in ("1", "2"):
        subprocess.run([sys.executable, "-m", "venv", "--without-pip", tmp_path / name], check=True)
        (site,) = (tmp_path / name).glob("lib/python*/site-packages")
        (site / "late.py").write_text(f"environment = {name}\n")
        (site / PIN).write_text(PINNED)
    link.symlink_to("1")
    script = (
        "import json, sys; print(flush=True); sys.stdin.readline(); import late\n"
        "print(json.dumps([late.environment, sys.prefix, sys.executable, sys.path.count(sys.path[-1])]), flush=True)"
    )
    running = subprocess.Popen([link / "bin" / "python", "-c", script], stdin=-1, stdout=-1, text=True)
    assert running.stdout is not None
    running.stdout.readline()  # wait for its start
    link.with_name("part").symlink_to("2")
    link.with_name("part").replace(link)
    out, _ = running.communicate("\n", timeout=DEADLINE_S)
    old = str((tmp_path / "1").resolve())
    assert json.loads(out) == [1, old, f"{old}/bin/python", 1]
    done = subprocess.run(
        [link / "bin" / "python", "-c", "import late; print(late.environment)"], stdout=-1, check=True
    )
    assert done.stdout == b"2\n"


def test_an_environment_is_used_by_whoever_has_mapped_a_file_of_it(tmp_path: Path) -> None:
    path = tmp_path / "1" / "lib" / "some.so"
    path.parent.mkdir(parents=True)
    path.write_bytes(bytes(4096))
    script = "import mmap, sys; f = open(sys.argv[1], 'r+b'); m = mmap.mmap(f.fileno(), 0); print(flush=True); input()"
    user = subprocess.Popen([sys.executable, "-c", script, path], stdin=-1, stdout=-1, text=True)
    assert user.stdout is not None
    user.stdout.readline()
    assert environments._in_use(tmp_path / "1")
    assert not environments._in_use(tmp_path / "2")
    user.communicate("\n", timeout=DEADLINE_S)
    assert not environments._in_use(tmp_path / "1")


def test_the_release_of_torch_is_pinned(service: Service, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(environments, "version", lambda _name: "2.14.1+rocm7.1")
    service.upgrade("2")
    assert service.installed[0] == "torch==2.14.1" and service.installed[1].endswith("kvforge.whl[worker,gateway,tcp]")

    def missing(name: str) -> str:
        raise environments.PackageNotFoundError(name)

    monkeypatch.setattr(environments, "version", missing)
    service.upgrade("3")
    assert service.installed[0] == environments.TORCH


@pytest.mark.parametrize(
    "python",
    [Python(Path(sys.executable), pip=["torch==2.12.0"]), Python(Path(sys.executable), system_packages=True)],
    ids=["named by --pip", "beside the interpreter"],
)
def test_a_torch_that_the_caller_chose_stays(service: Service, python: Python) -> None:
    service.python = python
    service.install()
    assert [each for each in service.installed if each.startswith("torch")] == list(python.pip)
