"""Finds a trace: a shipped sample by its name, or a file by its path, with the format detected from its first line."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from importlib import resources
from pathlib import Path

from kvforge.protocol.errors import InvalidRequest

from .files import SAMPLES, lines
from .recorded import AZURE_HEADER
from .servegen import RATES_HEADER

AZURE, MOONCAKE, CLAUDE_CODE, SERVEGEN = "azure", "mooncake", "claude-code", "servegen"
FORMATS = (AZURE, MOONCAKE, CLAUDE_CODE, SERVEGEN)
_CONVERSATION = "azure_llm_2023_conv.csv.gz"
_MOONCAKE = "mooncake_fast25_conversation.jsonl.gz"
NAMES = {
    "conversation": (AZURE, _CONVERSATION),
    "azure-conversation": (AZURE, _CONVERSATION),
    "azure-code": (AZURE, "azure_llm_2023_code.csv.gz"),
    "mooncake": (MOONCAKE, _MOONCAKE),
    "mooncake-conversation": (MOONCAKE, _MOONCAKE),
    "mooncake-synthetic": (MOONCAKE, "mooncake_fast25_synthetic.jsonl.gz"),
    "claude-code": (CLAUDE_CODE, "weka_claude_code_sessions.jsonl.gz"),
    "servegen-deepseek-r1": (SERVEGEN, "servegen_deepseek-r1_rates.csv.gz"),
    "servegen-m-small": (SERVEGEN, "servegen_m-small_rates.csv.gz"),
    "servegen-mm-image": (SERVEGEN, "servegen_mm-image_rates.csv.gz"),
}


@dataclass(frozen=True)
class Trace:
    """A file and its format."""

    format: str
    path: Path

    @property
    def file(self) -> str:
        """The name of the file, for errors."""
        return self.path.name

    def lines(self) -> Iterator[tuple[int, str]]:
        """Return its numbered lines."""
        return lines(self.path)

    def lengths(self) -> Path | None:
        """Return ServeGen's file of lengths (`..._lengths.jsonl` beside `..._rates.csv`); None if missing."""
        stem, found, packed = self.file.partition("_rates.csv")
        if not found:
            return None
        names = (f"{stem}_lengths.jsonl{end}" for end in (packed, ".gz", ""))
        return next((path for name in names if (path := self.path.with_name(name)).is_file()), None)


@contextmanager
def find(text: str) -> Iterator[Trace]:
    """Find one of NAMES, a path, or FORMAT:PATH with one of FORMATS.

    Raises:
        InvalidRequest: There is no such trace.
    """
    if text in NAMES:
        form, file = NAMES[text]
        with resources.as_file(resources.files(__package__) / SAMPLES) as folder:
            yield Trace(form, folder / file)
        return
    form, colon, rest = text.partition(":")
    path = Path(rest if colon and form in FORMATS else text).expanduser()
    if not path.is_file():
        raise InvalidRequest("trace", f"{text!r} is neither a file nor one of {', '.join(NAMES)}")
    yield Trace(form if colon and form in FORMATS else _format(path), path)


def _format(path: Path) -> str:
    first = next((line for _, line in lines(path)), "").strip()
    if first.startswith(AZURE_HEADER):
        return AZURE
    if first.startswith(RATES_HEADER):
        return SERVEGEN
    if first.startswith("{") and '"requests"' in first:
        return CLAUDE_CODE
    if first.startswith("{") and '"hash_ids"' in first:
        return MOONCAKE
    raise InvalidRequest(
        "trace", f"{path.name} has none of the formats {', '.join(FORMATS)}; use FORMAT:PATH to force one"
    )
