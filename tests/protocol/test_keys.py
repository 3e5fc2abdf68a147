"""Keys: only the owner can read a written key, and no other text is accepted as a key."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from kvforge.protocol import keys, network
from kvforge.protocol.errors import InvalidConfiguration


def test_a_file_is_private_and_read_again(tmp_path: Path) -> None:
    path, pair = tmp_path / "a.key", keys.make()
    keys.write(path, pair, "client a")
    assert path.stat().st_mode & 0o777 == 0o600
    assert keys.read(path) == pair
    assert keys.text_of(keys.bytes_of(pair.public, "key")) == pair.public


def test_a_file_is_not_overwritten(tmp_path: Path) -> None:
    path, pair = tmp_path / "a.key", keys.make()
    keys.write(path, pair, "client a")
    with pytest.raises(InvalidConfiguration, match="exists"):
        keys.write(path, keys.make(), "client a")
    assert keys.read(path) == pair


@pytest.mark.parametrize("mode", [0o640, 0o604, 0o660, 0o610])
def test_a_file_that_others_can_read_is_refused_and_its_secret_not_told(tmp_path: Path, mode: int) -> None:
    path, pair = tmp_path / "a.key", keys.make()
    keys.write(path, pair, "client a")
    path.chmod(mode)
    with pytest.raises(InvalidConfiguration, match=rf"^tcp\.key_file: .* has mode {mode:04o}") as raised:
        keys.read(path, "tcp.key_file")
    assert pair.secret not in str(raised.value)


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("", "is not a key file"),
        ("secret = 7", "is not a key file"),
        ("secret = 'short'", "is not a key file"),
        ("secret = '" + '"' * 40 + "'", "is not a key file"),
        ("secret = '" + "#" * 40 + "'", "is not a key file"),
        ("no TOML", "is not a key file"),
    ],
)
def test_what_is_no_key_file_is_named(tmp_path: Path, text: str, words: str) -> None:
    path = tmp_path / "a.key"
    path.write_text(text)
    path.chmod(0o600)
    with pytest.raises(InvalidConfiguration, match=f"a.key {words}"):
        keys.read(path)


def test_a_public_key_of_another_pair_is_noticed(tmp_path: Path) -> None:
    path = tmp_path / "a.key"
    keys.write(path, keys.KeyPair(keys.make().public, keys.make().secret), "nobody")
    with pytest.raises(InvalidConfiguration, match="does not match its secret"):
        keys.read(path)


def test_a_network_asks_for_keys_and_a_socket_of_this_machine_does_not(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in (network.SERVER_KEY, network.KEY_FILE):
        monkeypatch.delenv(name, raising=False)
    path, own, server = tmp_path / "a.key", keys.make(), keys.make()
    keys.write(path, own, "client a")
    assert network.credentials_for("ipc:///run/x", None, None) is None
    with pytest.raises(InvalidConfiguration, match=r"^server_key: .* KVFORGE_SERVER_KEY"):
        network.credentials_for("tcp://host:1", None, path)
    with pytest.raises(InvalidConfiguration, match=r"^key_file: .* KVFORGE_KEY_FILE"):
        network.credentials_for("tcp://host:1", server.public, None)
    with pytest.raises(InvalidConfiguration, match=r"^server_key: invalid key 'x'"):
        network.credentials_for("tcp://host:1", "x", path)
    wanted = network.CurveCredentials(server.public, own)
    assert network.credentials_for("tcp://host:1", server.public, path) == wanted
    monkeypatch.setenv(network.SERVER_KEY, server.public)
    monkeypatch.setenv(network.KEY_FILE, str(path))
    assert network.credentials_for("tcp://host:1", None, None) == wanted


@pytest.mark.parametrize(
    ("endpoint", "found"),
    [
        ("tcp://127.0.0.1:80", ("127.0.0.1", 80)),
        ("tcp://*:5570", ("", 5570)),
        ("tcp://[::1]:5570", ("::1", 5570)),
        ("tcp://a.b:65535", ("a.b", 65535)),
    ],
)
def test_endpoints_of_a_network(endpoint: str, found: tuple[str, int]) -> None:
    assert network.host_and_port(endpoint, "tcp.listen") == found


@pytest.mark.parametrize(
    "endpoint", ["tcp://", "tcp://a", "tcp://:5", "tcp://a:65536", "tcp://::1:5", "udp://a:5", "tcp://a:-1", "ipc:///x"]
)
def test_what_is_no_endpoint_is_named(endpoint: str) -> None:
    with pytest.raises(InvalidConfiguration, match=rf"^tcp\.listen: '{re.escape(endpoint)}' is not tcp://HOST:PORT"):
        network.host_and_port(endpoint, "tcp.listen")
