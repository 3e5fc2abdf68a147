"""Recorded requests of real clients, which a test sends again without the clients.

The clients take a minute of processor time, and their installation another one, so they are soak tests. Their requests
are kept in `recorded/NAME.jsonl`, an exchange a line: the request, the texts that the model answered, and the response
that the gateway gave to that request. Long texts are shortened, because a request has the client's own instructions:
only the fields and their kinds matter here. Fields that are equal to those of the request before are left out.

`KVFORGE_RECORD=1 python -m pytest -m clients tests/gateway/clients` writes the files again.
"""

from __future__ import annotations

import json
import re
import time
from collections import deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import httpx
import msgspec

from tests.gateway.clients.stage import Exchange, Stage
from tests.gateway.served import NO_CERTIFICATES

FOLDER = Path(__file__).parent / "recorded"
RECORD = "KVFORGE_RECORD"
TEXT_MAX = 60
POLL_S = 10.0
# Headers that the gateway or one of its middlewares may read.
HEADERS = ("accept", "authorization", "content-type", "x-api-key", "anthropic-version", "anthropic-beta")
# What is random in the ids that the server makes.
SERVER_ID = re.compile(r"(?<=_)(?=[0-9A-Za-z]*[0-9])[0-9A-Za-z]{16,}|(?<=[a-z]-)[0-9a-f]{16,}")
# Ids and dates that a client makes.
CLIENT_ID = re.compile(r"\b[0-9a-f]{8}-[0-9a-f]{4}-[0-9a-f]{4}-[0-9a-f]{4}-[0-9a-f]{12}\b|\b[0-9a-f]{32,64}\b")
DATE = re.compile(r"\b20\d\d-\d\d-\d\d\b")
LISTS = ("messages", "input")
# Texts that come in pieces: how they are cut depends on the time.
PIECES = frozenset(("content", "text", "delta", "arguments", "thinking", "partial_json", "reasoning_content"))
SCHEMAS = frozenset(("parameters", "input_schema", "schema"))  # a response has those of its request
UNSTABLE = frozenset(("sequence_number", "created", "signature"))


class Recorded(msgspec.Struct, kw_only=True):
    """An exchange.

    Attributes:
        method: The request's method.
        path: Its path, with ids of earlier responses as `§N`.
        query: Its query.
        headers: Its headers, without those that the gateway does not read.
        body: Its body; None for none.
        answers: The texts that the model gave.
        status: The status of the response.
        ids: Names `§N` of the ids in the response, in order.
        response: What `essence` returns for the response.
    """

    method: str
    path: str
    query: str = ""
    headers: dict[str, str] = {}
    body: Any = None
    answers: list[str] = []
    status: int = 200
    ids: list[str] = []
    response: Any = None


class Ids:
    """Names for the ids of a server, and back."""

    def __init__(self) -> None:
        self._names: dict[str, str] = {}
        self._ids: dict[str, str] = {}

    def learn(self, answered: str, names: Sequence[str] = ()) -> list[str]:
        """Name the ids of a response in order of appearance; by `names`, if given. Return the names."""
        ids = list(dict.fromkeys(SERVER_ID.findall(answered)))
        assert not names or len(ids) == len(names), (ids, names)
        known = list(names) or [self._names.get(each, f"§{len(self._names) + at}") for at, each in enumerate(ids, 1)]
        self._names |= zip(ids, known, strict=True)
        self._ids |= zip(known, ids, strict=True)
        return known

    def named(self, text: str) -> str:
        """Return a text with names in place of ids."""
        return SERVER_ID.sub(lambda found: self._names.get(found[0], found[0]), text)

    def real(self, text: str) -> str:
        """Return a text with ids in place of names."""
        return re.sub(r"§\d+", lambda found: self._ids[found[0]], text)


