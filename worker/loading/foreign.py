"""Foreign code at load: whatever transformers, safetensors, gguf, accelerate or torch raises becomes a refusal.

A folder can make any library raise anything, `SystemExit` and `RecursionError` included. No error may end the worker
with a status that asks for another start: the files would be the same.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

from kvforge.protocol.errors import KvforgeError, UnsupportedModel

SENTENCE_LENGTH_MAX = 800
# str() of these is a bare value: 'rope_theta', 3.
BARE = (KeyError, IndexError, AttributeError, AssertionError, StopIteration, SystemExit, MemoryError, RecursionError)


def sentence(error: BaseException) -> str:
    """All that an error reports, on one line. The name of its class precedes a text that is bare without it."""
    text = " ".join(str(error).split())
    if not text:
        return type(error).__name__
    if isinstance(error, BARE) or " " not in text or text.endswith(":"):
        text = f"{type(error).__name__}: {text}"
    return text if len(text) <= SENTENCE_LENGTH_MAX else f"{text[: SENTENCE_LENGTH_MAX - 4]} ..."


@contextlib.contextmanager
def refusing(model: str, doing: str) -> Iterator[None]:
    """Turn anything foreign that is raised inside into UnsupportedModel.

    Args:
        model: The name in the refusal.
        doing: The operation that fails, as a clause: "transformers cannot read its configuration".

    Raises:
        UnsupportedModel: Foreign code raised. Errors of kvforge and KeyboardInterrupt pass through.
    """
    try:
        yield
    except (KvforgeError, KeyboardInterrupt, GeneratorExit):
        raise
    except BaseException as error:  # SystemExit too
        raise UnsupportedModel(model, f"{doing}: {sentence(error)}") from error
