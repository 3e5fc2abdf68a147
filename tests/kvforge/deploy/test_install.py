"""Files that `kvforge deploy install` writes to a system in a folder, and files that it leaves alone."""

from __future__ import annotations

import errno
import os
import shutil
import tomllib
from pathlib import Path
from typing import Any

import pytest

from kvforge.commands.cli import main
from kvforge.coordinator.config import load_config as load_coordinator
from kvforge.deploy import places as service
from kvforge.deploy.environment import HIDDEN, Python
from kvforge.deploy.install import InstallOptions, devices, install, instances, model_path, worker_file
from kvforge.deploy.places import FILES, UNITS, Places
from kvforge.protocol.errors import InvalidConfiguration, Unavailable
from kvforge.worker.config import load_config as load_worker

pytestmark = pytest.mark.skipif(shutil.which("systemd-sysusers") is None, reason="needs systemd's programs")
WISHES = InstallOptions(("gpu0", "cpu"))


class System:
    """A system in a folder, with the messages of installations."""

    def __init__(self, root: Path) -> None:
        self.places = Places(root)

    def install(self, options: InstallOptions = WISHES, *, dry_run: bool = False) -> list[str]:
        said: list[str] = []
        install(self.places, options, said.append, dry_run=dry_run)
        return said

    def files(self) -> dict[str, tuple[int, bytes]]:
        """Return all files with their modes."""
        found = {}
        for path in sorted(self.places.root.rglob("*")):
            mode = path.lstat().st_mode
            found[str(path.relative_to(self.places.root))] = (mode, path.read_bytes() if path.is_file() else b"")
        return found


@pytest.fixture
def system(tmp_path: Path) -> System:
    return System(tmp_path)


def test_everything_is_put_in_place_and_a_second_time_nothing(system: System) -> None:
    assert system.install()
    places, files = system.places, system.files()
    assert {path.name for path in places.units.iterdir()} == set(UNITS)
    assert [instance for instance, _ in places.workers()] == ["cpu", "gpu0"]
    assert oct(places.of(service.STATE_DIR).stat().st_mode & 0o777) == "0o700"
    assert oct((places.configuration / "coordinator.toml").stat().st_mode & 0o777) == "0o640"
    assert "kvforge" in places.of("/etc/passwd").read_text()
    assert system.install() == []
    assert system.files() == files


def test_a_dry_run_says_the_same_and_changes_nothing(system: System) -> None:
    would = system.install(dry_run=True)
    assert system.files() == {}
    assert would == [f"would {words}" for words in system.install()]


def test_files_are_readable_for_the_service_whatever_the_callers_mask_is(system: System) -> None:
    mask = os.umask(0o077)
    try:
        system.install()
        assert os.umask(0o077) == 0o077
    finally:
        os.umask(mask)
    for name in UNITS:
        assert (system.places.units / name).stat().st_mode & 0o444 == 0o444
    assert system.places.units.stat().st_mode & 0o005 == 0o005


@pytest.mark.parametrize("name", ["etc/kvforge/coordinator.toml", "etc/systemd/system/kvforge.target"])
def test_what_somebody_edited_stays_with_the_new_one_beside_it(system: System, name: str) -> None:
    system.install()
    path = system.places.root / name
    original = path.read_bytes()
    path.write_bytes(original + b"# mine\n")
    beside = path.with_name(path.name + ".new")
    told = f"keep the edited {path}; this version's file is {beside}: compare them"
    assert system.install() == [told, f"write {beside}"]
    assert (path.read_bytes(), beside.read_bytes()) == (original + b"# mine\n", original)
    assert system.install() == [told]


def test_what_nobody_edited_is_replaced_by_another_version(system: System) -> None:
    system.install(InstallOptions(("cpu",), model="/srv/one"))
    path = system.places.configuration / "worker-cpu.toml"
    assert system.install(InstallOptions(("cpu",), model="/srv/two")) == [f"replace the unedited {path}"]
    assert load_worker(path).model == "/srv/two"


def test_another_version_serves_the_same_model_on_the_same_devices(system: System) -> None:
    """An upgrade is `kvforge deploy install` and nothing else."""
    system.install(InstallOptions(("gpu1",), model="/srv/one"))
    assert instances(system.places, ()) == ("gpu1",)
    assert system.install(InstallOptions(instances(system.places, ()))) == []
    path = system.places.configuration / "worker-gpu1.toml"
    path.write_text(path.read_text().replace("/srv/one", "/srv/mine"))
    system.install(InstallOptions(("gpu1",)))
    assert load_worker(path.with_name("worker-gpu1.toml.new")).model == "/srv/mine"