def record(name: str, stage: Stage, home: Path) -> None:
    """Write the exchanges of a client since `stage.play`, each with the response to the shortened request.

    Args:
        name: The file's name.
        stage: The server, with the exchanges.
        home: The client's folder, which is replaced in texts.
    """
    ids, found = Ids(), []
    for exchange in _without_polls(stage.exchanges):
        asked = _scrubbed(ids.named(json.dumps(exchange.asked, ensure_ascii=False)), home)
        made = Recorded(
            method=exchange.method,
            path=ids.named(exchange.path),
            query=exchange.query,
            headers={key: value for key, value in exchange.asked_headers.items() if key in HEADERS},
            body=_shortened(json.loads(asked)),
            answers=[_scrubbed(text, home) for text in exchange.answers],
            status=exchange.status,
            ids=ids.learn(exchange.answered.decode()),
        )
        found.append(made)
    replayed = Replay(stage)
    for made in found:
        exchange, made.response = replayed.send(made)
        assert exchange.status == made.status, f"{made.method} {made.path}: {made.status}, shortened {exchange}"
    FOLDER.mkdir(exist_ok=True)
    lines = (msgspec.json.encode(each).decode() for each in _differences(found))
    (FOLDER / f"{name}.jsonl").write_text("".join(f"{line}\n" for line in lines), encoding="utf-8")


def load(name: str) -> list[Recorded]:
    """Return the exchanges of a client."""
    lines = (FOLDER / f"{name}.jsonl").read_text(encoding="utf-8").splitlines()
    return list(_whole(map(json.loads, lines)))


class Replay:
    """Sends recorded requests to a server, one after another. Ids of its responses stand in later requests."""

    def __init__(self, stage: Stage) -> None:
        self._stage, self._ids = stage, Ids()
        self._answers: deque[str] = deque()
        stage.script.reply = lambda prompt: self._answers.popleft()

    def send(self, recorded: Recorded) -> tuple[Exchange, dict[str, Any]]:
        """Send a request; a GET again while it has another response, since it may ask for work that has not ended.

        Returns:
            The exchange, and its `essence`.
        """
        self._answers.extend(recorded.answers)
        body = None
        if recorded.body is not None:
            body = self._ids.real(json.dumps(recorded.body, ensure_ascii=False)).encode()
        url = f"{self._stage.url}{self._ids.real(recorded.path)}" + (f"?{recorded.query}" if recorded.query else "")
        until = time.monotonic() + POLL_S
        with httpx.Client(trust_env=False, timeout=POLL_S, verify=NO_CERTIFICATES) as client:
            while True:
                client.request(recorded.method, url, content=body, headers=recorded.headers)
                exchange = self._stage.exchanges[-1]
                answered = exchange.answered.decode()
                same = len(dict.fromkeys(SERVER_ID.findall(answered))) == len(recorded.ids)
                if same:
                    self._ids.learn(answered, recorded.ids)
                found = essence(exchange, self._ids)
                wanted = same if recorded.response is None else found == recorded.response
                if wanted or recorded.method != "GET" or time.monotonic() > until:
                    return exchange, found
                time.sleep(0.02)


def fields(exchanges: Sequence[Exchange] | Sequence[Recorded]) -> set[str]:
    """Return what clients ask for: `METHOD PATH FIELD` of all top-level fields, and of the types of their items."""
    found = set()
    for each in exchanges:
        asked = each.asked if isinstance(each, Exchange) else each.body
        path = re.sub(r"§\d+", "ID", SERVER_ID.sub("ID", each.path))
        found.add(f"{each.method} {path}")
        if isinstance(asked, Mapping):
            found |= {f"{each.method} {path} {key}" for key in asked}
    return found


