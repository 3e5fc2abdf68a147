"""All calls of the clients. `blocking/client.py` is generated from this file: see `kvforge.client.aio`."""

from __future__ import annotations

import os
from collections.abc import AsyncIterator, Callable, Iterable, Sequence
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
    TenantWiped,
)

from .. import exchanges
from ..arguments import scoring, stop_strings
from ..deprecated import renamed_keywords, warn_renamed
from ..handles import MergedCursor, MergedStream
from ..operations import CONNECT_TIMEOUT_S, READY_TIMEOUT_S, STREAM_TIMEOUT_S, TIMEOUT_S, Prompt
from ..options import MAX_TOKENS, RECONNECT_S, RequestOptions
from ..results import Completion, ScoredToken, Token
from ..sampling import SamplingParams
from ..sequences import CachedSequence, SequenceRef
from ..tables import Tables
from .request_handles import AsyncRequest, AsyncTextRequest
from .waiting import AsyncCalls


class AsyncClient:
    """A connection to a coordinator. Closing it cancels its running requests, except detached ones.

    The first command connects. After a loss, for example when a crashed coordinator restarts, the next attempts restore
    the session: requests, sequences and held blocks are kept, streams continue with the next token, and a command with
    a lost reply is executed once. If that fails, waiting calls raise CoordinatorUnavailable; the coordinator keeps the
    requests for a while, to be read with `attach(request.id, len(request.tokens))`.

    In asyncio: many tasks of one loop may share a client; its use in another loop raises Conflict. The first use of
    `generate` loads the tokenizer, which blocks the event loop for about a second.

    Args:
        endpoint: `ipc://PATH` or `tcp://HOST:PORT`; by default KVFORGE_ENDPOINT, else that of the runtime folder.
        timeout_s: The limit for a command.
        connect_timeout_s: The part of `timeout_s` for finding a coordinator.
        stream_timeout_s: The limit for the next token, and for `result()` without a timeout of its own.
        reconnect_s: How long a lost connection is retried while a call waits; 0: not at all.
        tokenizer: A path or model name for `generate`; by default KVFORGE_TOKENIZER, else the worker's model.
        server_key: For the encrypted `tcp://`: the coordinator's public key; by default KVFORGE_SERVER_KEY.
        key_file: For `tcp://`: the file with this client's keys (see `kvforge keys client`); by default
            KVFORGE_KEY_FILE.

    Raises:
        CoordinatorUnavailable: Any call: the coordinator does not answer, or left and did not return. If it returned
            without the session, the error states whether the command may have been executed.
        DeadlineExceeded: Any call: the coordinator did not answer in time.
        ProtocolError: Any call: the peer does not speak this protocol.
        NotAllowed: Any call: the client's key is unknown, or its owner lacks a right.
        Conflict: Any call: the client is closed, was inherited by a fork, or belongs to another running thread.
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
        self._calls = AsyncCalls(
            endpoint,
            timeout_s=timeout_s,
            connect_timeout_s=connect_timeout_s,
            stream_timeout_s=stream_timeout_s,
            reconnect_s=reconnect_s,
            tokenizer=tokenizer,
            server_key=server_key,
            key_file=key_file,
        )

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None
    ) -> None:
        await self.close()

    @property
    def endpoint(self) -> str:
        """Return the endpoint of the coordinator."""
        return self._calls.endpoint

    async def close(self) -> None:
        """Send Goodbye if that is possible at once, and free the sockets. May be called again.

        The coordinator then cancels the client's running requests, except detached ones.
        """
        self._calls.close()

    async def wait_ready(
        self, timeout_s: float = READY_TIMEOUT_S, *, progress: Callable[[Health], None] | None = None
    ) -> Health:
        """Wait until the service is ready.

        Args:
            timeout_s: The limit in seconds.
            progress: Called with each answer on the way.

        Raises:
            DeadlineExceeded: The service is not ready; the error names the reason.
            CoordinatorUnavailable: No coordinator answered.
        """
        return await self._calls.wait_ready(timeout_s, progress)

    @renamed_keywords(salt="cache_salt", key="idempotency_key")
    async def submit(
        self,
        prompt: Sequence[int] | np.ndarray[Any, Any] = (),
        *,
        sequence: SequenceRef | None = None,
        max_tokens: int = MAX_TOKENS,
        sampling: SamplingParams | None = None,
        tenant: str = "default",
        cache_salt: str = "",
        priority: int = 0,
        deadline_s: float | None = None,
        first_token_s: float | None = None,
        detached: bool = False,
        idempotency_key: str = "",
        retry_s: float | None = None,
        timeout_s: float | None = None,
    ) -> AsyncRequest:
        """Submit token ids and return once the request is accepted.

        A call that gives up (a timeout, Ctrl-C, a cancelled task) cancels its request, unless the call has an
        `idempotency_key`.

        Args:
            prompt: [prompt_tokens] token ids.
            sequence: A sequence to continue with its cached KV. The prompt, if any, is appended to the sequence first;
                the generated tokens follow.
            max_tokens: The limit of generated tokens; 0 only with `SamplingParams.prompt_logprobs`.
            sampling: The sampling parameters, by default the model's own.
            tenant: The tenant that the request belongs to.
            cache_salt: As in `create_sequence`.
            priority: -100 to 100, among the tenant's own requests. Each step is worth a fixed time of waiting.
            deadline_s: The request expires if it has not ended after this time; reading it then raises
                DeadlineExceeded. None: the coordinator's own limit.
            first_token_s: The same if it has no token by then. None: no limit.
            detached: The request outlives this client and its connection; `attach` reads it later.
            idempotency_key: At most 128 printable characters. Within a tenant, repeating the call with its key returns
                the same request from its first token on, so that a call with a lost reply can be repeated.
            retry_s: How long to retry while the queue is full, at the intervals that the coordinator advises.
            timeout_s: The limit for each try.

        Raises:
            InvalidRequest: Names the wrong argument.
            QueueFull: The queue is full.
            CapacityExceeded: The request exceeds a limit of the coordinator.
            Draining: Admission has stopped.
            KeyReused: The key belongs to another request.
        """
        options = RequestOptions(
            max_tokens=max_tokens,
            sampling=sampling,
            tenant=tenant,
            cache_salt=cache_salt,
            priority=priority,
            deadline_s=deadline_s,
            first_token_s=first_token_s,
            detached=detached,
            idempotency_key=idempotency_key,
            retry_s=retry_s,
        )
        track = await self._calls.submit(prompt, options, timeout_s, sequence)
        return AsyncRequest(self._calls, track)

    @renamed_keywords(salt="cache_salt", key="idempotency_key")
    async def submit_samples(
        self,
        prompt: Sequence[int] | np.ndarray[Any, Any],
        n: int,
        *,
        max_tokens: int = MAX_TOKENS,
        sampling: SamplingParams | None = None,
        tenant: str = "default",
        cache_salt: str = "",
        priority: int = 0,
        deadline_s: float | None = None,
        first_token_s: float | None = None,
        detached: bool = False,
        idempotency_key: str = "",
        retry_s: float | None = None,
        timeout_s: float | None = None,
    ) -> tuple[AsyncRequest, ...]:
        """Submit one prompt for several answers, each a request of its own. They share the blocks of the prompt.

        Ids and seeds (modulo 2^64) are consecutive. The other arguments and errors are those of `submit`.

        Args:
            prompt: [prompt_tokens] token ids.
            n: The number of answers, 1 to 256.
            max_tokens: As in `submit`.
            sampling: As in `submit`.
            tenant: As in `submit`.
            cache_salt: As in `submit`.
            priority: As in `submit`.
            deadline_s: As in `submit`.
            first_token_s: As in `submit`.
            detached: As in `submit`.
            idempotency_key: As in `submit`.
            retry_s: As in `submit`.
            timeout_s: As in `submit`.
        """
        options = RequestOptions(
            max_tokens=max_tokens,
            sampling=sampling,
            tenant=tenant,
            cache_salt=cache_salt,
            priority=priority,
            deadline_s=deadline_s,
            first_token_s=first_token_s,
            detached=detached,
            idempotency_key=idempotency_key,
            retry_s=retry_s,
        )
        tracks = await self._calls.submit_samples(prompt, n, options, timeout_s)
        return tuple(AsyncRequest(self._calls, track) for track in tracks)

    async def samples(
        self, prompt: Sequence[int] | np.ndarray[Any, Any], count: int, **options: Any
    ) -> tuple[AsyncRequest, ...]:
        """Submit as `submit_samples` does. Deprecated: removed in the next version."""
        warn_renamed("samples()", "submit_samples()")
        return await self.submit_samples(prompt, count, **options)

    async def score(
        self,
        tokens: Sequence[int] | np.ndarray[Any, Any],
        *,
        top_logprobs: int = 0,
        tenant: str = "default",
        cache_salt: str = "",
        priority: int = 0,
        retry_s: float | None = None,
        timeout_s: float | None = None,
    ) -> tuple[ScoredToken, ...]:
        """Return the log-probability of each token but the first, given those before it. Nothing is generated.

        No cached prefix is used: every token is computed. The other errors are those of `submit`.

        Args:
            tokens: [n] token ids.
            top_logprobs: How many of the most likely tokens to report in each place, 0 to 20.
            tenant: As in `submit`.
            cache_salt: As in `submit`.
            priority: As in `submit`.
            retry_s: As in `submit`.
            timeout_s: The limit for the whole call; None: that of the client for a result.

        Returns:
            n - 1 tokens, from the second one on.
        """
        request = await self.submit(
            tokens,
            max_tokens=0,
            sampling=scoring(top_logprobs),
            tenant=tenant,
            cache_salt=cache_salt,
            priority=priority,
            retry_s=retry_s,
            timeout_s=timeout_s,
        )
        return (await request.result(timeout_s)).prompt_logprobs

    async def attach(self, request_id: int, offset: int = 0, timeout_s: float | None = None) -> AsyncRequest:
        """Read a request of any client, running or recently ended, from the token at `offset` on.

        Only one connection reads a request at a time; the previous one gets Conflict. Unless it is detached, the
        request then lasts as long as this connection.

        Args:
            request_id: The request.
            offset: The offset of the first token to read.
            timeout_s: The limit in seconds.

        Raises:
            InvalidRequest: Names `request_id`, or an `offset` beyond the generated tokens.
            RequestNotFound: There is no such request.
        """
        track = await self._calls.attach(request_id, offset, timeout_s)
        return AsyncRequest(self._calls, track, offset)

    def merge(self, *requests: AsyncRequest) -> AsyncIterator[tuple[AsyncRequest, Token]]:
        """Return the tokens of several requests as they arrive, each with its request, until all have ended.

        Raises:
            KvforgeError: The error that ended a request.
        """
        feed = MergedStream(requests)
        return self._calls.reading(feed.tracks, MergedCursor(self._calls, feed).next)

    async def cancel(self, request_id: int, *, timeout_s: float | None = None) -> None:
        """Cancel a request of any client.

        Raises:
            RequestNotFound: There is no such request.
            AlreadyFinished: The request has ended.
        """
        await self._calls.call(exchanges.cancel(request_id), timeout_s)

    async def status(
        self, request_id: int, *, with_tokens: bool = False, timeout_s: float | None = None
    ) -> RequestInfo:
        """Return a request that runs or ended recently.

        Raises:
            RequestNotFound: There is no such request.
        """
        return await self._calls.call(exchanges.status(request_id, with_tokens), timeout_s)

    async def requests(self, count_max: int = 100, *, timeout_s: float | None = None) -> RequestList:
        """Return the newest requests."""
        return await self._calls.call(exchanges.requests(count_max), timeout_s)

    async def stats(self, *, timeout_s: float | None = None) -> Stats:
        """Return counters and gauges, all of one instant."""
        return await self._calls.call(exchanges.stats(), timeout_s)

    async def health(self, *, timeout_s: float | None = None) -> Health:
        """Return whether a request would be served now, the reason if not, and the state of the workers.

        A worker's `device_bytes` is its device memory in bytes by purpose (weights, pool, draft_states, graphs, other).
        """
        return await self._calls.call(exchanges.health(), timeout_s)

    @renamed_keywords(salt="cache_salt", key="idempotency_key")
    async def find_prefix(
        self,
        prompt: Sequence[int] | np.ndarray[Any, Any],
        *,
        tenant: str = "default",
        cache_salt: str = "",
        idempotency_key: str = "",
        timeout_s: float | None = None,
    ) -> PrefixFound:
        """Return the cached prefix and the load that a request with this prompt would meet now. Changes nothing.

        Routers use it to choose between coordinators.

        Args:
            prompt: [prompt_tokens] token ids.
            tenant: As in `submit`.
            cache_salt: As in `submit`.
            idempotency_key: Also report whether requests of this key exist.
            timeout_s: The limit in seconds.

        Raises:
            InvalidRequest: Names the wrong argument.
        """
        return await self._calls.call(exchanges.find_prefix(prompt, tenant, cache_salt, idempotency_key), timeout_s)

    async def tables(self, *, timeout_s: float | None = None) -> Tables:
        """Return the shared tables of the connected coordinator, which are read without messages.

        The tables belong to one boot and keep its last state. Ask for new ones after a restart.

        Raises:
            Unavailable: The file is not there, for example because the coordinator runs on another machine.
        """
        return await self._calls.tables(timeout_s)

    @renamed_keywords(salt="cache_salt")
    async def create_sequence(
        self,
        tokens: Sequence[int] | np.ndarray[Any, Any] = (),
        *,
        tenant: str = "default",
        cache_salt: str = "",
        idle_ttl_s: float = 0.0,
        timeout_s: float | None = None,
    ) -> CachedSequence:
        """Create a sequence that the coordinator keeps until it is removed.

        Args:
            tokens: [length] token ids.
            tenant: The tenant that is charged for it.
            cache_salt: Shares cached prefixes with all requests of the same salt, instead of all of the tenant.
            idle_ttl_s: Remove it after this time without access; 0: when this connection ends.
            timeout_s: The limit in seconds.

        Raises:
            InvalidRequest: Names the wrong argument.
            CapacityExceeded: There is no room.
            QuotaExceeded: The tenant's ceiling is reached.
        """
        return await self._calls.call(exchanges.create(tokens, tenant, cache_salt, idle_ttl_s), timeout_s)

    async def append(
        self,
        sequence: SequenceRef | Iterable[SequenceRef],
        tokens: Sequence[int] | Sequence[Sequence[int]],
        *,
        timeout_s: float | None = None,
    ) -> tuple[int, ...]:
        """Append token ids to one sequence, or to each of several: to all or to none.

        Args:
            sequence: One sequence or several.
            tokens: Token ids, or a list of token ids for each sequence.
            timeout_s: The limit in seconds.

        Returns:
            The new lengths.

        Raises:
            SequenceNotFound: There is no such sequence.
            SequenceBusy: A request runs on a sequence.
            CapacityExceeded: There is no room.
            InvalidRequest: Names the wrong argument.
        """
        return await self._calls.call(exchanges.append(sequence, tokens), timeout_s)

    async def fork(
        self, sequence: SequenceRef, count: int = 1, *, timeout_s: float | None = None
    ) -> tuple[CachedSequence, ...]:
        """Create `count` sequences with the same tokens. No KV is copied until one side writes; a recurrent state is.

        This works while a request runs on the sequence.

        Raises:
            SequenceNotFound: There is no such sequence.
            CapacityExceeded: There is no room.
        """
        return await self._calls.call(exchanges.fork(sequence, count), timeout_s)

    async def rewind(self, sequence: SequenceRef, length: int, *, timeout_s: float | None = None) -> SequenceInfo:
        """Cut a sequence off behind its first `length` tokens. Its forks keep theirs.

        Args:
            sequence: The sequence.
            length: How many tokens stay, with their KV. A recurrent state, or a window, that is gone there is computed
                again by the next request, from the last checkpoint or cached prefix on.
            timeout_s: The limit in seconds.

        Raises:
            SequenceNotFound: There is no such sequence.
            SequenceBusy: A request runs on it.
            InvalidRequest: Names `length`: the sequence is shorter.
        """
        return await self._calls.call(exchanges.rewind(sequence, length), timeout_s)

    async def keep(self, sequence: SequenceRef, idle_ttl_s: float, *, timeout_s: float | None = None) -> SequenceInfo:
        """Keep a sequence until it is idle for `idle_ttl_s` seconds, also after this connection.

        Raises:
            SequenceNotFound: There is no such sequence.
            InvalidRequest: Names `idle_ttl_s`.
        """
        return await self._calls.call(exchanges.keep(sequence, idle_ttl_s), timeout_s)

    async def info(self, sequence: SequenceRef, *, timeout_s: float | None = None) -> SequenceInfo:
        """Return the state of a sequence.

        Raises:
            SequenceNotFound: There is no such sequence; the error reports an expiry.
        """
        return await self._calls.call(exchanges.info(sequence), timeout_s)

    async def tokens(self, sequence: SequenceRef, *, timeout_s: float | None = None) -> tuple[int, ...]:
        """Return the token ids of a sequence, [length].

        Raises:
            SequenceNotFound: There is no such sequence.
        """
        return await self._calls.call(exchanges.tokens(sequence), timeout_s)

    async def remove(self, sequence: SequenceRef | Iterable[SequenceRef], *, timeout_s: float | None = None) -> int:
        """Remove one sequence or several, all or none. Requests that run on them are cancelled.

        Returns:
            The number of blocks that no other holder keeps.

        Raises:
            SequenceNotFound: There is no such sequence.
        """
        return await self._calls.call(exchanges.remove(sequence), timeout_s)

    async def block(self, block_id: int, *, timeout_s: float | None = None) -> BlockInfo:
        """Return a block's state, generation and holders.

        Raises:
            BlockNotFound: There is no such block.
        """
        return await self._calls.call(exchanges.block(block_id), timeout_s)

    async def ref(
        self,
        block_id: int,
        holder: str,
        *,
        generation: int | None = None,
        tenant: str = "default",
        timeout_s: float | None = None,
    ) -> BlockCount:
        """Add a named holder to a block, until `unref` or the end of this connection.

        Args:
            block_id: The block.
            holder: The holder's name.
            generation: The expected generation; None: any.
            tenant: The tenant charged for the block while it has named holders.
            timeout_s: The limit in seconds.

        Raises:
            BlockNotFound: There is no such block.
            BlockNotHeld: The block is free.
            AlreadyHolder: The holder already holds it.
            StaleGeneration: The block was recycled.
            QuotaExceeded: The tenant's ceiling is reached.
            CapacityExceeded: There are too many holders.
        """
        return await self._calls.call(exchanges.ref(block_id, holder, generation, tenant), timeout_s)

    async def unref(
        self, block_id: int, holder: str, *, generation: int | None = None, timeout_s: float | None = None
    ) -> BlockCount:
        """Remove a named holder from a block.

        Returns:
            The resulting state of the block.

        Raises:
            BlockNotFound: There is no such block.
            BlockNotHeld: The block is free.
            NotAHolder: The holder does not hold it.
            StaleGeneration: The block was recycled.
        """
        return await self._calls.call(exchanges.unref(block_id, holder, generation), timeout_s)

    async def explain(
        self,
        *,
        block: int | None = None,
        request: int | None = None,
        sequence: SequenceRef | None = None,
        tenant: str | None = None,
        timeout_s: float | None = None,
    ) -> Explanation:
        """Explain a block's holders, why a request waits, or the memory of a sequence or tenant.

        Exactly one subject must be given.

        Raises:
            InvalidRequest: Not exactly one subject was given.
            NotFound: There is no such subject.
        """
        return await self._calls.call(exchanges.explain(block, request, sequence, tenant), timeout_s)

    async def purge_finished(self, older_than_s: float = 0.0, *, timeout_s: float | None = None) -> int:
        """Make the coordinator forget requests that ended at least `older_than_s` ago; return their number."""
        return await self._calls.call(exchanges.purge_finished(older_than_s), timeout_s)

    async def drain(self, deadline_s: float | None = None, *, timeout_s: float | None = None) -> None:
        """Stop admission in the coordinator; running requests go on.

        Args:
            deadline_s: Requests that have not ended by then fail with Draining and can be submitted elsewhere; None: no
                limit.
            timeout_s: The limit for the command in seconds.

        Raises:
            InvalidRequest: Names `deadline_s`.
        """
        await self._calls.call(exchanges.drain(deadline_s), timeout_s)

    async def wipe_tenant(self, tenant: str, *, timeout_s: float | None = None) -> TenantWiped:
        """Remove a tenant's idle sequences and cached blocks, on the device, in host memory and on disks.

        Nothing that was cached of the tenant is a hit any more. Workers overwrite the bytes in host files and on disks
        soon after: ask again until `held_blocks` and `pending_blocks` are 0. Live requests of the tenant keep their
        blocks, and are cached when they end.

        Args:
            tenant: The tenant's name, which may be unknown.
            timeout_s: The limit for the command in seconds.

        Raises:
            InvalidRequest: The name is empty, too long, or not printable.
            NotAllowed: The client lacks the right `admin`.
        """
        return await self._calls.call(exchanges.wipe_tenant(tenant), timeout_s)

    async def encode(self, prompt: Prompt, *, raw: bool = False) -> list[int]:
        """Return the token ids that `generate` submits for a text or a chat. Raises as `generate_stream` does."""
        return await self._calls.encode(prompt, raw)

    async def has_chat_template(self) -> bool:
        """Return whether the served model has a chat template. Raises as `encode` does."""
        return (await self._calls.tokenizer()).has_chat_template

    @renamed_keywords(key="idempotency_key")
    async def generate_stream(
        self,
        prompt: Prompt,
        *,
        max_tokens: int = MAX_TOKENS,
        sampling: SamplingParams | None = None,
        tenant: str = "default",
        raw: bool = False,
        stop: str | Sequence[str] = (),
        priority: int = 0,
        deadline_s: float | None = None,
        first_token_s: float | None = None,
        detached: bool = False,
        idempotency_key: str = "",
        retry_s: float | None = None,
        timeout_s: float | None = None,
    ) -> AsyncTextRequest:
        """Submit a text, or a chat as a list of {"role", "content"}; iterating over the answer streams its text.

        The other arguments and errors are those of `submit`.

        Args:
            prompt: A text or a chat. Without `raw`, a text becomes a user's message in the model's chat template.
            max_tokens: As in `submit`.
            sampling: As in `submit`.
            tenant: As in `submit`.
            raw: Submit the text as it is.
            stop: Strings that end the answer. The text is cut before the first one found, and the request ends with
                reason `stop`.
            priority: As in `submit`.
            deadline_s: As in `submit`.
            first_token_s: As in `submit`.
            detached: As in `submit`.
            idempotency_key: As in `submit`.
            retry_s: As in `submit`.
            timeout_s: As in `submit`.

        Raises:
            Unavailable: The `text` extra is not installed.
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
            idempotency_key=idempotency_key,
            retry_s=retry_s,
        )
        ids = await self._calls.encode(prompt, raw)
        track = await self._calls.submit(ids, options, timeout_s)
        return AsyncTextRequest(self._calls, AsyncRequest(self._calls, track), stops)

    @renamed_keywords(key="idempotency_key")
    async def generate(
        self,
        prompt: Prompt,
        *,
        max_tokens: int = MAX_TOKENS,
        sampling: SamplingParams | None = None,
        tenant: str = "default",
        raw: bool = False,
        stop: str | Sequence[str] = (),
        priority: int = 0,
        deadline_s: float | None = None,
        first_token_s: float | None = None,
        detached: bool = False,
        idempotency_key: str = "",
        retry_s: float | None = None,
        timeout_s: float | None = None,
    ) -> Completion:
        """Submit a text or a chat as `generate_stream` does, and return the whole answer.

        Args:
            prompt: As in `generate_stream`.
            max_tokens: As in `submit`.
            sampling: As in `submit`.
            tenant: As in `submit`.
            raw: As in `generate_stream`.
            stop: As in `generate_stream`.
            priority: As in `submit`.
            deadline_s: As in `submit`.
            first_token_s: As in `submit`.
            detached: As in `submit`.
            idempotency_key: As in `submit`.
            retry_s: As in `submit`.
            timeout_s: The limit for the whole answer.
        """
        text = await self.generate_stream(
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
            idempotency_key=idempotency_key,
            retry_s=retry_s,
        )
        return await text.result(timeout_s)
