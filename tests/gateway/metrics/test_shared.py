"""The gateway's own counters: exact, summed over all processes, and never decreasing."""

from __future__ import annotations

import subprocess
import sys
import textwrap
from pathlib import Path

import anyio
import pytest
from starlette.applications import Starlette
from starlette.middleware import Middleware
from starlette.requests import Request
from starlette.responses import Response, StreamingResponse
from starlette.routing import Route
from starlette.testclient import TestClient

from kvforge.gateway.metrics.counting import Counting
from kvforge.gateway.metrics.shared import OPEN, RECEIVED, ROWS, SECONDS, SENT, Counts
from kvforge.protocol.errors import CapacityExceeded

PATHS = ["/a", "/b"]


def test_each_request_is_counted_in_its_place() -> None:
    counts = Counts(PATHS)
    for path, status, seconds in (("/a", 200, 0.001), ("/a", 200, 0.3), ("/b", 503, 9999.0), ("/x", 299, 0.0)):
        counts.began()
        counts.ended(path, status, seconds, 10, 100)
    counts.began()
    total = counts.total()
    assert (total[OPEN], total[RECEIVED], total[SENT]) == (1, 40, 400)
    assert [counts.by_status(total, path) for path in counts.paths] == [{200: 2}, {503: 1}, {0: 1}]
    buckets, seconds = counts.seconds(total, "/a")
    assert buckets == [1] * SECONDS.index(0.5) + [2] * (len(SECONDS) + 1 - SECONDS.index(0.5))
    assert seconds == pytest.approx(0.301)
    assert counts.seconds(total, "/b")[0] == [0] * len(SECONDS) + [1]


CHILD = """
import sys
from pathlib import Path
from kvforge.gateway.metrics.shared import Counts
counts = Counts(["/a", "/b"], Path(sys.argv[1]))
for _ in range(3):
    counts.began()
    counts.ended("/a", 200, 0.5, 1, 2)
counts.began()
counts.lines_running(2)
print("counted", flush=True)
sys.stdin.read()
"""


def test_processes_count_together_and_one_that_takes_anothers_place_goes_on_with_its_row(tmp_path: Path) -> None:
    path, counts = tmp_path / "requests", Counts(PATHS, tmp_path / "requests")
    for lives in (1, 2):
        with subprocess.Popen(
            [sys.executable, "-c", textwrap.dedent(CHILD), str(path)],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
        ) as child:  # fmt: skip
            assert child.stdout is not None and child.stdout.readline() == "counted\n"
            total = counts.total()
            assert (total[OPEN], total[SENT], counts.by_status(total, "/a")) == (1, 6 * lives, {200: 3 * lives})
            assert counts.lines_running(3) == 5
            child.kill()  # with an open request
    assert counts.by_status(counts.total(), "/a") == {200: 6}
    counts.close()


def test_a_file_of_other_paths_is_another_file(tmp_path: Path) -> None:
    one, other = Counts(PATHS, tmp_path / "requests"), Counts(["/c"], tmp_path / "requests")
    one.began()
    assert other.total()[OPEN] == 0
    one.close()
    other.close()


def test_there_are_so_many_rows_and_no_more(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def taken(*_arguments: object) -> None:
        raise BlockingIOError

    monkeypatch.setattr("fcntl.lockf", taken)
    with pytest.raises(CapacityExceeded, match=f"at most {ROWS}"):
        Counts(PATHS, tmp_path / "requests")


def test_what_an_application_answers_is_counted() -> None:
    async def echo(request: Request) -> Response:
        return Response(await request.body(), status_code=201)

    async def stream(_request: Request) -> Response:
        async def pieces():  # type: ignore[no-untyped-def]
            for _ in range(3):
                yield b"12345"
                await anyio.lowlevel.checkpoint()

        return StreamingResponse(pieces())

    async def fails(_request: Request) -> Response:
        raise RuntimeError("a fault")

    counts = Counts(["/echo", "/stream", "/fails"])
    routes = [Route("/echo", echo, methods=["POST"]), Route("/stream", stream), Route("/fails", fails)]
    app = Starlette(routes=routes, middleware=[Middleware(Counting, counts=counts)])
    with TestClient(app, raise_server_exceptions=False) as client:
        client.post("/echo", content=b"x" * 1000)
        client.get("/stream")
        client.get("/fails")
        client.get("/nowhere")
    total = counts.total()
    told = {path: counts.by_status(total, path) for path in counts.paths}
    assert told == {"/echo": {201: 1}, "/stream": {200: 1}, "/fails": {500: 1}, "other": {404: 1}}
    assert (total[OPEN], total[RECEIVED]) == (0, 1000)
    assert total[SENT] == 1000 + 15 + len("Not Found")
