"""kvforge: the client library and the command line.

    from kvforge import Client, SamplingParams

    with Client() as kv:
        kv.wait_ready(timeout_s=120)
        request = kv.submit([1, 2, 3], max_tokens=16, sampling=SamplingParams(temperature=0.0))
        for token in request:
            print(token.token_id)
        print(request.result().reason)

Importing it loads neither torch nor transformers. Text prompts and answers (`generate`) need the extra `text`.
"""

import warnings
from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from kvforge.protocol.errors import (
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
        JournalCorrupt,
        JournalFailed,
        JournalFull,
        KernelError,
        KeyReused,
        KvforgeError,
        MessageRefused,
        ModelNotFound,
        NotAHolder,
        NotAllowed,
        NotFound,
        NotReady,
        ProtocolError,
        QueueFull,
        QuotaExceeded,
        RateExceeded,
        RequestNotFound,
        SequenceBusy,
        SequenceNotFound,
        StaleGeneration,
        StateLost,
        StateRemoved,
        StorageFailed,
        Unavailable,
        UnsupportedModel,
        VersionMismatch,
        WorkerError,
    )
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
        Timings,
    )

    from .client.aio import AsyncClient, AsyncRequest, AsyncTextRequest
    from .client.blocking import Client, Request, TextRequest
    from .client.results import Completion, Finished, ScoredToken, Token
    from .client.sampling import SamplingParams
    from .client.sequences import CachedSequence
    from .client.tables import BlockColumns, BlockCounts, SequenceRow, Tables

__version__ = "0.1.0"

__all__ = [
    "AlreadyFinished",
    "AlreadyHolder",
    "AsyncClient",
    "AsyncRequest",
    "AsyncTextRequest",
    "BlockCount",
    "BlockColumns",
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
    "JournalFailed",
    "JournalFull",
    "JournalCorrupt",
    "KernelError",
    "KeyReused",
    "KvforgeError",
    "MessageRefused",
    "ModelNotFound",
    "NotAHolder",
    "NotAllowed",
    "NotFound",
    "NotReady",
    "PrefixFound",
    "ProtocolError",
    "QueueFull",
    "QuotaExceeded",
    "RateExceeded",
    "Request",
    "RequestInfo",
    "RequestList",
    "RequestNotFound",
    "SamplingParams",
    "ScoredToken",
    "SequenceBusy",
    "SequenceNotFound",
    "SequenceRow",
    "StaleGeneration",
    "StateLost",
    "StateRemoved",
    "StorageFailed",
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

# Names are imported on first access, so that unused parts cost no start-up time. Other names are errors.
_HOMES = {
    "AsyncClient": ".client.aio",
    "AsyncRequest": ".client.aio",
    "AsyncTextRequest": ".client.aio",
    "Client": ".client.blocking",
    "Request": ".client.blocking",
    "TextRequest": ".client.blocking",
    "Completion": ".client.results",
    "Finished": ".client.results",
    "ScoredToken": ".client.results",
    "Token": ".client.results",
    "SamplingParams": ".client.sampling",
    "CachedSequence": ".client.sequences",
    "BlockColumns": ".client.tables",
    "BlockCounts": ".client.tables",
    "SequenceRow": ".client.tables",
    "Tables": ".client.tables",
    "BlockCount": ".protocol.messages",
    "BlockInfo": ".protocol.messages",
    "Explanation": ".protocol.messages",
    "Health": ".protocol.messages",
    "PrefixFound": ".protocol.messages",
    "RequestInfo": ".protocol.messages",
    "RequestList": ".protocol.messages",
    "SequenceInfo": ".protocol.messages",
    "Stats": ".protocol.messages",
    "Timings": ".protocol.messages",
}

# Deprecated names, kept for one version.
_RENAMED = {"Sampling": "SamplingParams"}


def __getattr__(name: str) -> Any:
    if name in _RENAMED:
        warning = f"kvforge.{name} is deprecated and will be removed in the next version: use {_RENAMED[name]}"
        warnings.warn(warning, DeprecationWarning, stacklevel=2)
        name = _RENAMED[name]
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = globals()[name] = getattr(import_module(_HOMES.get(name, ".protocol.errors"), __name__), name)
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
