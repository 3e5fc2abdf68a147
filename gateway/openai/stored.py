"""Stored responses and conversations, as documents of the storage.

| kind | id | body | lists |
|---|---|---|---|
| response | `resp_...` | a `StoredResponse` | `tokens`: progress of watched work |
| conversation | `conv_...` | a `StoredConversation` | `items`; `kept`: the sequences of its responses |

A response's parent is the one that it continues. While it runs in the background its state is its status, and its group
the model.
"""

from __future__ import annotations

import hashlib
import re
import secrets
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import msgspec

from kvforge.gateway.config import StorageSection
from kvforge.gateway.http.fields import Reader
from kvforge.gateway.http.ignored import Ignored
from kvforge.gateway.storage import (
    Append,
    Chain,
    Delete,
    Document,
    Entry,
    Get,
    Operation,
    Put,
    Read,
    Storage,
)
from kvforge.protocol.errors import CapacityExceeded, InvalidRequest, NotFound

from .kept import KeptSequence, decoded_kept
from .responses_body import Create, Item
from .unimplemented_fields import READ_IF, UNIMPLEMENTED

RESPONSE, CONVERSATION = "response", "conversation"
ITEMS, TOKENS, KEPT, REFERENCE = "items", "tokens", "kept", "item_reference"
SESSION_PREFIX = "sess"  # of the ids of conversations that are sessions
ID_LENGTH_MAX = 200
CONTEXT_BYTES_MAX = 64 << 20
CONTEXT_ITEMS_MAX = 20_000
_PREFIXES = {"message": "msg", "function_call": "fc", "function_call_output": "fco", "reasoning": "rs"}
_READER = Reader(Create, UNIMPLEMENTED, READ_IF)
_OWNER = re.compile(r"[a-z]+_([0-9a-f]{32})_i?[0-9]+")  # the id of an item names its response
ItemBody = dict[str, Any]


class Work(msgspec.Struct, frozen=True, kw_only=True):
    """What a gateway needs to continue a background response.

    Attributes:
        request: The JSON of its `Create`.
        prompt: Token ids, int32 little-endian.
        ending: The end of the prompt's text.
        shape: The name and value of the output constraint.
        max_tokens, seed, cache_salt, priority, key: Options of the submission; `key` is the idempotency key.
        session: Requests of one session go to the same replica.
        continues: The kept sequence that the prompt may begin with.
    """

    request: bytes
    prompt: bytes
    ending: str
    shape: tuple[str, Any]
    max_tokens: int
    seed: int
    cache_salt: str
    priority: int
    key: str
    session: str = ""
    continues: int = 0


class StoredResponse(msgspec.Struct, frozen=True, kw_only=True):
    """A response.

    Attributes:
        response: As a client reads it.
        input: Its own input items, each with an id.
        pieces: For each output item the lengths of the pieces in which its text came.
        conversation: The conversation that it belongs to, or "".
        work: The remaining work; None at the end.
        kept: The sequence that a response which continues this one may go on with.
    """

    response: dict[str, Any]
    input: list[ItemBody]
    pieces: list[list[int]] = []
    conversation: str = ""
    work: Work | None = None
    kept: KeptSequence | None = None


class Context(NamedTuple):
    """What precedes a request.

    Attributes:
        items: The stored items.
        kept: The sequence of the last response among them, which has all of their tokens.
    """

    items: list[ItemBody]
    kept: KeptSequence | None = None


class StoredConversation(msgspec.Struct, frozen=True, kw_only=True):
    """A conversation; its items are entries.

    Attributes:
        metadata: As its client gave it.
        created_at: Seconds since 1970.
        parent: The session that it was forked from, or "".
        shared: Forks use the sequences of its responses too.
    """

    metadata: dict[str, Any] = {}
    created_at: int = 0
    parent: str = ""
    shared: bool = False


