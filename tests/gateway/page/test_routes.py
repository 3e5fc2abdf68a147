"""The page's paths on a real server, with a real coordinator and a worker without a model."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import httpx
import msgspec

from kvforge import AsyncClient, SamplingParams
from kvforge.gateway.page import files
from kvforge.loadtest.fleet.simulated import SimulatedFleet
from tests.gateway.page.serving import Allowed, everything, keyed, seeing, serving

GREEDY = SamplingParams(temperature=0.0)
ACT = {"x-kvforge-page": "1", "content-type": "application/json"}
EVIL = "<script>alert(1)</script>"
NAMES = {"summary", "now", "about", "pools", "tenants", "workers", "totals", "requests", "latency", "happenings"}
LIMIT_S = 30.0


@asynccontextmanager
async def browsing(
    runtime: Path, allowed: Allowed = everything, timeout_s: float = LIMIT_S
) -> AsyncIterator[httpx.AsyncClient]:
    """Yield a client of the page of the coordinator in a runtime folder."""
    async with serving(runtime, allowed=allowed, timeout_s=timeout_s) as address, client(address) as http:
        yield http


def client(address: str) -> httpx.AsyncClient:
    return httpx.AsyncClient(base_url=address, timeout=LIMIT_S, trust_env=False)


async def events(response: httpx.Response) -> AsyncIterator[tuple[str, Any]]:
    name = ""
    async for line in response.aiter_lines():
        if line.startswith("event: "):
            name = line.removeprefix("event: ")
        elif line.startswith("data: "):
            yield name, msgspec.json.decode(line.removeprefix("data: "))


async def said(http: httpx.AsyncClient, wanted: set[str]) -> dict[str, Any]:
    """Return the stream's events until all wanted ones have arrived."""
    found: dict[str, Any] = {}
    async with asyncio.timeout(LIMIT_S), http.stream("GET", "/page/events") as response:
        assert response.status_code == 200 and response.headers["content-type"].startswith("text/event-stream")
        async for name, document in events(response):
            found[name] = document
            if wanted <= found.keys():
                break
    return found


def error_of(response: httpx.Response) -> dict[str, Any]:
    found: dict[str, Any] = response.json()["error"]
    return found


def test_a_service_at_work_is_seen_explained_and_stopped() -> None:
    async def run() -> None:
        settings = {"quotas": {EVIL: {"ceiling": 60}}}
        async with (
            SimulatedFleet(blocks=128, time_scale=20.0, coordinator_settings=settings) as fleet,
            AsyncClient(fleet.endpoint, timeout_s=LIMIT_S) as kv,
            browsing(fleet.runtime) as http,
        ):
            runs = await kv.submit(list(range(1, 100)), max_tokens=900, sampling=GREEDY)
            holds = await kv.submit(list(range(2, 202)), max_tokens=700, tenant=EVIL, sampling=GREEDY)
            waits = await kv.submit(list(range(3, 803)), max_tokens=50, tenant=EVIL, sampling=GREEDY)
            await anext(aiter(runs))
            await anext(aiter(holds))
            await seen(http, (runs.id, holds.id, waits.id))
            await explained(http, waits.id)
            await refused(http)
            answer = await http.post("/page/cancel", json={"request": waits.id}, headers=acting(http))
            assert (answer.status_code, answer.json()) == (200, {})
            assert (await kv.status(waits.id)).state == "cancelled"
            answer = await http.post("/page/drain", json={"deadline_s": None}, headers=acting(http))
            assert answer.status_code == 200 and (await kv.health()).draining

    asyncio.run(run())


def acting(http: httpx.AsyncClient) -> dict[str, str]:
    return {**ACT, "origin": str(http.base_url).rstrip("/")}


async def seen(http: httpx.AsyncClient, ids: tuple[int, ...]) -> None:
    """Return all documents of one state."""
    found = await said(http, NAMES | {"hello", "blocks", "points"})
    assert found["hello"] == {"admin": True}
    assert found["pools"][0]["base"] == 0 and found["pools"][0]["blocks"] == 128 == found["blocks"]["count"]
    assert found["about"]["model"]["name"] == "h200-8b"
    assert [worker["state"] for worker in found["workers"]["rows"]] == ["ready"]
    rows = {each[0]: each for each in found["requests"]["rows"]}
    assert rows.keys() == set(ids) and found["requests"]["rows"][0][0] == ids[2]
    assert {tenant["tenant"]: tenant["ceiling"] for tenant in found["tenants"]["rows"]}[EVIL] == 60
    waiting = f"2 running, 1 waiting for room below tenant {EVIL}'s ceiling."
    assert found["summary"] == {"level": "notice", "sentence": waiting, "notes": [], "stale": False}


