"""[tcp] and [access]: errors name the setting, before any socket listens."""

from __future__ import annotations

import builtins
import os
import re
from pathlib import Path
from typing import Any

import pytest

from kvforge.coordinator import access
from kvforge.coordinator.config import CoordinatorConfig
from kvforge.coordinator.core.rights import Access
from kvforge.coordinator.transport.outbox import PeerIdentity
from kvforge.process.installation import install_command
from kvforge.protocol import keys
from kvforge.protocol.configuration import convert
from kvforge.protocol.errors import InvalidConfiguration, NotAllowed

A, B = keys.make().public, keys.make().public
LISTEN = {"listen": "tcp://127.0.0.1:0", "key_file": "/k"}
MAY = {"tenant": "a", "rights": ["read"]}
ALICE = {"alice": {"key": A, **MAY}}


@pytest.mark.parametrize(
    ("values", "field", "words"),
    [
        ({"tcp": LISTEN}, "access.clients", "names no key"),
        (
            {"tcp": {"listen_workers": "tcp://h:1", "key_file": "/k"}, "access": {"clients": ALICE}},
            "access.workers",
            "names no key",
        ),
        ({"tcp": {"listen": "tcp://h:1"}, "access": {"clients": ALICE}}, "tcp.key_file", "required by tcp.listen"),
        ({"tcp": {**LISTEN, "listen": "h:1"}, "access": {"clients": ALICE}}, "tcp.listen", "not tcp://HOST:PORT"),
        ({"tcp": {"listen_clients": ""}}, "tcp.listen_clients", "no such setting"),
        ({"access": {"clients": {"alice": {"key": "x", **MAY}}}}, "access.clients.alice.key", "invalid key"),
        (
            {"access": {"clients": {"a": {"key": A, **MAY}, "b": {"key": A, **MAY}}}},
            "access.clients.b.key",
            "access.clients.a.key",
        ),
        ({"access": {"clients": ALICE, "workers": {"w": {"key": A}}}}, "access.workers.w.key", "must be unique"),
        ({"access": {"clients": {"a": {"key": A}}}}, "access.clients.a.tenant", "is required"),
        ({"access": {"clients": {"a": {"key": A, "tenant": "t"}}}}, "access.clients.a.rights", "is required"),
        ({"access": {"clients": {"a": MAY}}}, "access.clients.a", "neither a key nor a user"),
        ({"access": {"clients": {"a": {**MAY, "user": "no-such-user"}}}}, "access.clients.a.user", "no user"),
        (
            {"access": {"local": {"rights": ["root"]}}},
            "access.local.rights",
            "must be one of submit, read, admin, not 'root'",
        ),
        ({"access": {"local": {"tenant": "a\n"}}}, "access.local.tenant", "printable"),
        ({"access": {"local": {"requests_max": -1}}}, "access.local.requests_max", ">= 0"),
        (
            {"access": {"clients": {"a": {**MAY, "user": "7"}, "b": {**MAY, "user": "07"}}}},
            "access.clients.b.user",
            "access.clients.a.user",
        ),
    ],
)
def test_what_is_wrong_is_named(values: dict[str, Any], field: str, words: str) -> None:
    with pytest.raises(InvalidConfiguration, match=words) as raised:
        convert(values, CoordinatorConfig)
    assert raised.value.field == field


def test_without_pynacl_only_this_machines_sockets_are_served(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    real = builtins.__import__

    def without(name: str, *rest: Any, **more: Any) -> Any:
        if name.partition(".")[0] == "nacl" or name.rpartition(".")[2] == "curve":
            raise ImportError("No module named 'nacl'")
        return real(name, *rest, **more)

    monkeypatch.setattr(builtins, "__import__", without)
    values = {"tcp": LISTEN, "access": {"clients": ALICE}}
    config = convert(values, CoordinatorConfig)
    with pytest.raises(
        InvalidConfiguration, match=rf"^tcp\.listen: needs PyNaCl .*{re.escape(install_command('tcp'))}"
    ):
        access.client_endpoints(tmp_path, config.tcp, access.Gate("", config.access))
    assert len(access.client_endpoints(tmp_path, access.TcpSection(), access.Gate())) == 1


def test_who_may_do_what() -> None:
    clients = {
        "alice": {"key": A, "tenant": "a", "rights": ["submit", "read"], "requests_max": 9},
        "bob": {"user": "77", "tenant": "*", "rights": ["admin"]},
    }
    config = convert({"access": {"clients": clients, "local": {"tenant": "l"}}}, CoordinatorConfig)
    gate = access.Gate("", config.access)
    assert gate.client(PeerIdentity(key=keys.bytes_of(A, "key"))) == Access("alice", "a", ("submit", "read"), 9)
    assert gate.client(PeerIdentity(user=77)) == Access("bob", "*", ("admin",))
    assert gate.client(PeerIdentity(user=78)) == Access("", "l", ("submit", "read", "admin"))
    assert access.Gate().client(PeerIdentity(user=0)).unlimited, "without a configuration, local users have every right"


def test_a_worker_brings_the_token_or_has_a_key() -> None:
    section = convert({"workers": {"w0": {"key": A}}}, access.AccessSection)
    gate = access.Gate("secret", section, own_user=1000)
    gate.check_worker(PeerIdentity(user=0), "secret")
    gate.check_worker(PeerIdentity(user=1000), "secret")
    gate.check_worker(PeerIdentity(key=keys.bytes_of(A, "key")), "")
    with pytest.raises(NotAllowed, match="not in \\[access\\] any more"):
        gate.check_worker(PeerIdentity(key=keys.bytes_of(B, "key")), "")
    for user in (0, 1000):
        for token in ("secre", "secret ", "\u00e9"):
            with pytest.raises(NotAllowed, match="another token"):
                gate.check_worker(PeerIdentity(user=user), token)


def test_a_worker_that_knows_no_token_has_to_be_of_the_coordinators_own_user() -> None:
    gate = access.Gate("secret", own_user=1000)
    gate.check_worker(PeerIdentity(user=1000), "")
    for user in (0, 1001, -1):
        with pytest.raises(NotAllowed, match="no token"):
            gate.check_worker(PeerIdentity(user=user), "")
    assert access.Gate("secret")._own_user == os.geteuid()