encode = msgspec.json.encode  # MessagePack has no integers beyond 64 bits
_RESPONSE = msgspec.json.Decoder(StoredResponse)
_CONVERSATION = msgspec.json.Decoder(StoredConversation)


class NoSuchObject(NotFound):
    """The tenant has no such object. `field` names the parameter that refers to it."""

    def __init__(self, kind: str, name: str, field: str | None = None) -> None:
        NotFound.__init__(self, f"there is no {kind} {name[:100]!r} (never stored, expired or deleted)", field=field)


class Stored:
    """The stored objects of all tenants.

    Args:
        storage: The database.
        settings: Retention and leases.
    """

    def __init__(self, storage: Storage, settings: StorageSection) -> None:
        self.storage, self.settings = storage, settings

    # --------------------------------------------------------------------------------------------------- responses

    async def response(self, tenant: str, name: str) -> tuple[Document, StoredResponse]:
        """Return a response.

        Raises:
            NoSuchObject: There is none.
        """
        (document,) = await self.storage.apply(Get(tenant=tenant, kind=RESPONSE, id=known_id(RESPONSE, name)))
        if not isinstance(document, Document):
            raise NoSuchObject(RESPONSE, name)
        return document, decoded_response(document)

    async def delete_response(self, tenant: str, name: str) -> None:
        """Delete a response, also from the disk.

        Raises:
            NoSuchObject: There is none.
        """
        (was_there,) = await self.storage.apply(Delete(tenant=tenant, kind=RESPONSE, id=known_id(RESPONSE, name)))
        if not was_there:
            raise NoSuchObject(RESPONSE, name)

    def put(
        self,
        tenant: str,
        stored: StoredResponse,
        *,
        group: str,
        state: str = "",
        expect: int = -1,
        owner: str = "",
    ) -> list[Operation]:
        """Return the operations that write a response; at its end they append its items to its conversation."""
        body = stored.response
        put = Put(
            tenant=tenant,
            kind=RESPONSE,
            id=body["id"],
            body=encode(stored),
            group=group,
            parent=body["previous_response_id"] or "",
            state=state,
            keep_s=self.settings.retention_s,
            expect=expect,
            owner=owner,
            lease_s=self.settings.lease_s,
            clear=True,
        )
        if state or not stored.conversation or not body["output"]:
            return [put]
        appended = self.append(tenant, stored.conversation, [*stored.input, *body["output"]])
        if stored.kept is None:
            return [put, appended]
        kept = msgspec.structs.replace(stored.kept, response_id=body["id"], item=body["output"][-1]["id"])
        entry = Entry(body["id"], encode(kept))
        conversation: dict[str, Any] = {"tenant": tenant, "kind": CONVERSATION, "id": stored.conversation}
        return [put, appended, Append(**conversation, name=KEPT, entries=[entry], skip=True)]

    # ----------------------------------------------------------------------------------------------- conversations

    async def conversation(
        self, tenant: str, name: str, field: str | None = None, kind: str = CONVERSATION
    ) -> tuple[Document, ItemBody]:
        """Return a conversation, and how a client reads it. `kind` is its name in errors.

        Raises:
            NoSuchObject: There is none.
        """
        (document,) = await self.storage.apply(Get(tenant=tenant, kind=CONVERSATION, id=known_id(CONVERSATION, name)))
        if not isinstance(document, Document):
            raise NoSuchObject(kind, name, field)
        return document, conversation_body(document)

    def put_conversation(
        self, tenant: str, name: str, stored: StoredConversation, items: Sequence[ItemBody] = (), expect: int = 0
    ) -> list[Operation]:
        """Return the operations that write a conversation."""
        put = Put(
            tenant=tenant,
            kind=CONVERSATION,
            id=name,
            body=encode(stored),
            keep_s=self.settings.retention_s,
            expect=expect,
        )
        return [put, self.append(tenant, name, items)] if items else [put]

    def append(self, tenant: str, name: str, items: Iterable[ItemBody]) -> Append:
        """Return the operation that appends items to a conversation, unless they are there already."""
        entries = [Entry(item["id"], msgspec.json.encode(item)) for item in items]
        return Append(tenant=tenant, kind=CONVERSATION, id=name, name=ITEMS, entries=entries, skip=True)

    # ----------------------------------------------------------------------------------------------------- context

    async def context(self, tenant: str, asked: Create) -> Context:
        """Return what precedes a request, from its conversation or the responses that it continues.

        Raises:
            NoSuchObject: The response or conversation to continue does not exist, or was removed in part.
            InvalidRequest: It names both, or what it continues is still running.
            CapacityExceeded: The stored items are too long.
        """
        if asked.previous_response_id is not None and asked.conversation_id:
            raise InvalidRequest("previous_response_id", "cannot be combined with conversation")
        if asked.conversation_id:
            return await self._conversation_context(tenant, asked.conversation_id)
        if asked.previous_response_id is not None:
            return await self._chain_context(tenant, asked.previous_response_id)
        return Context([])

    async def resolved(self, tenant: str, asked: Create, before: Sequence[ItemBody]) -> list[Item] | str | None:
        """Return the input of a request with its references replaced by the items that they name.

        Args:
            tenant: The sender's.
            asked: The request.
            before: The items of what it continues.

        Raises:
            NoSuchObject: There is no such item; names its place.
        """
        if asked.input is None or isinstance(asked.input, str):
            return asked.input
        if not any(item.type == REFERENCE for item in asked.input):
            return asked.input
        known = {item["id"]: item for item in before}
        found: list[Item] = []
        for at, item in enumerate(asked.input):
            if item.type != REFERENCE:
                found.append(item)
                continue
            name = item.id or ""
            if name not in known and (owner := _OWNER.fullmatch(name)):
                stored = await self._response_or_none(tenant, f"resp_{owner[1]}")
                known |= {each["id"]: each for each in (*stored.input, *stored.response["output"])} if stored else {}
            if name not in known:
                raise NoSuchObject("item", name, f"input[{at}].id")
            found += items_of([known[name]])
        return found

    async def _response_or_none(self, tenant: str, name: str) -> StoredResponse | None:
        (document,) = await self.storage.apply(Get(tenant=tenant, kind=RESPONSE, id=name))
        return decoded_response(document) if isinstance(document, Document) else None

    async def _conversation_context(self, tenant: str, name: str) -> Context:
        document, _ = await self.conversation(tenant, name, "conversation")
        if document.size_bytes > CONTEXT_BYTES_MAX:
            what = f"bytes of the conversation {name!r}"
            raise CapacityExceeded(what, document.size_bytes, CONTEXT_BYTES_MAX, "begin a new conversation")
        conversation: dict[str, Any] = {"tenant": tenant, "kind": CONVERSATION, "id": name}
        entries, last = await self.storage.apply(
            Read(**conversation, name=ITEMS, limit=CONTEXT_ITEMS_MAX),
            Read(**conversation, name=KEPT, limit=1, descending=True),
        )
        assert isinstance(entries, list) and isinstance(last, list)
        kept = [decoded_kept(entry.body) for entry in last if isinstance(entry, Entry)]
        items = [msgspec.json.decode(entry.body) for entry in entries if isinstance(entry, Entry)]
        return Context(items, kept[0] if kept else None)

    async def _chain_context(self, tenant: str, name: str) -> Context:
        field = "previous_response_id"
        (chain,) = await self.storage.apply(
            Chain(
                tenant=tenant,
                kind=RESPONSE,
                id=known_id(RESPONSE, name, field),
                keep_s=self.settings.retention_s,
                bytes_max=CONTEXT_BYTES_MAX,
            )
        )
        assert isinstance(chain, list)
        documents = [document for document in chain if isinstance(document, Document)]
        if not documents:
            raise NoSuchObject(RESPONSE, name, field)
        if documents[0].parent:
            raise NoSuchObject(f"response that {name} continues,", documents[0].parent, field)
        items: list[ItemBody] = []
        kept = None
        for document in documents:
            if document.state:
                raise InvalidRequest(field, f"the response {document.id!r} is {document.state}: wait for its end")
            stored = decoded_response(document)
            items += [*stored.input, *stored.response["output"]]
            kept = stored.kept
        return Context(items, kept)


