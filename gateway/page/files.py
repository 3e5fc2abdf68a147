"""The page's static files: a fixed table, read once. No request path reaches the file system."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from importlib.resources import files

from starlette.requests import Request
from starlette.responses import Response

INDEX = "index.html"
NAMES = (
    INDEX, "page.css", "main.js", "announcer.js", "blocks.js", "chart.js", "chat.js", "colours.js", "elements.js",
    "events.js", "explainer.js", "latency.js", "pool_text.js", "pools.js", "requests.js", "server.js", "tenants.js",
    "unpack.js", "workers.js", "words.js",
)  # fmt: skip
TYPES = {"html": "text/html", "css": "text/css", "js": "text/javascript"}
POLICY = (
    "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self' data:; connect-src 'self'; "
    "base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
)
HEADERS = {
    "Content-Security-Policy": POLICY,
    "Cross-Origin-Opener-Policy": "same-origin",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Referrer-Policy": "no-referrer",
    "X-Content-Type-Options": "nosniff",
}


@dataclass(frozen=True)
class File:
    """One static file. `tag` is its ETag."""

    content: bytes
    media_type: str
    tag: str

    def response(self, request: Request) -> Response:
        """Return the file, or 304 if the browser has it already."""
        headers = {**HEADERS, "ETag": self.tag, "Cache-Control": "no-cache"}
        known = [tag.strip().removeprefix("W/") for tag in request.headers.get("if-none-match", "").split(",")]
        if self.tag in known or "*" in known:
            return Response(status_code=304, headers=headers)
        return Response(self.content, media_type=self.media_type, headers=headers)


def load() -> dict[str, File]:
    """Return every file by its name."""
    folder = files("kvforge.gateway.page") / "static"
    contents = {name: (folder / name).read_bytes() for name in NAMES}
    return {name: _file(name, content) for name, content in contents.items()}


def _file(name: str, content: bytes) -> File:
    return File(content, TYPES[name.rpartition(".")[2]], f'"{hashlib.sha256(content).hexdigest()[:32]}"')
