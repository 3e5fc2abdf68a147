"""Messages from clients to the coordinator. Every command has a `rid` that its sender chooses, and so has its reply."""

from __future__ import annotations

from .shared import (
    NO_INT32,
    NO_INT64,
    PROTOCOL_VERSION,
    PROTOCOL_VERSION_MIN,
    Goodbye,
    Int32Array,
    Int64Array,
    Message,
    SamplingParams,
)


class Hello(Message, frozen=True, tag="hello"):
    """First message on every connection.

    Attributes:
        rid: The number of this command.
        version_min: The oldest protocol version that the client accepts.
        version_max: The newest one.
        boot: If not "", it must be the coordinator's boot id; otherwise the answer is StateLost.
        session: 128 bits in hex that the client draws once, or "". A later connection with the same session is the same
            client: it replaces the earlier connection and takes over all that belongs to it.
    """

    rid: int
    version_min: int = PROTOCOL_VERSION_MIN
    version_max: int = PROTOCOL_VERSION
    boot: str = ""
    session: str = ""


class Submit(Message, frozen=True, tag="submit"):
    """Asks for tokens.

    Attributes:
        max_tokens: The most tokens to generate, at least 1; 0 if only the prompt's log-probabilities are wanted.
        prompt: [prompt_tokens] int32.
        sequence_id: The client sequence to continue, 0 for none. The prompt, which may be empty, is appended to it
            first, and the generated tokens become part of it.
        salt: Shares cached prefixes with all requests of the same salt instead of all of the tenant. A client that acts
            for one tenant shares them within that tenant only.
        count: The number of answers to the prompt. Each is a request of its own and shares the blocks of the prompt.
            Only the first reports log-probabilities of the prompt. Ids and seeds (modulo 2^64) are consecutive.
        priority: -100 to 100, within the tenant. Each step is worth a fixed time of waiting, so that no request
            starves.
        deadline_ms: The request expires if it has not ended by then; 0: the coordinator's own limit.
        first_token_ms: The request expires if it has no token by then; 0: no limit.
        detached: The request outlives its connection and can be read with Attach. Otherwise it is cancelled: at once
            after a Goodbye, after the coordinator's lease if the connection just ended.
        model_defaults: Names of fields of `sampling` for which the model's own defaults apply.
        key: Idempotency key within the tenant, "" for none. Repeating the command with the same key returns the same
            request ids and streams them to the latest connection. The key is remembered as long as its requests.
        continues: A sequence of the tenant with the same salt, 0 for none. As far as the prompt has the same token ids,
            its tokens are taken to be of the same kinds, and their KV is shared. A sequence that is gone has no effect.
        keep_ms: Keep the tokens and KV of each answer as a sequence until it is idle for this time (0: do not); `Ended`
            names it. The coordinator drops the least recently used ones earlier if it needs their places.
        pins: Leading parts of the prompt to pin from its first token on, as (tokens, milliseconds): at most 4. The
            KV of their full blocks is not evicted for that long after their last use, as far as
            `limits.pinned_percent_max` permits; `Ended.pinned` has what was pinned.
        ahead: Compute the prompt for later requests that begin with it, while nothing else is to be done. It is refused
            with Conflict beside other requests, and cancelled when another one comes; what it has computed stays
            cached. Of no use, and refused, where prompts and generated tokens are computed alike.
    """

    FRAMES = (("prompt", "<i4"),)
    rid: int
    max_tokens: int
    sampling: SamplingParams = SamplingParams()
    tenant: str = "default"
    stream: bool = True
    sequence_id: int = 0
    salt: str = ""
    count: int = 1
    priority: int = 0
    deadline_ms: int = 0
    first_token_ms: int = 0
    detached: bool = False
    key: str = ""
    model_defaults: tuple[str, ...] = ()
    continues: int = 0
    keep_ms: int = 0
    pins: tuple[tuple[int, int], ...] = ()
    ahead: bool = False
    prompt: Int32Array = NO_INT32


class Attach(Message, frozen=True, tag="attach"):
    """Streams a request to this connection from the token at `offset` on, whether or not it has ended.

    Only one connection reads a request at a time: it is taken from the previous one. The attached connection keeps the
    request alive in place of its first client, unless the request is detached.

    Attributes:
        offset: A negative offset names a prompt token, as in Stream.
        resume: Resume a paused stream. Refused with Conflict if another connection reads it by now.
    """

    rid: int
    request_id: int
    offset: int = 0
    resume: bool = False


class Cancel(Message, frozen=True, tag="cancel"):
    """Cancels a request."""

    rid: int
    request_id: int


class FinishAt(Message, frozen=True, tag="finish_at"):
    """Ends a request with reason `stop` after its first `tokens` generated tokens (at least 1).

    Sent by a client that found a stop string in the text: later tokens do not count. It is refused if fewer tokens were
    generated, and idempotent. A client sequence that the request continued keeps all generated tokens: their KV is
    already computed, and forks of the sequence may share it.
    """

    rid: int
    request_id: int
    tokens: int


class GetRequest(Message, frozen=True, tag="get_request"):
    """Asks for one request. `with_tokens` adds its generated tokens to the reply."""

    rid: int
    request_id: int
    with_tokens: bool = False


class ListRequests(Message, frozen=True, tag="list_requests"):
    """Asks for the newest requests. The coordinator's configuration and the size of a message bound `count_max`."""

    rid: int
    count_max: int = 100