def decoded_response(document: Document) -> StoredResponse:
    """Return the response in a document; its status is the document's state while it runs."""
    stored = _RESPONSE.decode(document.body)
    if document.state:
        stored.response["status"] = document.state
    return stored


def conversation_body(document: Document) -> ItemBody:
    """Return a conversation as a client reads it."""
    stored = _CONVERSATION.decode(document.body)
    return {
        "id": document.id,
        "object": CONVERSATION,
        "created_at": stored.created_at,
        "metadata": stored.metadata,
    }


def decoded_conversation(document: Document) -> StoredConversation:
    """Return the conversation in a document."""
    return _CONVERSATION.decode(document.body)


def new_id(prefix: str) -> str:
    """Return an id that no other object has."""
    return f"{prefix}_{secrets.token_hex(16)}"


def named_id(prefix: str, tenant: str, key: str, *more: str) -> str:
    """Return the id of what a request with an idempotency key makes: the same one each time. A new one without a key.

    Args:
        prefix: The beginning of the id.
        tenant: The tenant.
        key: The key, or "".
        more: What else tells it from others with this key.
    """
    if not key:
        return new_id(prefix)
    named = "\n".join((*more, tenant, key))
    return f"{prefix}_{hashlib.blake2b(named.encode(), digest_size=16, person=b'kvforge response'[:16]).hexdigest()}"


