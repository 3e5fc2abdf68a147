"""Files of a load: the samples that the package ships, and files given by a path, plain or gzipped."""

from __future__ import annotations

import gzip
import zlib
from collections.abc import Iterator
from importlib import resources
from pathlib import Path

from kvforge.protocol.errors import InvalidRequest

SAMPLES = "samples"
LINE_BYTES_MAX = 64 << 20
_GZIP = b"\x1f\x8b"


def broken(file: str, line: int, problem: str) -> InvalidRequest:
    """Return the error for a malformed row."""
    return InvalidRequest("trace", f"{file}, line {line}: {problem}")


def sample_lines(file: str) -> Iterator[tuple[int, str]]:
    """Yield the numbered lines of a file in samples/, with their line ends."""
    with resources.as_file(resources.files(__package__) / SAMPLES / file) as path:
        yield from lines(path)


def lines(path: Path) -> Iterator[tuple[int, str]]:
    """Yield the numbered lines of a file, with their line ends.

    Raises:
        InvalidRequest: The file cannot be read; the error names it.
    """
    number = 0
    try:
        with path.open("rb") as raw:
            packed = raw.read(2) == _GZIP
        with gzip.open(path) if packed else path.open("rb") as file:
            while line := file.readline(LINE_BYTES_MAX + 1):
                number += 1
                if len(line) > LINE_BYTES_MAX:
                    raise broken(path.name, number, f"is longer than {LINE_BYTES_MAX} bytes")
                yield number, line.decode().removeprefix("\ufeff" if number == 1 else "")
    except (EOFError, gzip.BadGzipFile, zlib.error) as error:
        raise broken(path.name, number + 1, f"damaged gzip file: {error}") from None
    except UnicodeDecodeError as error:
        raise broken(path.name, number, f"is not UTF-8: {error}") from None
    except OSError as error:
        raise InvalidRequest("trace", f"{path}: {error.strerror or error}") from None
