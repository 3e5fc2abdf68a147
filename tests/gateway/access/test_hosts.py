"""The Host header: all forms of this host's names are accepted, a mere common prefix is not."""

from __future__ import annotations

import asyncio

import pytest
from starlette.datastructures import Headers

from kvforge.gateway.access import Access
from kvforge.gateway.access.hosts import host_of
from kvforge.gateway.config import Settings
from kvforge.protocol.errors import NotAllowed
from tests.gateway.scripted import Script, application, client


@pytest.mark.parametrize(
    ("header", "host"),
    [
        ("localhost", "localhost"),
        ("LocalHost:8000", "localhost"),
        ("localhost:", "localhost"),
        ("localhost.:80", "localhost"),
        ("127.0.0.1:65535", "127.0.0.1"),
        ("[::1]", "::1"),
        ("[0:0:0:0:0:0:0:1]:8000", "::1"),
        ("box_1.lan", "box_1.lan"),
    ],
)
def test_a_header_names_one_host(header: str, host: str) -> None:
    assert host_of(header) == host


WRONG = [
    "",
    " ",
    "localhost:80:evil.example",
    "localhost:evil.example",
    "localhost:80@evil.example",
    "evil.example@localhost",
    "localhost@evil.example",
    "user:pass@localhost:80",
    "localhost, evil.example",
    "localhost evil.example",
    " localhost",
    "localhost ",
    "localhost\t",
    "localhost\n",
    "localhost:+80",
    "localhost:-1",
    "localhost:65536",
    "localhost:٨٠",
    "localhost:80/evil.example",
    "localhost/",
    "localhost?",
    "localhost#evil.example",
    "localhost\\evil.example",
    "http://localhost",
    "//localhost",
    "[::1",
    "::1",
    "[::1]evil.example",
    "[::1]:80:80",
    "[::1%25lo]",
    "[localhost]",
    "[127.0.0.1]",
    "[::g]",
    "\uff4cocalhost",
    "localhost%00",
    "localhost;80",
    "*",
]


@pytest.mark.parametrize("header", WRONG)
def test_any_other_form_names_none(header: str) -> None:
    assert host_of(header) == ""
    with pytest.raises(NotAllowed, match="hosts"):
        Access(Settings()).caller({"host": header}, "generate")


@pytest.mark.parametrize("header", ["localhost.evil.example", "127.0.0.1.evil.example", "evil.example:8000", "0x7f.1"])
def test_a_name_that_begins_like_one_of_this_host_is_another(header: str) -> None:
    with pytest.raises(NotAllowed, match="hosts"):
        Access(Settings()).caller({"host": header}, "generate")


def test_two_host_headers_name_none() -> None:
    two = Headers(raw=[(b"host", b"localhost"), (b"host", b"evil.example")])
    for headers in (two, Headers(raw=[])):
        with pytest.raises(NotAllowed, match="hosts"):
            Access(Settings()).caller(headers, "generate")


def test_names_of_the_settings_are_compared_in_the_same_spelling() -> None:
    here = Access(Settings(hosts=("Box.LAN", "[2001:db8::0:1]")))
    for header in ("box.lan:80", "BOX.lan.", "[2001:DB8::1]:8000"):
        assert here.caller({"host": header}, "generate").tenant == "default"


@pytest.mark.parametrize(
    "origin", ["null", "", "http://", "://localhost:8000", "file://localhost:8000", "http://localhost"]
)
def test_an_origin_that_is_not_the_hosts_own_is_another(origin: str) -> None:
    access = Access(Settings())
    with pytest.raises(NotAllowed, match="cors_origins"):
        access.caller({"host": "localhost:8000", "origin": origin}, "generate")
    with pytest.raises(NotAllowed):
        access.caller({"host": "", "origin": origin}, "generate")
    assert access.caller({"host": "LOCALHOST:8000", "origin": "http://localhost:8000"}, "generate")


def test_a_request_with_a_false_host_is_refused() -> None:
    async def status(host: str) -> int:
        async with client(application(Script())) as http:
            return (await http.get("/v1/models", headers={"host": host})).status_code

    assert asyncio.run(status("localhost:80:evil.example")) == 403
    assert asyncio.run(status("localhost:80")) == 200
