"""A local hub for huggingface_hub: repositories of files, revisions, tokens. No network."""

from __future__ import annotations

import contextlib
import hashlib
import json
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

COMMIT, OLD = "a" * 40, "b" * 40


class FakeHub:
    """files: by repository and commit. private: repositories that require this token. asked: every path, in order."""

    def __init__(self, url: str) -> None:
        self.url = url
        self.files: dict[tuple[str, str], dict[str, bytes]] = {}
        self.revisions = {"main": COMMIT, "v1": OLD, COMMIT: COMMIT, OLD: OLD}
        self.private: dict[str, str] = {}
        self.gated: set[str] = set()
        self.asked: list[str] = []

    def put(self, repo: str, files: dict[str, bytes], commit: str = COMMIT) -> None:
        """Add a repository, or a commit."""
        self.files[repo, commit] = files

    def fetched(self) -> set[str]:
        """Return the names of the downloaded files."""
        return {path.rpartition("/")[2] for path in self.asked if path.startswith("GET ") and "/resolve/" in path}


@contextlib.contextmanager
def fake_hub() -> Iterator[FakeHub]:
    """Serve one while entered."""

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def do_GET(self) -> None:
            self._answer(with_body=True)

        def do_HEAD(self) -> None:
            self._answer(with_body=False)

        def log_message(self, *_: Any) -> None:
            pass

        def _answer(self, with_body: bool) -> None:
            path = self.path.partition("?")[0]
            hub.asked.append(f"{self.command} {path}")
            status, headers, body = self._found(path)
            self.send_response(status)
            for name, value in {"Content-Length": str(len(body)), **headers}.items():
                self.send_header(name, value)
            self.end_headers()
            if with_body:
                self.wfile.write(body)

        def _found(self, path: str) -> tuple[int, dict[str, str], bytes]:
            parts = path.strip("/").split("/")
            api = parts[:2] == ["api", "models"]
            repo = "/".join(parts[2:4] if api else parts[:2])
            if repo in hub.private and self.headers.get("Authorization") != f"Bearer {hub.private[repo]}":
                return 401, {"X-Error-Code": "RepoNotFound"}, b"{}"
            if repo in hub.gated:
                return 403, {"X-Error-Code": "GatedRepo", "X-Error-Message": "accept the terms"}, b"{}"
            if repo not in {name for name, _ in hub.files}:
                return 404, {"X-Error-Code": "RepoNotFound"}, b"{}"
            named = parts[5] if api and len(parts) > 5 else parts[3] if not api and len(parts) > 3 else "main"
            commit = hub.revisions.get(named, "")
            files = hub.files.get((repo, commit))
            if files is None:
                return 404, {"X-Error-Code": "RevisionNotFound"}, b"{}"
            if api:
                siblings = [{"rfilename": name, "size": len(body)} for name, body in files.items()]
                answer = {"id": repo, "modelId": repo, "sha": commit, "siblings": siblings, "tags": []}
                return 200, {"Content-Type": "application/json"}, json.dumps(answer).encode()
            name = "/".join(parts[4:])
            if name not in files:
                return 404, {"X-Error-Code": "EntryNotFound"}, b""
            etag = hashlib.sha256(files[name]).hexdigest()
            return 200, {"ETag": f'"{etag}"', "X-Repo-Commit": commit}, files[name]

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    hub = FakeHub(f"http://127.0.0.1:{server.server_address[1]}")
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    try:
        yield hub
    finally:
        server.shutdown()
        server.server_close()
        thread.join()
