"""Access of callers: keys, their rights and rates, and pages of other origins."""

from __future__ import annotations

import asyncio
import hashlib
import multiprocessing
import time
from datetime import UTC, datetime, timedelta
from pathlib import Path

import httpx
import pytest
from starlette.applications import Starlette

from kvforge.gateway.access import Access
from kvforge.gateway.access.errors import Unauthenticated
from kvforge.gateway.access.rates import SharedRates
from kvforge.gateway.app import make_app
from kvforge.gateway.config import Key, Settings, load_settings
from kvforge.protocol.errors import InvalidConfiguration, InvalidRequest, NotAllowed, RateExceeded
from tests.gateway.scripted import Script, application, ask, client

SECRET = "kvf-secret"
HERE = {"host": "localhost:8000"}


def key(**fields: object) -> Key:
    return Key(hash="sha256:" + hashlib.sha256(SECRET.encode()).hexdigest(), **fields)  # type: ignore[arg-type]


def access(rates: SharedRates | None = None, **fields: object) -> Access:
    settings = Settings(keys={"ada": key(**fields)}, host="192.0.2.1")
    return Access(settings, rates) if rates is not None else Access(settings)


@pytest.mark.parametrize("header", [{"authorization": f"Bearer {SECRET}"}, {"x-api-key": SECRET}])
def test_a_key_is_a_tenant_with_rights(header: dict[str, str]) -> None:
    caller = access(tenant="t", rights=("generate", "see"), priority_max=2).caller(header, "see")
    assert (caller.name, caller.tenant) == ("ada", "t")
    with pytest.raises(NotAllowed, match="admin"):
        caller.need("admin")
    assert caller.check_priority(2) == 2
    with pytest.raises(InvalidRequest, match="priority"):
        caller.check_priority(3)


@pytest.mark.parametrize("header", [{}, {"authorization": "Bearer x"}, {"authorization": f"Basic {SECRET}"}])
def test_without_a_known_key_nobody_is_let_in(header: dict[str, str]) -> None:
    with pytest.raises(Unauthenticated):
        access().caller(header, "generate")


def test_a_key_expires() -> None:
    soon = datetime.now(UTC) + timedelta(hours=1)
    assert access(expires=soon).caller({"x-api-key": SECRET}, "generate")
    with pytest.raises(Unauthenticated, match="expired"):
        access(expires=soon - timedelta(hours=2)).caller({"x-api-key": SECRET}, "generate")


def test_a_key_lacks_a_right() -> None:
    with pytest.raises(NotAllowed, match="generate"):
        access(rights=("see",)).caller({"x-api-key": SECRET}, "generate")


def test_requests_a_minute_are_those_of_all_processes(tmp_path: Path) -> None:
    """Each process of a port maps the same file."""
    first, second = SharedRates(tmp_path / "r"), SharedRates(tmp_path / "r")
    one, other = access(first, requests_per_minute=4), access(second, requests_per_minute=4)
    for here in (one, other, one, other):
        here.caller({"x-api-key": SECRET}, "generate")
    for here in (one, other):
        with pytest.raises(RateExceeded) as refused:
            here.caller({"x-api-key": SECRET}, "generate")
        assert 0 < refused.value.retry_after_ms <= 15_000
        assert "4 requests per minute" in refused.value.message
    first.close()
    second.close()


def take_many(path: str, taken: multiprocessing.SimpleQueue[int]) -> None:
    rates = SharedRates(Path(path))
    taken.put(sum(rates.consume("k", 1, 1000) == 0 for _ in range(800)))
    rates.close()


def test_processes_that_count_at_once_count_each_other(tmp_path: Path) -> None:
    context = multiprocessing.get_context("spawn")
    taken: multiprocessing.SimpleQueue[int] = context.SimpleQueue()
    began = time.monotonic()
    processes = [context.Process(target=take_many, args=(str(tmp_path / "r"), taken)) for _ in range(2)]
    for process in processes:
        process.start()
    total = sum(taken.get() for _ in processes)
    for process in processes:
        process.join()
    refilled = (time.monotonic() - began) * 1000 / 60
    assert 1000 <= total <= 1000 + refilled + 1


def test_tokens_are_paid_for_when_they_are_known(tmp_path: Path) -> None:
    rates = SharedRates(tmp_path / "r")
    here = access(rates, tokens_per_minute=100)
    here.caller({"x-api-key": SECRET}, "generate").used(250)
    with pytest.raises(RateExceeded, match="100 tokens per minute"):
        here.caller({"x-api-key": SECRET}, "generate")
    rates.close()


