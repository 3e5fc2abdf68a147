"""/v1/sessions: conversations with a tree. A session is forked, rewound, pinned and explained.

A session is stored as a conversation: `conversation` of /v1/responses takes its id, and the routes of conversations
read and change its items. Its responses leave their sequences in the coordinator, and the next turn goes on with the
last of these as far as its prompt has the same tokens. A fork and a rewound session therefore need no work of the
coordinator: they share the sequence up to the token where they part.
"""

from __future__ import annotations

import time
from contextlib import suppress
from typing import Any

import msgspec
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from kvforge.gateway.access import Caller
from kvforge.gateway.config import SEQUENCE_MAX_S, Settings
from kvforge.gateway.http import body
from kvforge.gateway.http.fields import Reader
from kvforge.gateway.http.guard import Guard
from kvforge.gateway.http.ignored import Ignored
from kvforge.gateway.http.keys import Key
from kvforge.gateway.http.notes import notes_of
from kvforge.gateway.storage import Append, Delete, Document, Entry, Get, List, Operation, Read, RemoveEntry
from kvforge.protocol.errors import Conflict, InvalidRequest, KeyReused, KvforgeError, SequenceNotFound
from kvforge.protocol.messages import Explanation

from .background import Background
from .conversations import Conversations, checked_items, checked_metadata
from .kept import KeptSequence, decoded_kept, forget
from .paging import Page, listed
from .responses_body import Item
from .stored import (
    CONTEXT_ITEMS_MAX,
    CONVERSATION,
    ITEMS,
    KEPT,
    SESSION_PREFIX,
    NoSuchObject,
    Stored,
    StoredConversation,
    decoded_conversation,
    encode,
    known_id,
    named_id,
)
from .unimplemented_fields import READ_IF, UNIMPLEMENTED

FORKS_MAX = 16
SESSION = "session"


