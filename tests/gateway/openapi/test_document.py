"""`/openapi.json` describes the application: its paths, and the fields that each path reads."""

from __future__ import annotations

import re
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import jsonschema
import msgspec
import pytest
from starlette.routing import Route
from starlette.testclient import TestClient

from kvforge.gateway.access import Access
from kvforge.gateway.app import make_app
from kvforge.gateway.config import Settings
from kvforge.gateway.http.fields import Reader
from kvforge.gateway.openapi.document import document
from kvforge.gateway.openapi.operations import OPERATIONS

DOCUMENT = document()


@pytest.fixture
def client(tmp_path: Path) -> TestClient:
    """Return a client of the whole application, not entered, so that it needs no coordinator."""
    settings = Settings(runtime_dir=str(tmp_path))
    return TestClient(make_app(settings, Access(settings)), base_url="http://localhost")


def resolved(schema: dict[str, Any]) -> dict[str, Any]:
    name = schema["$ref"].removeprefix("#/components/schemas/")
    found: dict[str, Any] = DOCUMENT["components"]["schemas"][name]
    return found


def test_it_has_every_route_of_the_application_and_no_other(client: TestClient) -> None:
    routes = [route for route in client.app.routes if isinstance(route, Route)]  # type: ignore[attr-defined]
    served = {
        (method.lower(), route.path.replace(":path}", "}"))
        for route in routes
        if route.include_in_schema
        for method in (route.methods or ()) - {"HEAD"}
    }
    assert {(method, path) for path, methods in DOCUMENT["paths"].items() for method in methods} == served
    hidden = {route.path for route in routes if not route.include_in_schema}
    assert {path for path in hidden if not path.startswith("/page/")} == {"/", "/docs", "/openapi.json"}


@pytest.mark.parametrize("operation", [one for one in OPERATIONS if one.body is not None], ids=lambda one: one.path)
def test_it_has_every_field_that_a_path_reads_or_knows(operation: Any) -> None:
    described = DOCUMENT["paths"][operation.path][operation.method]
    schema = resolved(described["requestBody"]["content"]["application/json"]["schema"])
    body = operation.body
    fields = body.names if isinstance(body, Reader) else set(body.__struct_fields__)
    assert set(schema["properties"]) == fields
    kind = body.kind if isinstance(body, Reader) else body
    required = {one.encode_name for one in msgspec.structs.fields(kind) if one.required}
    assert set(schema.get("required", ())) == required


def test_every_reference_leads_somewhere_and_every_schema_is_one() -> None:
    text = msgspec.json.encode(DOCUMENT).decode()
    schemas = DOCUMENT["components"]["schemas"]
    assert set(re.findall(r'"#/components/schemas/([^"]*)"', text)) == set(schemas)
    for schema in schemas.values():
        jsonschema.Draft202012Validator.check_schema(schema)
    names = [one["operationId"] for methods in DOCUMENT["paths"].values() for one in methods.values()]
    assert len(set(names)) == len(names)


def test_it_is_served_without_a_key_and_without_a_coordinator(client: TestClient) -> None:
    answer = client.get("/openapi.json")
    assert (answer.status_code, answer.headers["content-type"]) == (200, "application/json")
    assert answer.json() == msgspec.json.decode(msgspec.json.encode(DOCUMENT))


class Links(HTMLParser):
    """Collects every link in a page, and every anchor."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.addresses: set[str] = set()
        self.names: set[str] = set()
        self.tags: set[str] = set()
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.add(tag)
        for name, value in attrs:
            if name in ("href", "src", "action", "data"):
                self.addresses.add(value or "")
            elif name == "id":
                self.names.add(value or "")


def test_the_page_of_it_needs_nothing_else(client: TestClient) -> None:
    answer = client.get("/docs")
    assert answer.status_code == 200 and answer.headers["content-type"].startswith("text/html")
    assert "default-src 'none'" in answer.headers["content-security-policy"]
    links = Links(answer.text)
    assert {address for address in links.addresses if not address.startswith("#")} == {"openapi.json"}
    assert {address[1:] for address in links.addresses if address.startswith("#")} <= links.names
    assert not links.tags & {"script", "img", "link", "iframe"} and "@import" not in answer.text
    for path in DOCUMENT["paths"]:
        assert f"<code>{path}</code>" in answer.text