def known_id(kind: str, name: str, field: str | None = None) -> str:
    """Return an id that may be one.

    Raises:
        NoSuchObject: It cannot be: it is empty, too long, or not printable ASCII.
    """
    if is_id(name):
        return name
    raise NoSuchObject(kind, name, field)


def is_id(name: str) -> bool:
    """Return whether a text may be an id: 1 to 200 printable ASCII characters."""
    return 0 < len(name) <= ID_LENGTH_MAX and name.isascii() and name.isprintable()


def items_of(plain: Sequence[ItemBody]) -> list[Item]:
    """Return stored items as those of a request."""
    decoded = _READER.read(msgspec.json.encode({"input": plain}), Ignored())
    assert isinstance(decoded.input, list)
    return decoded.input


def input_items(given: str | Sequence[Item] | None, base: str) -> list[ItemBody]:
    """Return the items of an input as they are stored and listed.

    Args:
        given: A text, which is a message of the user, or items.
        base: The base of the ids of items without a valid one.
    """
    items = [Item(role="user", content=given)] if isinstance(given, str) else given or ()
    return [_input_item(item, f"{base}_i{at}") for at, item in enumerate(items)]


def _input_item(item: Item, base: str) -> ItemBody:
    plain: ItemBody = {name: value for name, value in msgspec.to_builtins(item).items() if value is not None}
    content = plain.get("content")
    if item.type == "message":
        if isinstance(content, str):
            kind = "output_text" if item.role == "assistant" else "input_text"
            plain["content"] = [{"type": kind, "text": content}]
        plain.setdefault("status", "completed")
    if isinstance(plain.get("content"), list):
        plain["content"] = [_part(part) for part in plain["content"]]
    if isinstance(plain.get("output"), list):
        plain["output"] = [_part(part) for part in plain["output"]]
    plain["id"] = item.id if is_id(item.id or "") else f"{_PREFIXES.get(item.type, 'item')}{base}"
    return plain


def _part(part: Mapping[str, Any]) -> ItemBody:
    plain = {name: value for name, value in part.items() if value is not None}
    return {**plain, "annotations": []} if plain.get("type") == "output_text" else plain