def test_devices_are_those_that_are_named_else_those_that_are_configured_else_those_that_are_there(
    system: System, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("kvforge.deploy.install.devices", lambda: ("gpu0", "gpu1"))
    assert instances(system.places, ["cpu", "gpu3", "cpu"]) == ("cpu", "gpu3")
    assert instances(system.places, ()) == ("gpu0", "gpu1")
    system.install(InstallOptions(("cpu",)))
    (system.places.configuration / "worker-notes.toml").touch()
    assert instances(system.places, ()) == ("cpu",)


@pytest.mark.parametrize("model", ['/srv/a "model"', "/srv/back\\slash", "/srv/zwei\nzeilen", "/srv/größe"])
def test_a_model_may_have_any_name(model: str, tmp_path: Path) -> None:
    path = tmp_path / "worker.toml"
    path.write_bytes(worker_file("cpu", model))
    assert load_worker(path).model == model


def test_a_model_is_where_services_find_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HOME", "/home/me")
    (tmp_path / "mine.gguf").touch()
    assert model_path("mine.gguf") == str(tmp_path / "mine.gguf")
    assert [model_path(name) for name in (None, "smollm2-135m", "org/name", "/srv/m")] == [
        None,
        "smollm2-135m",
        "org/name",
        "/srv/m",
    ]
    for hidden in ("/home/me/model", "/root/m.gguf", "~/m.gguf"):
        with pytest.raises(InvalidConfiguration, match=r"--model: .* is in a home folder, which services cannot see"):
            model_path(hidden)


def test_a_file_that_was_there_before_is_taken_for_somebodys(system: System) -> None:
    path = system.places.configuration / "coordinator.toml"
    path.parent.mkdir(parents=True)
    path.write_text("drain_s = 1.0\n")
    system.install()
    assert path.read_text() == "drain_s = 1.0\n"
    assert load_coordinator(path.with_name("coordinator.toml.new")).runtime_path == service.RUNTIME_DIR


def test_a_mode_that_is_wrong_is_set_right(system: System) -> None:
    system.install()
    path = system.places.configuration / "coordinator.toml"
    path.chmod(0o666)
    assert system.install() == [f"set owner and mode of {path}"]
    assert path.stat().st_mode & 0o777 == 0o640


@pytest.mark.parametrize(
    ("instance", "device", "index"), [("cpu", "cpu", 0), ("gpu0", "auto", 0), ("gpu11", "auto", 11)]
)
def test_a_worker_gets_its_device(instance: str, device: str, index: int, tmp_path: Path) -> None:
    path = tmp_path / "worker.toml"
    path.write_bytes(worker_file(instance, "/srv/a model"))
    config = load_worker(path)
    assert (config.name, config.device, config.device_index, config.model) == (instance, device, index, "/srv/a model")
    example = tomllib.loads((FILES / "worker.toml").read_text())
    changed = {"name", "device", "device_index", "model"}
    assert {key: value for key, value in example.items() if key not in changed} == {
        key: value for key, value in tomllib.loads(path.read_text()).items() if key not in changed
    }


@pytest.mark.parametrize("instance", ["gpu", "gpu0x", "gpu007", "gpu\u0661", "../x", "a b", ""])
def test_an_instance_is_a_device(system: System, instance: str) -> None:
    with pytest.raises(InvalidConfiguration, match="it must be cpu, or gpu0"):
        system.install(InstallOptions((instance,)))
    assert system.files() == {}


@pytest.mark.parametrize(
    ("shown", "found"),
    [
        ([], ("cpu",)),
        (["nvidia0", "nvidia1", "nvidiactl"], ("gpu0", "gpu1")),
        (["kfd", "dri/renderD128", "dri/renderD129"], ("gpu0", "gpu1")),
        (["dri/renderD128"], ("cpu",)),  # a display device without compute
    ],
)
def test_each_gpu_has_a_worker(shown: list[str], found: tuple[str, ...], tmp_path: Path) -> None:
    for name in shown:
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).touch()
    assert devices(tmp_path) == found


@pytest.mark.parametrize("folder", HIDDEN)
def test_a_python_that_services_do_not_see_is_refused(folder: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "access", lambda *_: True)
    with pytest.raises(InvalidConfiguration, match="which services cannot see"):
        Python(Path(folder) / "me" / "python3").check()


def test_the_units_say_the_same_places() -> None:
    text = "\n".join((FILES / name).read_text() for name in UNITS)
    commands = [line for line in text.splitlines() if " -m " in line]
    assert len(commands) == 4
    assert all(line.split("=", 1)[1].removeprefix("-").startswith(f"{service.PYTHON} -m ") for line in commands)
    for setting, folder in (
        ("Runtime", service.RUNTIME_DIR),
        ("State", service.STATE_DIR),
        ("Cache", service.CACHE_DIR),
    ):
        assert f"\n{setting}Directory={folder.name}\n" in text
    assert f"/etc/kvforge/{service.WORKER_PATTERN.replace('*', '%i')}" in text
    assert (FILES / "sysusers.d" / "kvforge.conf").read_text().count(service.USER) >= 3
    for folder in (service.STATE_DIR, service.CACHE_DIR):
        assert f"d {folder} " in (FILES / "tmpfiles.d" / "kvforge.conf").read_text()


@pytest.mark.parametrize(("number", "hint"), [(errno.EACCES, ": use sudo"), (errno.EROFS, "")])
def test_what_cannot_be_used_is_said_in_a_sentence(
    system: System, monkeypatch: pytest.MonkeyPatch, number: int, hint: str
) -> None:
    def refuse(*_: Any) -> None:
        raise OSError(number, os.strerror(number), "/etc/there")

    monkeypatch.setattr("kvforge.deploy.install.place", refuse)
    with pytest.raises(Unavailable, match=f"^/etc/there cannot be used: {os.strerror(number)}{hint}$"):
        system.install()


def test_only_root_touches_the_running_system(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(os, "geteuid", lambda: 1000)
    done: list[Any] = []
    monkeypatch.setattr("kvforge.deploy.install._parts", lambda *arguments: done)
    assert main(["deploy", "install", "--no-venv", "--worker", "cpu"]) == 3
    assert "only root can install the service: use sudo" in capsys.readouterr().err
