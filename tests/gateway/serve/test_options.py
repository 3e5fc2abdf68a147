"""The options of `python -m kvforge.gateway`, as `kvforge up` passes them, override its file."""

from __future__ import annotations

import argparse
from pathlib import Path

import pytest

from kvforge.gateway.config import Settings
from kvforge.gateway.serve.main import settings_of
from kvforge.protocol.errors import InvalidConfiguration

HASH = f"sha256:{64 * 'a'}"
OPTIONS = ("runtime_dir", "host", "port", "processes", "names", "default_names", "key_hashes", "drain_max_s")


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
