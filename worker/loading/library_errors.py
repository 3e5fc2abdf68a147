"""Foreign code at load: converts any error of transformers, safetensors, gguf, accelerate or torch to UnsupportedModel.

A folder can make a library raise anything, including `SystemExit` and `RecursionError`. No such error may end the
worker with a status that requests a restart: the files would be the same.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

from kvforge.protocol.errors import KvforgeError, UnsupportedModel

SENTENCE_LENGTH_MAX = 800
# str() of these is a bare value, such as 'rope_theta' or 3.
BARE = (KeyError, IndexError, AttributeError, AssertionError, StopIteration, SystemExit, MemoryError, RecursionError)


def sentence(error: BaseException) -> str:
    """Return an error's text on one line, preceded by its class if the text alone is unclear."""
    text = " ".join(str(error).split())
    if not text:
        return type(error).__name__
    if isinstance(error, BARE) or " " not in text or text.endswith(":"):
        text = f"{type(error).__name__}: {text}"
    return text if len(text) <= SENTENCE_LENGTH_MAX else f"{text[: SENTENCE_LENGTH_MAX - 4]} ..."


@contextlib.contextmanager
def refusing(model: str, doing: str) -> Iterator[None]:
    """Convert foreign exceptions inside to UnsupportedModel.

    Args:
        model: The name for errors.
        doing: The operation that fails, as a clause: "transformers cannot read its configuration".

    Raises:
        UnsupportedModel: Foreign code raised. Errors of kvforge and KeyboardInterrupt pass through.
    """
    try:
        yield
    except (KvforgeError, KeyboardInterrupt, GeneratorExit):
        raise
    except BaseException as error:  # includes SystemExit
        raise UnsupportedModel(model, f"{doing}: {sentence(error)}") from error