def test_without_keys_only_pages_and_names_of_this_host_are_served() -> None:
    here = Access(Settings(hosts=("box.lan",), cors_origins=("https://app.example",)))
    for host in ("localhost:8000", "127.0.0.1:8000", "[::1]:8000", "box.lan"):
        assert here.caller({"host": host}, "admin").tenant == "default"
    with pytest.raises(NotAllowed, match="hosts"):
        here.caller({"host": "evil.example"}, "generate")
    assert here.caller({**HERE, "origin": "http://localhost:8000"}, "generate")
    assert here.caller({**HERE, "origin": "https://app.example"}, "generate")
    with pytest.raises(NotAllowed, match="cors_origins"):
        here.caller({**HERE, "origin": "https://evil.example"}, "generate")


def preflight(app: Starlette, origin: str) -> httpx.Response:
    """Send the preflight request of a browser for a page of that origin."""

    async def options() -> httpx.Response:
        asked = {
            "origin": origin,
            "access-control-request-method": "POST",
            "access-control-request-headers": "x-api-key",
        }
        async with client(app) as http:
            return await http.options("/v1/chat/completions", headers=asked)

    return asyncio.run(options())


def test_browsers_are_told_of_the_origins_that_may_call_and_of_no_other(tmp_path: Path) -> None:
    def app(*origins: str) -> Starlette:
        settings = Settings(runtime_dir=str(tmp_path), cors_origins=origins)
        return make_app(settings, Access(settings))

    ours, other, allow = "https://app.example", "https://evil.example", "access-control-allow-origin"
    body = {"messages": [{"role": "user", "content": "a"}]}
    before = preflight(app(ours), ours)
    assert (before.status_code, before.headers[allow]) == (200, ours)
    assert "x-api-key" in before.headers["access-control-allow-headers"]
    # Errors too: there is no coordinator here.
    answered = ask(app(ours), "/v1/chat/completions", body, {"origin": ours})
    assert (answered.status_code, answered.headers[allow]) == (503, ours)
    assert "retry-after" in answered.headers["access-control-expose-headers"]
    assert allow not in preflight(app(ours), other).headers
    refused = ask(app(ours), "/v1/chat/completions", body, {"origin": other})
    assert (refused.status_code, allow in refused.headers) == (403, False)
    assert preflight(app(), ours).status_code == 405
    assert allow not in ask(app(), "/v1/chat/completions", body).headers


def test_errors_have_each_apis_shape() -> None:
    app = application(Script(), Settings(keys={"ada": key()}, host="192.0.2.1"))
    body = {"messages": [{"role": "user", "content": "a"}], "model": "scripted", "max_tokens": 5}
    refused = ask(app, "/v1/chat/completions", body)
    assert (refused.status_code, refused.json()["error"]["type"]) == (401, "authentication_error")
    assert refused.headers["www-authenticate"] == "Bearer"
    assert ask(app, "/v1/messages", body).json()["error"]["type"] == "authentication_error"
    assert ask(app, "/v1/messages", body, {"x-api-key": SECRET}).status_code == 200


def test_what_is_larger_than_is_taken_is_refused_before_it_is_held() -> None:
    app = application(Script(), Settings(body_bytes_max=2000))
    body = {"messages": [{"role": "user", "content": "a" * 3000}]}
    refused = ask(app, "/v1/chat/completions", body)
    assert (refused.status_code, refused.json()["error"]["param"]) == (413, "body")


@pytest.mark.parametrize(
    ("text", "field"),
    [
        ("prot = 1", "prot"),
        ('port = "x"', "port"),
        ("port = 70000", "port"),
        ("processes = 0", "processes"),
        ('host = "0.0.0.0"', "host"),
        ("head_s = 0", "head_s"),
        ('strip = ["("]', "strip[0]"),
        ('[keys.a]\nhash = "secret"', "keys.a.hash"),
        ("[keys.a]", "keys.a.hash"),
        (f'[keys.a]\nhash = "sha256:{"0" * 64}"\nrights = ["root"]', "keys.a.rights"),
        (f'[keys.a]\nhash = "sha256:{"0" * 64}"\nexpires = 2030-01-01T00:00:00', "keys.a.expires"),
    ],
)
def test_a_setting_that_is_wrong_is_named(tmp_path: Path, text: str, field: str) -> None:
    file = tmp_path / "gateway.toml"
    file.write_text(text)
    with pytest.raises(InvalidConfiguration) as wrong:
        load_settings(file)
    assert wrong.value.field == field
