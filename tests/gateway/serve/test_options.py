"""The options of `python -m kvforge.gateway`, as `kvforge up` passes them, override its file."""

from __future__ import annotations

import argparse
from pathlib import Path

import pytest

from kvforge.gateway.config import Settings
from kvforge.gateway.serve.main import settings_of
from kvforge.protocol.errors import InvalidConfiguration

HASH = f"sha256:{64 * 'a'}"
OPTIONS = (
    *("runtime_dir", "state_dir", "default_state_dir", "host", "port", "processes", "names", "default_names"),
    *("key_hashes", "drain_max_s"),
)


def settings(tmp_path: Path, text: str, **given: object) -> Settings:
    file = tmp_path / "gateway.toml"
    file.write_text(text)
    return settings_of(argparse.Namespace(**{**dict.fromkeys(OPTIONS), "config": file, **given}))


def test_a_name_that_is_asked_for_goes_before_those_of_the_file_and_a_default_does_not(tmp_path: Path) -> None:
    assert settings(tmp_path, 'names = ["a"]', default_names=["d"]).names == ("a",)
    assert settings(tmp_path, 'names = ["a"]', names=["n"]).names == ("n",)
    assert settings(tmp_path, "", default_names=["d"]).names == ("d",)


def test_keys_come_beside_those_of_the_file_and_open_it_to_others(tmp_path: Path) -> None:
    text = f'host = "192.0.2.1"\n[keys.ada]\nhash = "sha256:{64 * "b"}"\n'
    hashes = tmp_path / "hashes"
    hashes.write_text(f"{HASH}\n{HASH}")
    made = settings(tmp_path, text, key_hashes=hashes)
    assert {*made.keys} == {"ada", "api-key-1", "api-key-2"} and made.keys["api-key-1"].hash == HASH
    assert made.keys["api-key-1"].rights == ("generate", "see")
    assert settings(tmp_path, 'host = "192.0.2.1"', key_hashes=hashes).host == "192.0.2.1"
    with pytest.raises(InvalidConfiguration, match="pass --api-key to `kvforge up`"):
        settings(tmp_path, 'host = "192.0.2.1"')


def test_what_is_stored_is_beside_the_journal_unless_a_place_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    runtime = f'runtime_dir = "{tmp_path}"\n'
    with monkeypatch.context() as unit:
        unit.setenv("STATE_DIRECTORY", "/var/lib/kvforge:/var/lib/more")
        assert settings(tmp_path, runtime).storage_url == "sqlite:/var/lib/kvforge/gateway/stored.sqlite"
        assert settings(tmp_path, 'state_dir = "/b"').storage_url == "sqlite:/b/stored.sqlite"
    monkeypatch.delenv("STATE_DIRECTORY", raising=False)
    assert settings(tmp_path, runtime).storage_url == f"sqlite:{tmp_path}/state/gateway/stored.sqlite"
    assert settings(tmp_path, runtime, default_state_dir="/a").storage_url == "sqlite:/a/stored.sqlite"
    assert settings(tmp_path, 'state_dir = "/b"', default_state_dir="/a").storage_url == "sqlite:/b/stored.sqlite"
    assert settings(tmp_path, 'state_dir = "/b"', state_dir="/c").storage_url == "sqlite:/c/stored.sqlite"
    url = "postgresql://me@db/kv"
    assert settings(tmp_path, f'[storage]\nurl = "{url}"').storage_url == url
    assert settings(tmp_path, '[storage]\nurl = "sqlite:/d/e.sqlite"').storage_url == "sqlite:/d/e.sqlite"
    assert settings(tmp_path, '[storage]\nurl = "none"').storage_url == ""


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ('url = "mysql://x"', r'storage.url: is .mysql.*expected "", "none", sqlite:'),
        ('url = "sqlite:"', "storage.url: names no file"),
        ("retention_s = 0", "storage.retention_s: is 0; it must be 1 to"),
        ("lease_s = 1e9", r"storage.lease_s: is 1e\+09; it must be 0.1 to 3600"),
        ('tenant_bytes_max = "1"', "storage.tenant_bytes_max: is 1; it must be at least 1024"),
        ("tenants = 1", "storage.tenants: there is no such setting"),
    ],
)
def test_a_wrong_setting_of_the_storage_is_named(tmp_path: Path, text: str, problem: str) -> None:
    with pytest.raises(InvalidConfiguration, match=problem):
        settings(tmp_path, f"[storage]\n{text}")
