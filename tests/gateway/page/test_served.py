"""The page of a real gateway process: an open page does not delay its exit."""

from __future__ import annotations

import signal
import subprocess
import sys
from pathlib import Path

import httpx

LIMIT_S = 60.0


def test_a_gateway_that_is_told_to_end_ends_its_pages_streams_first(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "kvforge.gateway", "--runtime-dir", str(tmp_path), "--port", "0"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True) as process:
        try:
            assert process.stdout is not None
            address = process.stdout.readline().split()[-1]
            with httpx.Client(base_url=address, timeout=LIMIT_S, trust_env=False) as http:
                assert "<title>kvforge</title>" in http.get("/").text
                came = b""
                with http.stream("GET", "/page/events") as response:
                    for piece in response.iter_bytes():  # raises if the stream is cut off
                        if not came:
                            process.send_signal(signal.SIGTERM)
                        came += piece
                assert came.startswith(b'event: hello\ndata: {"admin":true}')
            assert process.wait(LIMIT_S) == 0
        finally:
            process.kill()