def essence(exchange: Exchange, ids: Ids) -> dict[str, Any]:
    """Return the values of a response by their paths, whatever the pieces of a stream and the time.

    Args:
        exchange: The exchange.
        ids: Knows the ids of the response.
    """
    text = ids.named(exchange.answered.decode())
    found: dict[str, Any] = {"content-type": exchange.headers.get("content-type", "").partition(";")[0]}
    if exchange.streamed:
        names = re.findall(r"^event: (.*)$", text, re.MULTILINE)
        found["events"] = [name for at, name in enumerate(names) if at == 0 or names[at - 1] != name]
        documents = [line.removeprefix("data: ") for line in text.splitlines() if line.startswith("data: ")]
    else:
        documents = [text] if text else []
    values: dict[str, list[Any]] = {}
    for document in documents:
        for path, value in _leaves("", document if document == "[DONE]" else json.loads(document)):
            values.setdefault(path, []).append(value)
    for path, each in values.items():
        if path.rpartition(".")[2] in PIECES and all(isinstance(value, str) for value in each):
            found[path] = "".join(each)
        else:
            kept = [value for at, value in enumerate(each) if at == 0 or each[at - 1] != value]
            found[path] = kept if len(kept) > 1 else kept[0]
    return found


def _leaves(path: str, value: Any) -> Iterator[tuple[str, Any]]:
    if isinstance(value, dict):
        for key, inner in value.items():
            if key in SCHEMAS:
                yield f"{path}.{key}", "a schema"
            elif key not in UNSTABLE and not key.endswith("_at"):
                yield from _leaves(f"{path}.{key}" if path else key, inner)
    elif isinstance(value, list):
        for inner in value:
            yield from _leaves(f"{path}[]", inner)
    else:
        yield path, value


def _without_polls(exchanges: Sequence[Exchange]) -> list[Exchange]:
    """Return exchanges without those GETs that the same GET follows."""
    following = [*exchanges[1:], None]
    return [
        each
        for each, after in zip(exchanges, following, strict=True)
        if each.method != "GET" or after is None or (each.method, each.path) != (after.method, after.path)
    ]


def _scrubbed(text: str, home: Path) -> str:
    """Return a text without what differs from run to run and from machine to machine."""
    text = text.replace(str(home), "/home/user")
    return DATE.sub("2026-01-01", CLIENT_ID.sub(lambda found: re.sub(r"[0-9a-f]", "0", found[0]), text))


def _shortened(value: Any) -> Any:
    """Return a document with short texts. Texts that are JSON stay JSON."""
    if isinstance(value, dict):
        texts = {key for key, inner in value.items() if key == "description" and isinstance(inner, str)}
        return {key: "a description" if key in texts else _shortened(inner) for key, inner in value.items()}
    if isinstance(value, list):
        return [_shortened(inner) for inner in value]
    if not isinstance(value, str) or len(value) <= TEXT_MAX:
        return value
    if value[:1] in "{[":
        try:
            return json.dumps(_shortened(json.loads(value)))
        except ValueError:
            pass
    return f"a text of {len(value)} characters"


def _differences(exchanges: Iterable[Recorded]) -> Iterator[dict[str, Any]]:
    """Yield exchanges without the fields of bodies that are as in the request before with the same path."""
    before: dict[str, dict[str, Any]] = {}
    for each in exchanges:
        made = {key: value for key, value in msgspec.to_builtins(each).items() if value not in ("", None, [], {})}
        if isinstance(each.body, dict):
            earlier = before.get(each.path, {})
            same = {key for key, value in each.body.items() if key in earlier and earlier[key] == value}
            made["body"] = {key: value for key, value in each.body.items() if key not in same}
            made["as_before"] = sorted(same)
            for key in LISTS:
                now, then = each.body.get(key), earlier.get(key)
                if (
                    isinstance(now, list)
                    and isinstance(then, list)
                    and now[: len(then)] == then
                    and key in made["body"]
                ):
                    made["body"][key] = now[len(then) :]
                    made.setdefault("continues", []).append(key)
            before[each.path] = each.body
        yield made


def _whole(lines: Iterable[dict[str, Any]]) -> Iterator[Recorded]:
    """Undo `_differences`."""
    before: dict[str, dict[str, Any]] = {}
    for each in lines:
        same, continued = each.pop("as_before", []), each.pop("continues", [])
        if isinstance(each.get("body"), dict):
            earlier = before.get(each["path"], {})
            for key in continued:
                each["body"][key] = earlier[key] + each["body"][key]
            each["body"] |= {key: earlier[key] for key in same}
            before[each["path"]] = each["body"]
        yield msgspec.convert(each, Recorded)
