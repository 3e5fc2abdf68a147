"""What clients say to the coordinator. Every command carries `rid`, chosen by its sender; so does the reply to it."""

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
    Sampling,
)


class Hello(Message, frozen=True, tag="hello"):
    """First message on every connection. A boot other than "" must be the coordinator's, else it answers StateLost.

    session: 128 bits in hex that the sender drew for itself once. A later connection that names them again is the same
    client: it takes the place of the earlier one, whatever became of that, with all that it had. "": none.
    """

    rid: int
    version_min: int = PROTOCOL_VERSION_MIN
    version_max: int = PROTOCOL_VERSION
    boot: str = ""
    session: str = ""


class Submit(Message, frozen=True, tag="submit"):
    """Asks for tokens. prompt: [prompt_tokens] int32.

    sequence_id: continue this client sequence (prompt is then empty or what is appended to it first); the generated
    tokens become part of it. salt: share cached prefixes with whoever names the same salt instead of with the tenant;
    a client that acts for one tenant shares them within that one only.
    count: so many answers to one prompt, each a request of its own; their ids follow each other, and so do their seeds
    (modulo 2^64). They share the blocks of the prompt.
    priority: -100 to 100, within the tenant: each step is worth a fixed time of waiting, so that none waits for ever.
    deadline_ms: the request expires where it has not ended so long after it came; first_token_ms: where it has no token
    by then. 0: the coordinator's own limit, and none.
    detached: it goes on when its connection ends, to be read with Attach; else it is cancelled, at once after a
    Goodbye, after the coordinator's lease where the connection just ended.
    model_defaults: names of fields of `sampling` that were not chosen: the model's own values stand in for them.
    key: names this command within the tenant, so that sending it again after an answer was lost is the same request:
    the same ids, streamed to the connection that asked last. "": none. Remembered as long as its requests are.
    """

    FRAMES = (("prompt", "<i4"),)
    rid: int
    max_tokens: int
    sampling: Sampling = Sampling()
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
    prompt: Int32Array = NO_INT32


class Attach(Message, frozen=True, tag="attach"):
    """Streams a request to this connection, from the token at `offset` on, whoever submitted it, ended or not.

    One connection at a time reads a request: it is taken from the one that had it. Whoever attaches keeps the request
    alive in place of its first client, unless it is detached.
    resume: go on with a stream that was paused; refused with Conflict where another connection reads it by now.
    """

    rid: int
    request_id: int
    offset: int = 0
    resume: bool = False


class Cancel(Message, frozen=True, tag="cancel"):
    rid: int
    request_id: int


class FinishAt(Message, frozen=True, tag="finish_at"):
    """Ends a request as finished, reason `stop`, after its first `tokens` generated tokens (at least 1).

    For a client that found a stop string in the text: the tokens that came after it do not count. Refused where fewer
    were generated; asking twice for the same is the same answer. A client sequence that the request continued keeps
    all that was generated: its KV is computed already, and whoever forked it meanwhile shares it.
    """

    rid: int
    request_id: int
    tokens: int


class GetRequest(Message, frozen=True, tag="get_request"):
    """`with_tokens` adds the generated tokens to the reply (Attach gives them with all that is known of each)."""

    rid: int
    request_id: int
    with_tokens: bool = False


class ListRequests(Message, frozen=True, tag="list_requests"):
    """Newest first; `count_max` is bounded by the coordinator's configuration, the answer by what a message holds."""

    rid: int
    count_max: int = 100


class GetStats(Message, frozen=True, tag="get_stats"):
    rid: int


class GetHealth(Message, frozen=True, tag="get_health"):
    rid: int


class FindPrefix(Message, frozen=True, tag="find_prefix"):
    """Asks what a Submit of this prompt would find here now, and what is before it. Changes nothing.

    tenant, salt: as in Submit. key: whether this command's requests are here already; "": not asked. prompt:
    [prompt_tokens] int32.
    """

    FRAMES = (("prompt", "<i4"),)
    rid: int
    tenant: str = "default"
    salt: str = ""
    key: str = ""
    prompt: Int32Array = NO_INT32


class CreateSequence(Message, frozen=True, tag="create_sequence"):
    """A sequence of the client's own. tokens: [length] int32, may be empty.

    idle_ttl_ms: removed after so long without access; 0: when its owner's connection ends. A sequence with a time to
    live outlasts its owner's connection.
    """

    FRAMES = (("tokens", "<i4"),)
    rid: int
    tenant: str = "default"
    salt: str = ""
    idle_ttl_ms: int = 0
    tokens: Int32Array = NO_INT32


class Append(Message, frozen=True, tag="append"):
    """Appends to each of n distinct sequences of one tenant, or to none of them.

    sequence_ids: [n] int64, counts: [n] int32 of at least 1, tokens: [sum(counts)] int32, one sequence after the other.
    """

    FRAMES = (("sequence_ids", "<i8"), ("counts", "<i4"), ("tokens", "<i4"))
    rid: int
    sequence_ids: Int64Array = NO_INT64
    counts: Int32Array = NO_INT32
    tokens: Int32Array = NO_INT32


class Fork(Message, frozen=True, tag="fork"):
    """`count` more sequences with the same tokens, sharing every block until one side writes."""

    rid: int
    sequence_id: int
    count: int = 1


class GetSequence(Message, frozen=True, tag="get_sequence"):
    rid: int
    sequence_id: int


class GetTokens(Message, frozen=True, tag="get_tokens"):
    """Reading counts as an access."""

    rid: int
    sequence_id: int


class RemoveSequences(Message, frozen=True, tag="remove_sequences"):
    """Removes all of them or none; a request that runs on one is cancelled. sequence_ids: [n] int64, distinct."""

    FRAMES = (("sequence_ids", "<i8"),)
    rid: int
    sequence_ids: Int64Array = NO_INT64


class GetBlock(Message, frozen=True, tag="get_block"):
    rid: int
    block_id: int


class RefBlock(Message, frozen=True, tag="ref_block"):
    """Adds a named holder to a block; it is dropped when the connection ends. generation -1: whatever is current.

    tenant: is charged for the block while it has a name, within its quota.
    """

    rid: int
    block_id: int
    holder: str
    generation: int = -1
    tenant: str = "default"


class UnrefBlock(Message, frozen=True, tag="unref_block"):
    rid: int
    block_id: int
    holder: str
    generation: int = -1


class Explain(Message, frozen=True, tag="explain"):
    """Asks why. Exactly one of the subjects is given: block_id or request_id or sequence_id (>= 0), or a tenant."""

    rid: int
    block_id: int = -1
    request_id: int = -1
    sequence_id: int = -1
    tenant: str = ""


class PurgeFinished(Message, frozen=True, tag="purge_finished"):
    """Forgets requests that ended at least so long ago."""

    rid: int
    older_than_ms: int = 0


class Drain(Message, frozen=True, tag="drain"):
    """Stops admission; what runs goes on. deadline_ms: what has not ended by then is handed back: it fails with
    Draining, which says that it can be submitted elsewhere. 0: it may take as long as it takes.
    """

    rid: int
    deadline_ms: int = 0


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
    | GetSequence
    | GetTokens
    | RemoveSequences
    | GetBlock
    | RefBlock
    | UnrefBlock
    | Explain
    | PurgeFinished
    | Drain
    | Goodbye
)