class GetStats(Message, frozen=True, tag="get_stats"):
    """Asks for statistics."""

    rid: int


class GetHealth(Message, frozen=True, tag="get_health"):
    """Asks for the health of the service."""

    rid: int


class FindPrefix(Message, frozen=True, tag="find_prefix"):
    """Asks how a Submit of this prompt would fare now: its cached prefix and the load before it. Changes nothing.

    Attributes:
        tenant: As in Submit.
        salt: As in Submit.
        key: The idempotency key to look for, "" for none.
        prompt: [prompt_tokens] int32.
    """

    FRAMES = (("prompt", "<i4"),)
    rid: int
    tenant: str = "default"
    salt: str = ""
    key: str = ""
    prompt: Int32Array = NO_INT32


class CreateSequence(Message, frozen=True, tag="create_sequence"):
    """Creates a client sequence.

    Attributes:
        tokens: [length] int32, may be empty.
        idle_ttl_ms: Remove the sequence after this time without access; it then outlasts its owner's connection. 0:
            remove it when that connection ends.
    """

    FRAMES = (("tokens", "<i4"),)
    rid: int
    tenant: str = "default"
    salt: str = ""
    idle_ttl_ms: int = 0
    tokens: Int32Array = NO_INT32


class Append(Message, frozen=True, tag="append"):
    """Appends to each of n distinct sequences of one tenant, or to none.

    Attributes:
        sequence_ids: [n] int64.
        counts: [n] int32, the number of tokens of each sequence, at least 1.
        tokens: [sum(counts)] int32, one sequence after the other.
    """

    FRAMES = (("sequence_ids", "<i8"), ("counts", "<i4"), ("tokens", "<i4"))
    rid: int
    sequence_ids: Int64Array = NO_INT64
    counts: Int32Array = NO_INT32
    tokens: Int32Array = NO_INT32


class Fork(Message, frozen=True, tag="fork"):
    """Creates `count` sequences with the same tokens. They share each block until a sequence writes to it."""

    rid: int
    sequence_id: int
    count: int = 1


class Rewind(Message, frozen=True, tag="rewind"):
    """Cuts a sequence off behind its first `length` tokens. Forks of it keep theirs."""

    rid: int
    sequence_id: int
    length: int


class KeepSequence(Message, frozen=True, tag="keep_sequence"):
    """Sets the time to live of a sequence, which is then no longer dropped to make room for others.

    Attributes:
        idle_ttl_ms: As in CreateSequence, but at least 1.
    """

    rid: int
    sequence_id: int
    idle_ttl_ms: int


class GetSequence(Message, frozen=True, tag="get_sequence"):
    """Asks for one client sequence."""

    rid: int
    sequence_id: int


class GetTokens(Message, frozen=True, tag="get_tokens"):
    """Asks for the tokens of a sequence. Counts as an access."""

    rid: int
    sequence_id: int


class RemoveSequences(Message, frozen=True, tag="remove_sequences"):
    """Removes all named sequences or none. A request that runs on one of the sequences is cancelled.

    Attributes:
        sequence_ids: [n] int64, distinct.
    """

    FRAMES = (("sequence_ids", "<i8"),)
    rid: int
    sequence_ids: Int64Array = NO_INT64


class GetBlock(Message, frozen=True, tag="get_block"):
    """Asks for one block."""

    rid: int
    block_id: int


class RefBlock(Message, frozen=True, tag="ref_block"):
    """Adds a named holder to a block until the connection ends.

    Attributes:
        generation: The expected generation of the block; -1: any.
        tenant: The tenant charged for the block while it has named holders, within its quota.
    """

    rid: int
    block_id: int
    holder: str
    generation: int = -1
    tenant: str = "default"


class UnrefBlock(Message, frozen=True, tag="unref_block"):
    """Removes a named holder from a block."""

    rid: int
    block_id: int
    holder: str
    generation: int = -1


class Explain(Message, frozen=True, tag="explain"):
    """Asks why an object is in its state. Exactly one is named: a block, request or sequence (id >= 0), or a tenant."""

    rid: int
    block_id: int = -1
    request_id: int = -1
    sequence_id: int = -1
    tenant: str = ""


class PurgeFinished(Message, frozen=True, tag="purge_finished"):
    """Forgets requests that ended at least `older_than_ms` ago."""

    rid: int
    older_than_ms: int = 0


class Drain(Message, frozen=True, tag="drain"):
    """Stops admission; running requests go on.

    Attributes:
        deadline_ms: Requests that have not ended by then fail with Draining and may be submitted elsewhere. 0: no
            limit.
    """

    rid: int
    deadline_ms: int = 0


class WipeTenant(Message, frozen=True, tag="wipe_tenant"):
    """Removes a tenant's idle sequences and cached blocks, on the device, in host memory and on disks.

    Blocks of live requests and of named holders stay. It may be sent again, to see what is left.
    """

    rid: int
    tenant: str


CLIENT_MESSAGES = (
    Hello
    | Submit
    | Attach
    | Cancel
    | FinishAt
    | GetRequest
    | ListRequests
    | GetStats
    | GetHealth
    | FindPrefix
    | CreateSequence
    | Append
    | Fork
    | Rewind
    | KeepSequence
    | GetSequence
    | GetTokens
    | RemoveSequences
    | GetBlock
    | RefBlock
    | UnrefBlock
    | Explain
    | PurgeFinished
    | Drain
    | WipeTenant
    | Goodbye
)
