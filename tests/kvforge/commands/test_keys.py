"""`kvforge keys`: a file readable only by its owner, and lines ready for the configuration."""

from __future__ import annotations

import stat
import tomllib
from pathlib import Path

import pytest

from kvforge.commands import cli, keys
from kvforge.coordinator.core import rights
from kvforge.gateway.access import Access
from kvforge.gateway.config import RIGHTS, Settings, load_settings
from kvforge.protocol.errors import NotAllowed
from kvforge.protocol.exits import USAGE


def test_the_rights_are_those_of_coordinator_and_gateway() -> None:
    assert {"client": (rights.SUBMIT, rights.READ, rights.ADMIN), "api": RIGHTS} == keys.RIGHTS


def test_an_api_key_is_let_in_by_the_lines_that_were_printed(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file, configuration = tmp_path / "ada.key", tmp_path / "gateway.toml"
    assert cli.main(["keys", "api", str(file), "--tenant", "research", "--rights", "generate, see"]) == 0
    told = capsys.readouterr()
    secret = file.read_text().strip()
    assert stat.S_IMODE(file.stat().st_mode) == 0o600
    assert secret not in told.out + told.err
    configuration.write_text(told.out)
    caller = Access(load_settings(configuration)).caller({"authorization": f"Bearer {secret}"}, "see")
    assert (caller.name, caller.tenant) == ("ada", "research")
    with pytest.raises(NotAllowed):
        caller.need("admin")


def test_an_api_key_may_generate_and_no_more_where_nothing_is_said(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.main(["keys", "api", str(tmp_path / "b.key"), "--name", "a b"]) == 0
    (key,) = tomllib.loads(capsys.readouterr().out)["keys"].items()
    assert key[0] == "a b"
    assert (key[1]["tenant"], key[1]["rights"]) == ("a b", ["generate"])
    assert Settings().keys == {}


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["api", "--rights", "submit"], "--rights: holds 'submit'; expected generate, see, admin"),
        (["client", "--rights", "generate"], "--rights: holds 'generate'; expected submit, read, admin"),
        (["client", "--rights", ""], "--rights: holds ''"),
        (["api", "--tenant", "*"], "--tenant: is *"),
        (["worker", "--tenant", "a"], "--tenant: applies to a client or an API key"),
    ],
)
def test_what_nobody_would_take_is_refused_before_there_is_a_file(
    arguments: list[str], words: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    whose, *options = arguments
    file = tmp_path / "x.key"
    assert cli.main(["keys", whose, str(file), *options]) == USAGE
    assert words in capsys.readouterr().err
    assert not file.exists()


def test_a_file_that_is_there_is_left_alone(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "x.key"
    file.write_text("mine")
    assert cli.main(["keys", "api", str(file)]) == USAGE
    assert (file.read_text(), capsys.readouterr().out) == ("mine", "")
