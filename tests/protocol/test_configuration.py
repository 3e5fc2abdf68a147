"""Configuration files: an unknown key is an error that names the key and the nearest known one; sizes have units."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import ClassVar

import msgspec
import pytest

from kvforge.coordinator.config import CoordinatorConfig, load_config
from kvforge.fleet.settings import FleetFile
from kvforge.gateway.config import Settings, load_settings
from kvforge.launch.up_file import UpFile
from kvforge.protocol.configuration import _settings, convert
from kvforge.protocol.errors import InvalidConfiguration
from kvforge.protocol.sizes import parse_size
from kvforge.worker.config import WorkerConfig
from kvforge.worker.config import load_config as load_worker


@pytest.mark.parametrize(
    ("text", "field"),
    [
        ("spelling = 1", "spelling"),
        ("[limits]\nsequence_max = 4", "limits.sequence_max"),
        ("[limits]\nsequences_max = 0", "limits.sequences_max"),
        ("[limits]\nsequences_max = 'many'", "limits.sequences_max"),
        ("[cache]\nblock_size = 0", "cache.block_size"),
        ("[cache]\nblock_size = -3", "cache.block_size"),
        ("[cache]\npolicy = 'random'", "cache.policy"),
        ("[limits]\nblocks_per_sequence_max = 1000000000", "limits.blocks_per_sequence_max"),
        ("[limits]\nclients_max = 0", "limits.clients_max"),
        ("[quotas.a]\nfloor = 5\nceiling = 2", "quotas.a"),
        ("[quotas.a]\nroof = 5", "quotas.a.roof"),
        ("log_level = 'loud'", "log_level"),
        ("drain_s = -1", "drain_s"),
    ],
)
def test_a_wrong_setting_of_the_coordinator_is_named(tmp_path: Path, text: str, field: str) -> None:
    path = tmp_path / "c.toml"
    path.write_text(text)
    with pytest.raises(InvalidConfiguration) as caught:
        load_config(path).core_limits()
    assert caught.value.field == field


@pytest.mark.parametrize(
    ("text", "field"),
    [
        ("model = 'm'", "name"),
        ("name = 'w'", "model"),
        ("name = 'two words'\nmodel = 'm'", "name"),
        ("name = 'w'\nmodel = 'm'\nblocks = -1", "blocks"),
        ("name = 'w'\nmodel = 'm'\nblocks = 1\nkv_bytes = 1", "kv_bytes"),
        ("name = 'w'\nmodel = 'm'\nthread = 1", "thread"),
        ("name = 'w'\nmodel = 'm'\nthreads = 1.5", "threads"),
    ],
)
def test_a_wrong_setting_of_a_worker_is_named(tmp_path: Path, text: str, field: str) -> None:
    path = tmp_path / "w.toml"
    path.write_text(text)
    with pytest.raises(InvalidConfiguration) as caught:
        load_worker(path)
    assert caught.value.field == field


def test_a_file_that_is_missing_or_no_toml_is_named(tmp_path: Path) -> None:
    with pytest.raises(InvalidConfiguration, match="cannot be read"):
        load_config(tmp_path / "none.toml")
    (tmp_path / "bad.toml").write_text("= 1")
    with pytest.raises(InvalidConfiguration, match="is not TOML"):
        load_config(tmp_path / "bad.toml")


def test_the_defaults_are_valid_and_ones_are_accepted() -> None:
    """behaviour 1: all-ones is accepted."""
    assert CoordinatorConfig().core_limits().context_tokens_max == 16 * 512
    ones = {"sequences_max": 1, "blocks_max": 1, "blocks_per_sequence_max": 1}
    config = CoordinatorConfig.__struct_fields__
    assert "limits" in config
    limits = load_ones(ones).core_limits()
    assert (limits.bounds.sequences_max, limits.context_tokens_max) == (1, 1)
    assert WorkerConfig(name="w", model="m").blocks == 0


OLD_NAMES = [
    (CoordinatorConfig, "limits", "strangers_max", "pending_handshakes_max", 5),
    (CoordinatorConfig, "limits", "silence_s", "idle_timeout_s", 5.0),
    (FleetFile, "replicas", "silent_s", "unresponsive_timeout_s", 5.0),
]


@pytest.mark.parametrize(("cls", "section", "old", "new", "value"), OLD_NAMES)
def test_a_deprecated_name_is_accepted_with_a_warning_that_names_the_new_one(
    cls: type[msgspec.Struct], section: str, old: str, new: str, value: float, caplog: pytest.LogCaptureFixture
) -> None:
    base: dict[str, object] = {"up": {"model": "m"}} if cls is FleetFile else {}
    warnings: list[str] = []
    for warn in ((), (warnings.append,)):
        assert getattr(getattr(convert({**base, section: {old: value}}, cls, *warn), section), new) == value
    assert (
        warnings
        == caplog.messages
        == [f"{section}.{old} is deprecated and will be removed in the next version: use {section}.{new}"]
    )
    assert getattr(getattr(convert({**base, section: {new: value}}, cls), section), new) == value
    assert len(caplog.messages) == 1, "the new name needs no warning"


@pytest.mark.parametrize(("cls", "section", "old", "new", "value"), OLD_NAMES)
def test_a_setting_with_its_old_and_its_new_name_is_refused(
    cls: type[msgspec.Struct], section: str, old: str, new: str, value: float
) -> None:
    with pytest.raises(InvalidConfiguration) as caught:
        convert({section: {new: value, old: value}}, cls)
    assert caught.value.field == f"{section}.{old}"
    assert str(caught.value) == (
        f"{section}.{old}: is the old name of {section}.{new}, which is given too; keep that one"
    )


@pytest.mark.parametrize(("cls", "section", "old", "new", "value"), OLD_NAMES)
def test_a_wrong_value_of_a_deprecated_name_names_the_new_one(
    cls: type[msgspec.Struct], section: str, old: str, new: str, value: float
) -> None:
    with pytest.raises(InvalidConfiguration) as caught:
        convert({section: {old: "many"}}, cls, lambda _: None)
    assert caught.value.field == f"{section}.{new}"


class Inner(msgspec.Struct, forbid_unknown_fields=True):
    """A table of a file."""

    DEPRECATED: ClassVar = {"old": "new"}

    new: int = 0


class Outer(msgspec.Struct, forbid_unknown_fields=True):
    """A file with tables by name, and one that may be left out."""

    DEPRECATED: ClassVar = {"before": "after"}

    after: int = 0
    tables: dict[str, Inner] = {}
    maybe: Inner | None = None


def test_names_are_deprecated_at_the_top_in_tables_by_name_and_in_those_that_may_be_left_out() -> None:
    warnings: list[str] = []
    values = {"before": 1, "tables": {"a": {"old": 2}, "b": {"new": 3}}, "maybe": {"old": 4}}
    found = convert(values, Outer, warnings.append)
    assert found == Outer(1, {"a": Inner(2), "b": Inner(3)}, Inner(4))
    assert [text.partition(" ")[0] for text in warnings] == ["before", "tables.a.old", "maybe.old"]
    with pytest.raises(InvalidConfiguration, match=r"tables\[\.\.\.\]\.unknown: there is no such setting"):
        convert({"tables": {"a": {"unknown": 1}}}, Outer)


def test_a_coordinator_logs_a_deprecated_name_in_its_log_format(tmp_path: Path) -> None:
    path = tmp_path / "c.toml"
    path.write_text(
        f'log_format = "json"\nruntime_dir = "{tmp_path}/r"\nstate_dir = "{path}"\n[limits]\nsilence_s = 3\n'
    )
    command = [sys.executable, "-m", "kvforge.coordinator", "--config", str(path)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    first = json.loads(done.stderr.splitlines()[0])
    assert (first["level"], first["message"].partition(":")[0]) == (
        "warning",
        "limits.silence_s is deprecated and will be removed in the next version",
    )


def load_ones(limits: dict[str, int]) -> CoordinatorConfig:
    from kvforge.protocol.configuration import convert

    return convert({"limits": limits, "cache": {"block_size": 1}}, CoordinatorConfig)


CLASSES = (CoordinatorConfig, WorkerConfig, Settings, UpFile)
NAMES = [(cls, name) for cls in CLASSES for name in _settings(cls)]


def refusal(cls: type[msgspec.Struct], name: str) -> str:
    """Return the refusal of a file with only this setting."""
    values: object = 1
    for part in reversed(name.split(".")):
        values = {part: values}
    with pytest.raises(InvalidConfiguration) as caught:
        convert(values, cls)
    return caught.value.message


@pytest.mark.parametrize(("cls", "name"), NAMES)
def test_a_misspelt_setting_is_answered_with_the_nearest_one(cls: type[msgspec.Struct], name: str) -> None:
    section, _, own = name.rpartition(".")
    misspelt = own + own[-1]
    message = refusal(cls, f"{section}.{misspelt}".lstrip("."))
    assert message.startswith(f"{section}.{misspelt}".lstrip("."))
    assert message.endswith(f"there is no such setting; did you mean {own}?")
    assert f"did you mean {own}?" in refusal(cls, f"{section}.{own.replace('_', '-')}-".lstrip("."))


@pytest.mark.parametrize(("cls", "name"), [(cls, name) for cls, name in NAMES if "." in name])
def test_a_setting_outside_its_section_is_answered_with_a_section(cls: type[msgspec.Struct], name: str) -> None:
    own = name.rpartition(".")[2]
    if own in cls.__struct_fields__:
        return  # the file also has a top-level setting of that name
    assert refusal(cls, own).rpartition("did you mean ")[2].rstrip("?").endswith(f".{own}")


def test_nothing_is_suggested_where_nothing_is_near(tmp_path: Path) -> None:
    assert refusal(CoordinatorConfig, "zzzzqqqq").endswith("there is no such setting")
    (tmp_path / "g.toml").write_text(f"[keys.ada]\nhash = 'sha256:{64 * '0'}'\ntenat = 'x'")
    problem = r"keys\.ada\.tenat: there is no such setting; did you mean tenant\?"
    with pytest.raises(InvalidConfiguration, match=problem):
        load_settings(tmp_path / "g.toml")


@pytest.mark.parametrize(
    ("text", "count"),
    [
        ("4G", 4 << 30),
        ("4g", 4 << 30),
        ("4GiB", 4 << 30),
        ("4GB", 4 * 10**9),
        ("512MiB", 512 << 20),
        ("512 MiB", 512 << 20),
        ("0.5G", 1 << 29),
        ("64K", 1 << 16),
        ("2T", 2 << 40),
        ("100B", 100),
        ("100", 100),
    ],
)
def test_sizes_have_units(text: str, count: int) -> None:
    assert parse_size(text) == count
    assert convert({"name": "w", "model": "m", "kv_bytes": text}, WorkerConfig).kv_bytes == count


@pytest.mark.parametrize("text", ["", "G", "-4G", "4X", "4 G B", "1e9", "4,5G", "nan"])
def test_what_is_no_size_is_named(text: str) -> None:
    with pytest.raises(InvalidConfiguration, match=r"limits\.finished_bytes_max: .* is not a number of bytes like 4G"):
        convert({"limits": {"finished_bytes_max": text}}, CoordinatorConfig)


BYTES = [(cls, name) for cls, name in NAMES if "bytes" in name and cls is not UpFile]


@pytest.mark.parametrize(("cls", "name"), BYTES)
def test_every_setting_of_bytes_takes_a_size(cls: type[msgspec.Struct], name: str) -> None:
    section, _, own = name.rpartition(".")
    given: dict[str, object] = {"name": "w", "model": "m"} if cls is WorkerConfig else {}
    if name == "disk_bytes":  # blocks go to the disk through the host file
        given |= {"host_bytes": "1G", "disk_dir": "/disk"}
    read = convert({**given, **({section: {own: "32M"}} if section else {own: "32M"})}, cls)
    assert getattr(getattr(read, section) if section else read, own) == 32 << 20
