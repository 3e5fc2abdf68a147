"""Made of `aio/client.py` by `python -m tools.twins`: change it there."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Iterator, Sequence
from types import TracebackType
from typing import Any, Self

import numpy as np

from kvforge.protocol.messages import (
    BlockCount,
    BlockInfo,
    Explanation,
    Health,
    PrefixFound,
    RequestInfo,
    RequestList,
    SequenceInfo,
    Stats,
)

from .. import exchanges
from ..arguments import stop_strings
from ..handles import Feed, FeedCursor
from ..operations import CONNECT_TIMEOUT_S, READY_TIMEOUT_S, STREAM_TIMEOUT_S, TIMEOUT_S, Prompt
from ..options import MAX_TOKENS, RECONNECT_S, RequestOptions
from ..results import Completion, Token
from ..sampling import Sampling
from ..sequences import CachedSequence, SequenceRef
from ..tables import Tables
from .requests import Request, TextRequest
from .waiting import Calls, drive


class Client:
    """A connection to a coordinator. Closing it cancels the requests that still run, except detached ones.

    endpoint: `ipc://PATH` or `tcp://HOST:PORT`; by default KVFORGE_ENDPOINT, else the one of the runtime folder.
    timeout_s: how long a command may take; connect_timeout_s: how long to look for a coordinator within that.
    stream_timeout_s: how long to wait for the next token, and for `result()` without a timeout of its own.
    reconnect_s: how long a connection that was lost is tried again, while a call waits; 0: not at all.
    tokenizer: for `generate`; a path or model name. By default KVFORGE_TOKENIZER, else where the worker has its model.
    server_key, key_file: for `tcp://`, which is encrypted: the coordinator's public key, and the file with the keys of
    this client (`kvforge keys client` makes one); by default KVFORGE_SERVER_KEY and KVFORGE_KEY_FILE.

    The connection is made by the first command and made again when it was lost, as when the coordinator is killed and
    started again: requests, sequences and held blocks are as before, streams go on with the next token, and a command
    whose answer was lost is done once. Where that fails, what waited raises CoordinatorUnavailable; the requests are
    kept for a while, to be read on with `attach(request.id, len(request.tokens))`. Every method that talks to the
    coordinator raises CoordinatorUnavailable (nobody answers, or it went away and did not come back; where it came back
    without knowing us, it says so if a command may have been done), DeadlineExceeded (it did not answer in time),
    ProtocolError (it does not speak our protocol), NotAllowed (it does not know this client's key, or lets its owner do
    less) and Conflict (this client is closed, was carried through a fork, or is used by a second thread while the first
    one that used it runs).
    """

    def __init__(
        self,
        endpoint: str | os.PathLike[str] | None = None,
        *,
        timeout_s: float = TIMEOUT_S,
        connect_timeout_s: float = CONNECT_TIMEOUT_S,
        stream_timeout_s: float = STREAM_TIMEOUT_S,
        reconnect_s: float = RECONNECT_S,
        tokenizer: str | os.PathLike[str] | None = None,
        server_key: str | None = None,
        key_file: str | os.PathLike[str] | None = None,
    ) -> None:
        self._calls = Calls(
            endpoint,
            timeout_s=timeout_s,
            connect_timeout_s=connect_timeout_s,
            stream_timeout_s=stream_timeout_s,
            reconnect_s=reconnect_s,
            tokenizer=tokenizer,
            server_key=server_key,
            key_file=key_file,
        )

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self.close()

    @property
    def endpoint(self) -> str:
        """Where this client connects to."""
        return self._calls.endpoint

    def close(self) -> None:
        """Says goodbye, if it can be said at once, and frees the sockets. May be called again.

        The coordinator then cancels the requests that still run, except detached ones.
        """
        self._calls.close()

    def wait_ready(
        self, timeout_s: float = READY_TIMEOUT_S, *, progress: Callable[[Health], None] | None = None
    ) -> Health:
        """Waits until a request would be served. `progress` is called with every answer on the way.

        Raises DeadlineExceeded, saying what is missing, or CoordinatorUnavailable if none was there to the end.
        """
        return drive(self._calls.wait_ready(timeout_s, progress))

    def submit(
        self,
        prompt: Sequence[int] | np.ndarray[Any, Any] = (),
        *,
        sequence: SequenceRef | None = None,
        max_tokens: int = MAX_TOKENS,
        sampling: Sampling | None = None,
        tenant: str = "default",
        salt: str = "",
        priority: int = 0,
        deadline_s: float | None = None,
        first_token_s: float | None = None,
        detached: bool = False,
        key: str = "",
        retry_s: float | None = None,
        timeout_s: float | None = None,
    ) -> Request:
        """Submits token ids [prompt_tokens] and returns once the request is accepted.

        sequence: continue this one instead, from the KV that it has; `prompt`, if any, is appended to it first and
        what is generated becomes part of it. salt: as in `create_sequence`.
        priority: -100 to 100, among the tenant's own requests: each step up is worth a fixed time of waiting.
        deadline_s, first_token_s: seconds after which it expires where it has not ended, or has no token yet; reading
        it then raises DeadlineExceeded. None: the coordinator's own limit, and none.
        detached: it goes on when this client is closed or its connection is lost; `attach` reads it later.
        key: at most 128 printable characters that name this call within the tenant. The same call with the same key is
        the same request, from its first token on: so it can be made again where its answer was lost. A call that gives
        up (a timeout, Ctrl-C, a cancelled task) cancels what it started, unless it has a key.
        retry_s: seconds to try again while the queue is full, as often as the coordinator advises. timeout_s: each try.
        Raises InvalidRequest naming the wrong argument, QueueFull, CapacityExceeded, Draining, KeyReused.
        """
        options = RequestOptions(
            max_tokens=max_tokens,
            sampling=sampling,
            tenant=tenant,
            salt=salt,
            priority=priority,
            deadline_s=deadline_s,
            first_token_s=first_token_s,
            detached=detached,
            key=key,
            retry_s=retry_s,
        )
        track = drive(self._calls.submit(prompt, options, timeout_s, sequence))
        return Request(self._calls, track)

    def samples(
        self,
        prompt: Sequence[int] | np.ndarray[Any, Any],
        count: int,
        *,
        max_tokens: int = MAX_TOKENS,
        sampling: Sampling | None = None,
        tenant: str = "default",
        salt: str = "",
        priority: int = 0,
        deadline_s: float | None = None,
        first_token_s: float | None = None,
        detached: bool = False,
        key: str = "",
        retry_s: float | None = None,
        timeout_s: float | None = None,
    ) -> tuple[Request, ...]:
        """Submits one prompt for `count` answers (1 to 256), each a request of its own; they share the prompt's blocks.

        Their ids follow each other, and so do their seeds (modulo 2^64). Arguments and errors are those of `submit`.
        """
        options = RequestOptions(
            max_tokens=max_tokens,
            sampling=sampling,
            tenant=tenant,
            salt=salt,
            priority=priority,
            deadline_s=deadline_s,
            first_token_s=first_token_s,
            detached=detached,
            key=key,
            retry_s=retry_s,
        )
        tracks = drive(self._calls.samples(prompt, count, options, timeout_s))
        return tuple(Request(self._calls, track) for track in tracks)

    def attach(self, request_id: int, offset: int = 0, timeout_s: float | None = None) -> Request:
        """Reads a request, whoever submitted it, running or ended not long ago, from the token at `offset` on.

        One connection at a time reads a request: the one that did gets Conflict. Unless it is detached, the request
        lasts from now on as long as this connection. Raises InvalidRequest naming `request_id` or `offset` (it has not
        generated so many), RequestNotFound.
        """
        track = drive(self._calls.attach(request_id, offset, timeout_s))
        return Request(self._calls, track, offset)

    def merge(self, *requests: Request) -> Iterator[tuple[Request, Token]]:
        """The tokens of several requests as they come, each with its request, until all have ended.

        Raises the error that one of them ended with.
        """
        feed = Feed(requests)
        return self._calls.reading(feed.tracks, FeedCursor(self._calls, feed).next)

    def cancel(self, request_id: int, *, timeout_s: float | None = None) -> None:
        """Ends a request of any client. Raises RequestNotFound, AlreadyFinished."""
        drive(self._calls.call(exchanges.cancel(request_id), timeout_s))

    def status(self, request_id: int, *, with_tokens: bool = False, timeout_s: float | None = None) -> RequestInfo:
        """One request, running or ended not long ago. Raises RequestNotFound."""
        return drive(self._calls.call(exchanges.status(request_id, with_tokens), timeout_s))

    def requests(self, count_max: int = 100, *, timeout_s: float | None = None) -> RequestList:
        """The newest requests."""
        return drive(self._calls.call(exchanges.requests(count_max), timeout_s))

    def stats(self, *, timeout_s: float | None = None) -> Stats:
        """Counters and gauges, all of one instant."""
        return drive(self._calls.call(exchanges.stats(), timeout_s))

    def health(self, *, timeout_s: float | None = None) -> Health:
        """Whether a request would be served now; if not, why. And the workers, with what each does and holds:
        `device_bytes` of one is its device's memory in bytes by purpose (weights, pool, graphs, other).
        """
        return drive(self._calls.call(exchanges.health(), timeout_s))

    def find_prefix(
        self,
        prompt: Sequence[int] | np.ndarray[Any, Any],
        *,
        tenant: str = "default",
        salt: str = "",
        key: str = "",
        timeout_s: float | None = None,
    ) -> PrefixFound:
        """What a request with this prompt would find cached now, and how much work is before it: for whoever chooses
        between coordinators. Changes nothing. key: whether the requests of this key are there. Raises InvalidRequest.
        """
        return drive(self._calls.call(exchanges.find_prefix(prompt, tenant, salt, key), timeout_s))

    def tables(self, *, timeout_s: float | None = None) -> Tables:
        """The shared tables of the coordinator that this client is connected to: to be read without a message.

        They are those of one start of the coordinator, and show for ever what that one last wrote: after a restart ask
        for new ones. Raises Unavailable where the file is not there, as for a coordinator on another machine.
        """
        return drive(self._calls.tables(timeout_s))

    def create_sequence(
        self,
        tokens: Sequence[int] | np.ndarray[Any, Any] = (),
        *,
        tenant: str = "default",
        salt: str = "",
        idle_ttl_s: float = 0.0,
        timeout_s: float | None = None,
    ) -> CachedSequence:
        """A sequence of token ids [length] that the coordinator keeps until it is removed.

        idle_ttl_s: removed after so long without access; 0: when this connection ends. salt: share cached prefixes
        with whoever names the same salt, instead of within the tenant. Raises InvalidRequest, CapacityExceeded,
        QuotaExceeded.
        """
        return drive(self._calls.call(exchanges.create(tokens, tenant, salt, idle_ttl_s), timeout_s))

    def append(
        self,
        sequence: SequenceRef | Iterable[SequenceRef],
        tokens: Sequence[int] | Sequence[Sequence[int]],
        *,
        timeout_s: float | None = None,
    ) -> tuple[int, ...]:
        """Appends token ids to one sequence, or a list of them to each of several: to all or to none.

        Returns the new lengths. Raises SequenceNotFound, SequenceBusy, CapacityExceeded, InvalidRequest.
        """
        return drive(self._calls.call(exchanges.append(sequence, tokens), timeout_s))

    def fork(
        self, sequence: SequenceRef, count: int = 1, *, timeout_s: float | None = None
    ) -> tuple[CachedSequence, ...]:
        """`count` more sequences with the same tokens; no KV is copied until one side writes.

        Works while a request runs on the sequence. Raises SequenceNotFound, CapacityExceeded.
        """
        return drive(self._calls.call(exchanges.fork(sequence, count), timeout_s))

    def info(self, sequence: SequenceRef, *, timeout_s: float | None = None) -> SequenceInfo:
        """What is known of a sequence. Raises SequenceNotFound, saying why where it expired."""
        return drive(self._calls.call(exchanges.info(sequence), timeout_s))

    def tokens(self, sequence: SequenceRef, *, timeout_s: float | None = None) -> tuple[int, ...]:
        """The token ids of a sequence [length]. Raises SequenceNotFound."""
        return drive(self._calls.call(exchanges.tokens(sequence), timeout_s))

    def remove(self, sequence: SequenceRef | Iterable[SequenceRef], *, timeout_s: float | None = None) -> int:
        """Removes one sequence or several, all or none; what runs on one is cancelled.

        Returns how many blocks nobody holds any more. Raises SequenceNotFound.
        """
        return drive(self._calls.call(exchanges.remove(sequence), timeout_s))

    def block(self, block_id: int, *, timeout_s: float | None = None) -> BlockInfo:
        """One block: its state, generation and holders. Raises BlockNotFound."""
        return drive(self._calls.call(exchanges.block(block_id), timeout_s))

    def ref(
        self,
        block_id: int,
        holder: str,
        *,
        generation: int | None = None,
        tenant: str = "default",
        timeout_s: float | None = None,
    ) -> BlockCount:
        """Adds a named holder to a block, until it is taken away or this connection ends.

        `tenant` is charged for the block while it has a name. Raises BlockNotFound, BlockNotHeld (it is free),
        AlreadyHolder, StaleGeneration, QuotaExceeded, CapacityExceeded.
        """
        return drive(self._calls.call(exchanges.ref(block_id, holder, generation, tenant), timeout_s))

    def unref(
        self, block_id: int, holder: str, *, generation: int | None = None, timeout_s: float | None = None
    ) -> BlockCount:
        """Takes a named holder away; the reply says what became of the block.

        Raises BlockNotFound, BlockNotHeld, NotAHolder, StaleGeneration.
        """
        return drive(self._calls.call(exchanges.unref(block_id, holder, generation), timeout_s))

    def explain(
        self,
        *,
        block: int | None = None,
        request: int | None = None,
        sequence: SequenceRef | None = None,
        tenant: str | None = None,
        timeout_s: float | None = None,
    ) -> Explanation:
        """Who holds a block and since when; why a request waits; what a sequence or a tenant occupies.

        Exactly one subject. Raises InvalidRequest, BlockNotFound, RequestNotFound, SequenceNotFound, NotFound.
        """
        return drive(self._calls.call(exchanges.explain(block, request, sequence, tenant), timeout_s))

    def purge_finished(self, older_than_s: float = 0.0, *, timeout_s: float | None = None) -> int:
        """Makes the coordinator forget requests that ended at least so long ago. Returns how many."""
        return drive(self._calls.call(exchanges.purge_finished(older_than_s), timeout_s))

    def drain(self, deadline_s: float | None = None, *, timeout_s: float | None = None) -> None:
        """Stops admission in the coordinator; what runs goes on.

        deadline_s: what has not ended after so many seconds fails with Draining, to be submitted elsewhere; None: it
        may take as long as it takes. Raises InvalidRequest naming `deadline_s`.
        """
        drive(self._calls.call(exchanges.drain(deadline_s), timeout_s))

    def encode(self, prompt: Prompt, *, raw: bool = False) -> list[int]:
        """The token ids that `generate` submits for a text or a chat. Raises what `generate_stream` raises."""
        return drive(self._calls.encode(prompt, raw))

    def has_chat_template(self) -> bool:
        """Whether the served model says how a chat is written. Raises what `encode` raises of its tokenizer."""
        return (drive(self._calls.tokenizer())).has_chat_template

    def generate_stream(
        self,
        prompt: Prompt,
        *,
        max_tokens: int = MAX_TOKENS,
        sampling: Sampling | None = None,
        tenant: str = "default",
        raw: bool = False,
        stop: str | Sequence[str] = (),
        priority: int = 0,
        deadline_s: float | None = None,
        first_token_s: float | None = None,
        detached: bool = False,
        key: str = "",
        retry_s: float | None = None,
        timeout_s: float | None = None,
    ) -> TextRequest:
        """Submits a text, or a chat as a list of {"role", "content"}; iterate over the answer to read it as it comes.

        A text is put to the model as a user's message, by its chat template, unless `raw`. stop: strings that end the
        answer: the text is cut before the first that appears, and the request ends there with reason `stop`. The other
        arguments are those of `submit`.
        Raises what `submit` raises, and Unavailable where the `text` extra is not installed.
        """
        stops = stop_strings(stop)
        options = RequestOptions(
            max_tokens=max_tokens,
            sampling=sampling,
            tenant=tenant,
            priority=priority,
            deadline_s=deadline_s,
            first_token_s=first_token_s,
            detached=detached,
            key=key,
            retry_s=retry_s,
        )
        ids = drive(self._calls.encode(prompt, raw))
        track = drive(self._calls.submit(ids, options, timeout_s))
        return TextRequest(self._calls, Request(self._calls, track), stops)

    def generate(
        self,
        prompt: Prompt,
        *,
        max_tokens: int = MAX_TOKENS,
        sampling: Sampling | None = None,
        tenant: str = "default",
        raw: bool = False,
        stop: str | Sequence[str] = (),
        priority: int = 0,
        deadline_s: float | None = None,
        first_token_s: float | None = None,
        detached: bool = False,
        key: str = "",
        retry_s: float | None = None,
        timeout_s: float | None = None,
    ) -> Completion:
        """As `generate_stream`, but returns the whole answer. timeout_s: for all of it."""
        text = self.generate_stream(
            prompt,
            max_tokens=max_tokens,
            sampling=sampling,
            tenant=tenant,
            raw=raw,
            stop=stop,
            priority=priority,
            deadline_s=deadline_s,
            first_token_s=first_token_s,
            detached=detached,
            key=key,
            retry_s=retry_s,
        )
        return text.result(timeout_s)
