"""/v1/conversations: stored items that responses continue and extend."""

from __future__ import annotations

import time
from typing import Any

import msgspec
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from kvforge.gateway.access import Caller
from kvforge.gateway.config import Settings
from kvforge.gateway.http import body
from kvforge.gateway.http.fields import Reader, no_effect
from kvforge.gateway.http.guard import Guard
from kvforge.gateway.http.ignored import Ignored
from kvforge.gateway.http.notes import notes_of
from kvforge.gateway.storage import Delete, Entry, GetEntry, Read, RemoveEntry
from kvforge.protocol.errors import Conflict, InvalidRequest

from .paging import Page, listed
from .responses_body import Item
from .stored import (
    CONVERSATION,
    ITEMS,
    NoSuchObject,
    Stored,
    StoredConversation,
    conversation_body,
    decoded_conversation,
    input_items,
    known_id,
    new_id,
)
from .unimplemented_fields import READ_IF, UNIMPLEMENTED

ITEMS_MAX = 1000
METADATA_MAX, NAME_MAX, VALUE_MAX = 16, 64, 512
UPDATE_TRIES = 5


class NewConversation(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The body of /v1/conversations."""

    items: list[Item] | None = None
    metadata: dict[str, Any] | None = None


class ChangedConversation(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The body of /v1/conversations/ID."""

    metadata: dict[str, Any] | None


class NewItems(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The body of /v1/conversations/ID/items."""

    items: list[Item]


_INCLUDE = {NewItems: {"include": no_effect("no further data exists")}}
CREATE = Reader(NewConversation, UNIMPLEMENTED, READ_IF)
UPDATE = Reader(ChangedConversation, UNIMPLEMENTED, READ_IF)
ADD = Reader(NewItems, {**UNIMPLEMENTED, **_INCLUDE}, READ_IF)


class Conversations:
    """The routes over one storage.

    Args:
        stored: The stored objects.
        settings: The gateway's settings.
    """

    def __init__(self, stored: Stored, settings: Settings) -> None:
        self._stored, self._settings = stored, settings

    def routes(self, guard: Guard) -> list[Route]:
        """Return all routes."""
        one = "/v1/conversations/{conversation_id}"
        item = f"{one}/items/{{item_id}}"
        return [
            Route("/v1/conversations", guard(self._create), methods=["POST"]),
            Route(one, guard(self._get), methods=["GET"]),
            Route(one, guard(self._update), methods=["POST"]),
            Route(one, guard(self._delete), methods=["DELETE"]),
            Route(f"{one}/items", guard(self._list), methods=["GET"]),
            Route(f"{one}/items", guard(self._add), methods=["POST"]),
            Route(item, guard(self._item), methods=["GET"]),
            Route(item, guard(self._remove), methods=["DELETE"]),
        ]

    async def _create(self, request: Request, caller: Caller) -> Response:
        asked = body.decoded(CREATE, await self._read(request), self._ignored(request))
        name = new_id("conv")
        stored = StoredConversation(metadata=checked_metadata(asked.metadata), created_at=int(time.time()))
        items = checked_items(asked.items or [])
        await self._stored.storage.apply(*self._stored.put_conversation(caller.tenant, name, stored, items))
        return JSONResponse(
            {"id": name, "object": CONVERSATION, "created_at": stored.created_at, "metadata": stored.metadata}
        )

    async def _get(self, request: Request, caller: Caller) -> Response:
        _, shown = await self._stored.conversation(caller.tenant, request.path_params["conversation_id"])
        return JSONResponse(shown)

    async def _update(self, request: Request, caller: Caller) -> Response:
        asked = body.decoded(UPDATE, await self._read(request), self._ignored(request))
        name, metadata = request.path_params["conversation_id"], checked_metadata(asked.metadata)
        for left in reversed(range(UPDATE_TRIES)):
            document, shown = await self._stored.conversation(caller.tenant, name)
            stored = msgspec.structs.replace(decoded_conversation(document), metadata=metadata)
            put = self._stored.put_conversation(caller.tenant, name, stored, expect=document.version)
            try:
                await self._stored.storage.apply(*put)
            except Conflict:
                if not left:
                    raise
                continue
            return JSONResponse({**shown, "metadata": metadata})
        raise AssertionError("returned or raised")

    async def _delete(self, request: Request, caller: Caller) -> Response:
        name = known_id(CONVERSATION, request.path_params["conversation_id"])
        (was_there,) = await self._stored.storage.apply(Delete(tenant=caller.tenant, kind=CONVERSATION, id=name))
        if not was_there:
            raise NoSuchObject(CONVERSATION, name)
        return JSONResponse({"id": name, "object": "conversation.deleted", "deleted": True})

    async def _list(self, request: Request, caller: Caller) -> Response:
        return await self.list_items(request, caller, request.path_params["conversation_id"])

    async def list_items(self, request: Request, caller: Caller, name: str) -> Response:
        """List the items of a conversation."""
        page = Page.of(request.query_params)
        document, _ = await self._stored.conversation(caller.tenant, name)
        key = self._key(caller, document.id)
        if page.after:
            (there,) = await self._stored.storage.apply(GetEntry(**key, entry=page.after))
            if there is None:
                raise InvalidRequest("after", f"there is no item {page.after[:100]!r}")
        read = Read(**key, after=page.after, limit=page.limit + 1, descending=page.descending)
        (entries,) = await self._stored.storage.apply(read)
        assert isinstance(entries, list)
        items = [msgspec.json.decode(entry.body) for entry in entries if isinstance(entry, Entry)]
        return JSONResponse(listed(items[: page.limit], more=len(items) > page.limit))

    async def _add(self, request: Request, caller: Caller) -> Response:
        return await self.add_items(request, caller, request.path_params["conversation_id"])

    async def add_items(
        self, request: Request, caller: Caller, name: str, kind: str = CONVERSATION, prefix: str = ""
    ) -> Response:
        """Append items to a conversation, or to a session: `kind` is its name in errors, `prefix` that of its id."""
        asked = body.decoded(ADD, await self._read(request), self._ignored(request))
        if not name.startswith(prefix):
            raise NoSuchObject(kind, name)
        document, _ = await self._stored.conversation(caller.tenant, name, kind=kind)
        items = checked_items(asked.items)
        await self._stored.storage.apply(self._stored.append(caller.tenant, document.id, items))
        return JSONResponse(listed(items, more=False))

    async def _item(self, request: Request, caller: Caller) -> Response:
        document, _ = await self._stored.conversation(caller.tenant, request.path_params["conversation_id"])
        name = request.path_params["item_id"]
        get = GetEntry(**self._key(caller, document.id), entry=known_id("item", name))
        (entry,) = await self._stored.storage.apply(get)
        if not isinstance(entry, Entry):
            raise NoSuchObject("item", name)
        return JSONResponse(msgspec.json.decode(entry.body))

    async def _remove(self, request: Request, caller: Caller) -> Response:
        document, _ = await self._stored.conversation(caller.tenant, request.path_params["conversation_id"])
        name = request.path_params["item_id"]
        remove = RemoveEntry(**self._key(caller, document.id), entry=known_id("item", name))
        (was_there,) = await self._stored.storage.apply(remove)
        if not was_there:
            raise NoSuchObject("item", name)
        return JSONResponse(conversation_body(document))

    def _key(self, caller: Caller, name: str) -> dict[str, Any]:
        return {"tenant": caller.tenant, "kind": CONVERSATION, "id": name, "name": ITEMS}

    async def _read(self, request: Request) -> bytes:
        settings = self._settings
        content = await body.read(request, settings.body_bytes_max, settings.body_s)
        return body.counted(content, settings.body_fields_max) or b"{}"

    def _ignored(self, request: Request) -> Ignored:
        return notes_of(request.scope).start(strict=self._settings.strict_fields)


def checked_items(given: list[Item]) -> list[dict[str, Any]]:
    """Return new items with ids.

    Raises:
        InvalidRequest: Names `items`: they are too many.
    """
    if len(given) > ITEMS_MAX:
        raise InvalidRequest("items", f"has {len(given)} items; the limit is {ITEMS_MAX}")
    return input_items(given, new_id(""))


def checked_metadata(metadata: dict[str, Any] | None) -> dict[str, Any]:
    """Return metadata within OpenAI's limits.

    Raises:
        InvalidRequest: Names `metadata`.
    """
    found = metadata or {}
    if len(found) > METADATA_MAX:
        raise InvalidRequest("metadata", f"has {len(found)} keys; the limit is {METADATA_MAX}")
    for name, value in found.items():
        if not isinstance(value, str) or len(name) > NAME_MAX or len(value) > VALUE_MAX:
            problem = f"keys are texts of at most {NAME_MAX} characters, values of at most {VALUE_MAX}"
            raise InvalidRequest("metadata", problem)
    return found
