"""/metrics in the gateway: for callers with the right to see, and counting every request."""

from __future__ import annotations

import hashlib
from pathlib import Path

from prometheus_client.parser import text_string_to_metric_families
from starlette.testclient import TestClient

from kvforge.gateway.access import Access
from kvforge.gateway.app import make_app
from kvforge.gateway.config import Key, Settings
from kvforge.protocol.tables import TablesWriter


def gateway(folder: Path, **keys: tuple[str, ...]) -> TestClient:
    """Return a gateway that is not entered, so that it does not connect."""
    hashed = {
        name: Key(hash=f"sha256:{hashlib.sha256(name.encode()).hexdigest()}", rights=r) for name, r in keys.items()
    }
    settings = Settings(runtime_dir=str(folder), keys=hashed)
    return TestClient(make_app(settings, Access(settings)), base_url="http://localhost")


def test_whoever_has_the_right_to_see_sees_tenants(tables: TablesWriter) -> None:
    client = gateway(tables.path.parent, seeing=("see",), asking=("generate",))
    assert client.get("/metrics").status_code == 401
    assert client.get("/metrics", headers={"authorization": "Bearer asking"}).status_code == 403
    seen = client.get("/metrics", headers={"authorization": "Bearer seeing"})
    assert seen.status_code == 200
    assert 'kvforge_requests_running{tenant="a"}' in seen.text


def test_on_localhost_without_keys_everybody_sees(tables: TablesWriter) -> None:
    assert 'tenant="a"' in gateway(tables.path.parent).get("/metrics").text


def test_every_request_is_counted_where_it_belongs(tables: TablesWriter) -> None:
    client = gateway(tables.path.parent)
    client.get("/version")
    client.get("/version")
    client.get("/nothing/of/that/name")
    client.post("/v1/chat/completions", content=b"{")
    families = {f.name: f for f in text_string_to_metric_families(client.get("/metrics").text)}
    counted = {(s.labels["path"], s.labels["status"]): s.value for s in families["kvforge_http_requests"].samples}
    assert counted == {("/version", "200"): 2, ("other", "404"): 1, ("/v1/chat/completions", "400"): 1}
    (open_now,) = families["kvforge_http_requests_open"].samples
    assert open_now.value == 1, "the scrape itself"
