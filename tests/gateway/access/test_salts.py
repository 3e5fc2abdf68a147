"""`cache_salt` over HTTP: salts are separate by tenant, so that no cache hit reveals another tenant's texts."""

from __future__ import annotations

import hashlib
from typing import Any

import pytest

from kvforge.coordinator.core.commands.validate import tenant_salt
from kvforge.gateway.config import Key, Settings, load_settings
from kvforge.protocol.errors import InvalidConfiguration
from tests.gateway.scripted import NAME, Script, application, ask

BODIES: list[tuple[str, dict[str, Any]]] = [
    ("/v1/completions", {"prompt": "a"}),
    ("/v1/chat/completions", {"messages": [{"role": "user", "content": "a"}]}),
    ("/v1/responses", {"input": "a"}),
    ("/v1/messages", {"model": NAME, "max_tokens": 9, "messages": [{"role": "user", "content": "a"}]}),
]


def key(secret: str, tenant: str) -> Key:
    return Key(hash=f"sha256:{hashlib.sha256(secret.encode()).hexdigest()}", tenant=tenant)


KEYED = Settings(keys={"ada": key("1", "a"), "bob": key("2", "b"), "eve": key("3", "a")})


def salt_of(settings: Settings, path: str, body: dict[str, Any], secret: str) -> str:
    """Return the submitted salt."""
    script = Script()
    answer = ask(application(script, settings), path, body, {"x-api-key": secret})
    assert answer.status_code == 200, answer.text
    return str(script.asked[0][2].cache_salt)


@pytest.mark.parametrize(("path", "body"), BODIES)
def test_a_salt_is_the_tenants_own(path: str, body: dict[str, Any]) -> None:
    salted = {**body, "cache_salt": "acme"}
    ada, bob, eve = (salt_of(KEYED, path, salted, secret) for secret in "123")
    assert ada == eve != bob
    # A ZeroMQ client with a key of the same tenant shares the prefixes.
    assert ada == tenant_salt("a", "acme")
    assert salt_of(KEYED, path, body, "1") == "" and salt_of(KEYED, path, {**body, "cache_salt": ""}, "1") == ""


@pytest.mark.parametrize(("path", "body"), BODIES)
@pytest.mark.parametrize("settings", [KEYED, Settings()])
def test_no_salt_can_be_another_tenants(path: str, body: dict[str, Any], settings: Settings) -> None:
    script = Script()
    forged = ask(
        application(script, settings), path, {**body, "cache_salt": tenant_salt("b", "acme")}, {"x-api-key": "1"}
    )
    assert forged.status_code == 400 and forged.json()["error"]["message"].startswith("cache_salt: ")
    assert not script.asked


def test_no_name_of_a_tenant_can_hold_the_mark_of_its_end(tmp_path: Any) -> None:
    file = tmp_path / "gateway.toml"
    file.write_text(f'[keys.a]\nhash = "sha256:{"0" * 64}"\ntenant = "a\\nb"\n')
    with pytest.raises(InvalidConfiguration, match=r"keys\.a\.tenant"):
        load_settings(file)
