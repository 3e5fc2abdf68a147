"""kvforge: the client library and the command line.

    from kvforge import Client, Sampling

    with Client() as kv:
        kv.wait_ready(timeout_s=120)
        request = kv.submit([1, 2, 3], max_tokens=16, sampling=Sampling(temperature=0.0))
        for token in request:
            print(token.token_id)
        print(request.result().reason)

Importing it loads neither torch nor transformers; text in and out (`generate`) needs the extra `text`.
"""

from protocol.errors import (
    AlreadyFinished,
    AlreadyHolder,
    BlockNotFound,
    BlockNotHeld,
    CapacityExceeded,
    Conflict,
    CoordinatorInUse,
    CoordinatorUnavailable,
    DeadlineExceeded,
    Draining,
    GpuError,
    InternalError,
    InvalidConfiguration,
    InvalidRequest,
    InvalidTransition,
    KeyReused,
    KvforgeError,
    ModelNotFound,
    NotAHolder,
    NotFound,
    NotReady,
    ProtocolError,
    QueueFull,
    QuotaExceeded,
    RequestNotFound,
    SequenceBusy,
    SequenceNotFound,
    StaleGeneration,
    Unavailable,
    UnsupportedModel,
    VersionMismatch,
    WorkerError,
)
from protocol.messages import (
    BlockCount,
    BlockInfo,
    Explanation,
    Health,
    RequestInfo,
    RequestList,
    SequenceInfo,
    Stats,
    Timings,
)

from .aio import AsyncClient, AsyncRequest, AsyncTextRequest
from .client import Client, Request, TextRequest
from .results import Completion, Finished, Token
from .sampling import Sampling
from .sequences import CachedSequence
from .tables import BlockCounts, SequenceRow, Tables

__version__ = "0.1.0"

__all__ = [
    "AlreadyFinished",
    "AlreadyHolder",
    "AsyncClient",
    "AsyncRequest",
    "AsyncTextRequest",
    "BlockCount",
    "BlockCounts",
    "BlockInfo",
    "BlockNotFound",
    "BlockNotHeld",
    "CachedSequence",
    "CapacityExceeded",
    "Client",
    "Completion",
    "Conflict",
    "CoordinatorInUse",
    "CoordinatorUnavailable",
    "DeadlineExceeded",
    "Draining",
    "Explanation",
    "Finished",
    "GpuError",
    "Health",
    "InternalError",
    "InvalidConfiguration",
    "InvalidRequest",
    "InvalidTransition",
    "KeyReused",
    "KvforgeError",
    "ModelNotFound",
    "NotAHolder",
    "NotFound",
    "NotReady",
    "ProtocolError",
    "QueueFull",
    "QuotaExceeded",
    "Request",
    "RequestInfo",
    "RequestList",
    "RequestNotFound",
    "Sampling",
    "SequenceBusy",
    "SequenceNotFound",
    "SequenceRow",
    "StaleGeneration",
    "SequenceInfo",
    "Stats",
    "Tables",
    "TextRequest",
    "Timings",
    "Token",
    "Unavailable",
    "UnsupportedModel",
    "VersionMismatch",
    "WorkerError",
]