class NewSession(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The body of /v1/sessions."""

    items: list[Item] | None = None
    metadata: dict[str, Any] | None = None


class ForkBody(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The body of /v1/sessions/ID/fork: how many forks."""

    n: int = 1


class RewindBody(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The body of /v1/sessions/ID/rewind: the last item that stays ("": none), or how many tokens stay at most."""

    item: str | None = None
    tokens: int | None = None


class PinBody(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The body of /v1/sessions/ID/pin."""

    ttl_s: float


CREATE = Reader(NewSession, UNIMPLEMENTED, READ_IF)
FORK = Reader(ForkBody, UNIMPLEMENTED, READ_IF)
REWIND = Reader(RewindBody, UNIMPLEMENTED, READ_IF)
PIN = Reader(PinBody, UNIMPLEMENTED, READ_IF)


class Sessions:
    """The routes over one storage.

    Args:
        stored: The stored objects.
        background: The background responses, with the connection to the coordinator.
        settings: The gateway's settings.
    """

    def __init__(self, stored: Stored, background: Background, settings: Settings) -> None:
        self._stored, self._background, self._settings = stored, background, settings
        self._items = Conversations(stored, settings)

    def routes(self, guard: Guard) -> list[Route]:
        """Return all routes."""
        one = "/v1/sessions/{session_id}"
        return [
            Route("/v1/sessions", guard(self._create), methods=["POST"]),
            Route("/v1/sessions", guard(self._list), methods=["GET"]),
            Route(one, guard(self._get), methods=["GET"]),
            Route(one, guard(self._delete), methods=["DELETE"]),
            Route(f"{one}/items", guard(self._list_items), methods=["GET"]),
            Route(f"{one}/items", guard(self._add_items), methods=["POST"]),
            Route(f"{one}/fork", guard(self._fork), methods=["POST"]),
            Route(f"{one}/rewind", guard(self._rewind), methods=["POST"]),
            Route(f"{one}/pin", guard(self._pin), methods=["POST"]),
            Route(f"{one}/explain", guard(self._explain), methods=["GET"]),
        ]

    async def _create(self, request: Request, caller: Caller) -> Response:
        asked = body.decoded(CREATE, await self._read(request), self._ignored(request))
        stored = StoredConversation(metadata=checked_metadata(asked.metadata), created_at=int(time.time()))
        key = Key.of(request.headers).name
        name = named_id(SESSION_PREFIX, caller.tenant, key, SESSION)
        items = checked_items(asked.items or [])
        try:
            await self._stored.storage.apply(*self._stored.put_conversation(caller.tenant, name, stored, items))
        except Conflict:
            made = await self._made(caller, key, [name])
            if not key:
                raise
            if not made or made[0].metadata != stored.metadata:
                raise KeyReused(key, 0) from None
            stored = made[0]
        return JSONResponse(_shown(name, stored, None))

    async def _made(self, caller: Caller, key: str, names: list[str]) -> list[StoredConversation]:
        """Return the sessions that a request with this key has made before; none if any of them is not there."""
        asked = [Get(tenant=caller.tenant, kind=CONVERSATION, id=name) for name in names]
        found = await self._stored.storage.apply(*asked) if key else []
        made = [decoded_conversation(document) for document in found if isinstance(document, Document)]
        return made if len(made) == len(names) else []

    async def _get(self, request: Request, caller: Caller) -> Response:
        document, kept = await self._session(request, caller)
        return JSONResponse(_shown(document.id, decoded_conversation(document), kept[-1] if kept else None))

    async def _list(self, request: Request, caller: Caller) -> Response:
        page = Page.of(request.query_params)
        found: list[dict[str, Any]] = []
        after = page.after
        while len(found) <= page.limit:
            (documents,) = await self._stored.storage.apply(
                List(tenant=caller.tenant, kind=CONVERSATION, after=after, limit=100, descending=page.descending)
            )
            assert isinstance(documents, list)
            for document in documents:
                assert isinstance(document, Document)
                if document.id.startswith(f"{SESSION_PREFIX}_"):
                    found.append(_shown(document.id, decoded_conversation(document), None))
                after = document.id
            if len(documents) < 100:
                break
        return JSONResponse(listed(found[: page.limit], more=len(found) > page.limit))

    async def _delete(self, request: Request, caller: Caller) -> Response:
        document, kept = await self._session(request, caller)
        await self._stored.storage.apply(Delete(tenant=caller.tenant, kind=CONVERSATION, id=document.id))
        if not decoded_conversation(document).shared:
            for each in kept:
                await forget(self._background.service, each)
        return JSONResponse({"id": document.id, "object": "session.deleted", "deleted": True})

    async def _list_items(self, request: Request, caller: Caller) -> Response:
        document, _ = await self._session(request, caller)
        return await self._items.list_items(request, caller, document.id)

    async def _add_items(self, request: Request, caller: Caller) -> Response:
        name = request.path_params["session_id"]
        return await self._items.add_items(request, caller, name, SESSION, f"{SESSION_PREFIX}_")

    # -------------------------------------------------------------------------------------------------------- the tree

    async def _fork(self, request: Request, caller: Caller) -> Response:
        asked = body.decoded(FORK, await self._read(request), self._ignored(request))
        if not 1 <= asked.n <= FORKS_MAX:
            raise InvalidRequest("n", f"is {asked.n}; it must be 1 to {FORKS_MAX}: fork again for more")
        document, kept = await self._session(request, caller)
        items = await self._entries(caller, document.id)
        parent = decoded_conversation(document)
        repeated = Key.of(request.headers).name
        names = [named_id(SESSION_PREFIX, caller.tenant, repeated, document.id, f"{at}") for at in range(asked.n)]
        made, operations = [], [*self._shared(caller, document, parent)]
        for name in names:
            child = StoredConversation(
                metadata=parent.metadata, created_at=int(time.time()), parent=document.id, shared=True
            )
            operations += self._stored.put_conversation(caller.tenant, name, child)
            key: dict[str, Any] = {"tenant": caller.tenant, "kind": CONVERSATION, "id": name}
            if items:
                operations.append(Append(**key, name=ITEMS, entries=[Entry(one.id, one.body) for one in items]))
            if kept:
                entries = [Entry(each.response_id, encode(each)) for each in kept]
                operations.append(Append(**key, name=KEPT, entries=entries))
            made.append(_shown(name, child, kept[-1] if kept else None))
        try:
            await self._stored.storage.apply(*operations)
        except Conflict:
            before = await self._made(caller, repeated, names)
            if not before:
                raise
            made = [_shown(name, each, kept[-1] if kept else None) for name, each in zip(names, before, strict=True)]
        return JSONResponse({"object": "list", "data": made})

    def _shared(self, caller: Caller, document: Document, parent: StoredConversation) -> list[Operation]:
        """Return the operations that note that forks use the sequences of a session too."""
        if parent.shared:
            return []
        noted = msgspec.structs.replace(parent, shared=True)
        return self._stored.put_conversation(caller.tenant, document.id, noted, expect=document.version)

    async def _rewind(self, request: Request, caller: Caller) -> Response:
        asked = body.decoded(REWIND, await self._read(request), self._ignored(request))
        if (asked.item is None) == (asked.tokens is None):
            raise InvalidRequest("item", "or tokens must be given, and not both")
        document, kept = await self._session(request, caller)
        names = [entry.id for entry in await self._entries(caller, document.id)]
        if asked.item is not None:
            if asked.item and asked.item not in names:
                raise NoSuchObject("item", asked.item, "item")
            stay = names.index(asked.item) + 1 if asked.item else 0
        else:
            stay = _within(asked.tokens or 0, names, kept)
        key: dict[str, Any] = {"tenant": caller.tenant, "kind": CONVERSATION, "id": document.id}
        removed = [RemoveEntry(**key, name=ITEMS, entry=name) for name in names[stay:]]
        if removed:
            await self._stored.storage.apply(*removed)
        left = [each for each in kept if each.item in names[:stay]]
        shown = _shown(document.id, decoded_conversation(document), left[-1] if left else None)
        return JSONResponse({**shown, "last_item": names[stay - 1] if stay else None, "removed_items": len(removed)})

    async def _pin(self, request: Request, caller: Caller) -> Response:
        asked = body.decoded(PIN, await self._read(request), self._ignored(request))
        if not 0 < asked.ttl_s <= SEQUENCE_MAX_S:
            raise InvalidRequest("ttl_s", f"is {asked.ttl_s:g}; it must be above 0 and at most {SEQUENCE_MAX_S:g} s")
        document, kept = await self._session(request, caller)
        problem = "the coordinator keeps nothing of this session: let a response use it, then pin it"
        if not kept:
            raise Conflict(problem)
        client = self._background.service.client_of(kept[-1].replica)
        try:
            await client.keep(kept[-1].sequence_id, asked.ttl_s)
        except SequenceNotFound as error:
            raise Conflict(f"{problem} ({error.message})") from None
        shown = _shown(document.id, decoded_conversation(document), kept[-1])
        return JSONResponse({**shown, "pinned_s": asked.ttl_s})

    async def _explain(self, request: Request, caller: Caller) -> Response:
        document, kept = await self._session(request, caller)
        sequence: Explanation | None = None
        requests: list[dict[str, Any]] = []
        if kept:
            with suppress(SequenceNotFound):
                client = self._background.service.client_of(kept[-1].replica)
                sequence = await client.explain(sequence=kept[-1].sequence_id)
        for (tenant, name), run in tuple(self._background.runs.items()):
            if tenant == caller.tenant and run.work.asked.conversation_id == document.id and run.tokens.request_id:
                with suppress(KvforgeError):  # it ended, or runs on a replica
                    client = self._background.service.client_of("")
                    found = await client.explain(request=run.tokens.request_id)
                    requests.append({"response_id": name, **_explained(found)})
        lost = None if sequence is not None else "nothing is kept: the next turn computes its whole prompt"
        shown = {"id": document.id, "object": "session.explanation", "requests": requests, "reason": lost}
        return JSONResponse({**shown, "sequence": _explained(sequence) if sequence is not None else None})

    # ---------------------------------------------------------------------------------------------------------- inside

    async def _session(self, request: Request, caller: Caller) -> tuple[Document, list[KeptSequence]]:
        """Return a session, and the sequences of its responses, oldest first."""
        name = request.path_params["session_id"]
        if not known_id(SESSION, name).startswith(f"{SESSION_PREFIX}_"):
            raise NoSuchObject(SESSION, name)
        document, _ = await self._stored.conversation(caller.tenant, name, kind=SESSION)
        read = Read(tenant=caller.tenant, kind=CONVERSATION, id=name, name=KEPT, limit=CONTEXT_ITEMS_MAX)
        (entries,) = await self._stored.storage.apply(read)
        assert isinstance(entries, list)
        return document, [decoded_kept(entry.body) for entry in entries if isinstance(entry, Entry)]

    async def _entries(self, caller: Caller, name: str) -> list[Entry]:
        read = Read(tenant=caller.tenant, kind=CONVERSATION, id=name, name=ITEMS, limit=CONTEXT_ITEMS_MAX)
        (entries,) = await self._stored.storage.apply(read)
        assert isinstance(entries, list)
        return [entry for entry in entries if isinstance(entry, Entry)]

    async def _read(self, request: Request) -> bytes:
        settings = self._settings
        content = await body.read(request, settings.body_bytes_max, settings.body_s)
        return body.counted(content, settings.body_fields_max) or b"{}"

    def _ignored(self, request: Request) -> Ignored:
        return notes_of(request.scope).start(strict=self._settings.strict_fields)


def _within(tokens: int, names: list[str], kept: list[KeptSequence]) -> int:
    """Return how many items the last response ends with that has at most so many tokens, its prompt included.

    Raises:
        InvalidRequest: Names `tokens`: it is negative, or every response is longer.
    """
    ends = [(each.tokens, names.index(each.item) + 1) for each in kept if each.item in names]
    found = [stay for length, stay in ends if length <= tokens]
    if not found or tokens < 0:
        lengths = ", ".join(str(length) for length, _ in ends[:20]) or "none"
        problem = f"is {tokens}; the responses of this session end at {lengths} tokens: name one of these, or an item"
        raise InvalidRequest("tokens", problem)
    return max(found)


def _shown(name: str, stored: StoredConversation, kept: KeptSequence | None) -> dict[str, Any]:
    return {
        "id": name,
        "object": SESSION,
        "created_at": stored.created_at,
        "metadata": stored.metadata,
        "parent": stored.parent or None,
        "tokens": kept.tokens if kept is not None else 0,
    }


def _explained(found: Explanation) -> dict[str, Any]:
    return {"subject": found.subject, "sentences": list(found.sentences), "facts": dict(found.facts)}