async def explained(http: httpx.AsyncClient, waits: int) -> None:
    why = (await http.get("/page/explain", params={"request": waits})).json()
    assert why["subject"] == f"request {waits}" and why["facts"]["limit"] == "tenant ceiling"
    block = (await http.get("/page/explain?block=0")).json()
    assert block["sentences"][0].startswith("block 0 of worker worker-0 is referenced")
    tenant = (await http.get("/page/explain", params={"tenant": EVIL})).json()
    assert tenant["facts"]["ceiling"] == 60
    for query, status, code in (
        ("", 400, "invalid_request"),
        ("block=1&request=2", 400, "invalid_request"),
        ("block=-1", 400, "invalid_request"),
        ("block=%C2%B2", 400, "invalid_request"),
        ("request=" + "9" * 19, 400, "invalid_request"),
        ("block=100000", 404, "block_not_found"),
        ("request=1", 404, "request_not_found"),
        ("tenant=nobody", 404, "not_found"),
    ):
        wrong = await http.get(f"/page/explain?{query}")
        assert (wrong.status_code, error_of(wrong)["code"]) == (status, code), query


async def refused(http: httpx.AsyncClient) -> None:
    """Return actions that another site could make a browser send, and mismatched bodies."""
    good = acting(http)
    host = good["origin"].removeprefix("http://")
    for headers in (
        {"content-type": "application/json"},
        {**good, "content-type": "text/plain"},
        {**ACT},
        {**good, "origin": "http://evil.example"},
        {**good, "origin": "null"},
        {**good, "origin": f"http://evil.example/{host}"},
        {**good, "origin": f"http://{host}.evil.example"},
    ):
        for path in ("/page/cancel", "/page/drain"):
            answer = await http.post(path, content=b"{}", headers=headers)
            assert (answer.status_code, error_of(answer)["code"]) == (403, "not_allowed"), headers
    for path, body, status in (
        ("/page/cancel", b"{}", 400),
        ("/page/cancel", b'{"request":-1}', 400),
        ("/page/cancel", b'{"request":1,"all":true}', 400),
        ("/page/cancel", b"[" * 900, 400),
        ("/page/cancel", b" " * 2000, 413),
        ("/page/drain", b'{"deadline_s":-1}', 400),
        ("/page/cancel", b'{"request":1}', 404),
    ):
        answer = await http.post(path, content=body, headers=good)
        assert answer.status_code == status, (path, body, answer.text)
    assert (await http.get("/page/cancel")).status_code == 405


def test_rights_decide_who_sees_and_who_acts(tmp_path: Path) -> None:
    async def run() -> None:
        async with browsing(tmp_path, seeing) as http:
            assert (await said(http, {"hello"}))["hello"] == {"admin": False}
            for path in ("/page/cancel", "/page/drain"):
                answer = await http.post(path, json={}, headers=acting(http))
                assert (answer.status_code, error_of(answer)["code"]) == (403, "not_allowed")
        async with browsing(tmp_path, keyed) as http:
            for path in ("/page/events", "/page/explain?block=1"):
                answer = await http.get(path)
                assert answer.status_code == 401 and "key" in error_of(answer)["message"]
            assert (await http.get("/")).status_code == 200
            http.headers["authorization"] = "Bearer sesame"
            assert (await said(http, {"hello"}))["hello"] == {"admin": True}

    asyncio.run(run())


def test_without_a_coordinator_the_page_says_so(tmp_path: Path) -> None:
    async def run() -> None:
        async with browsing(tmp_path, timeout_s=0.2) as http, http.stream("GET", "/page/events") as response:
            async with asyncio.timeout(LIMIT_S):
                async for name, document in events(response):
                    if name == "summary" and document["level"] == "bad":
                        break
            assert document["sentence"] == "No coordinator answers." and "kvforge up" in document["notes"][0]

    asyncio.run(run())


def test_files_are_those_of_a_table_with_tags_and_a_strict_policy(tmp_path: Path) -> None:
    async def run() -> None:
        async with browsing(tmp_path) as http:
            for name in files.NAMES:
                path = "/" if name == files.INDEX else f"/page/{name}"
                answer = await http.get(path)
                assert answer.status_code == 200 and answer.headers["content-security-policy"] == files.POLICY
                assert answer.headers["content-type"].startswith(files.TYPES[name.rpartition(".")[2]])
                tag = answer.headers["etag"]
                for known in (tag, f'"other", W/{tag}', "*"):
                    again = await http.get(path, headers={"if-none-match": known})
                    assert (again.status_code, again.content, again.headers["etag"]) == (304, b"", tag)
                assert (await http.get(path, headers={"if-none-match": '"other"'})).status_code == 200
            for path in (
                "/page/",
                "/page/index.html",
                "/page/__init__.py",
                "/page/..%2fsampler.py",
                "/page//etc/passwd",
            ):
                assert (await http.get(path)).status_code == 404, path

    asyncio.run(run())


def test_the_policy_lets_nothing_in_and_the_page_asks_for_nothing_else() -> None:
    held = files.load()
    assert set(held) == set(files.NAMES)
    whole = b"".join(file.content for file in held.values())
    assert "unsafe" not in files.POLICY and files.POLICY.startswith("default-src 'none'")
    for word in (b"innerHTML", b"outerHTML", b"insertAdjacent", b"document.write", b"eval(", b"https://", b' style="'):
        assert word not in whole, word
    html = held[files.INDEX].content
    assert html.count(b"<script") == 1 and b'<script type="module" src="/page/main.js"></script>' in html
    for name in files.NAMES:
        assert name == files.INDEX or f"{name}".encode() in whole, name
