"""Progress bars of transformers and gguf as fractions."""

from __future__ import annotations

import contextlib
import inspect
from collections.abc import Callable, Iterator
from typing import Any, Self

from transformers.utils import logging as transformers_logging

Progress = Callable[[str, float], None]


class ProgressBars:
    """Stands in for tqdm.

    Attributes:
        current: The GGUF tensor being converted; "" if there is none.
        measure: Returns the phase in words and the fraction that is done, if something knows them better than the bar.
    """

    def __init__(self, progress: Progress, passes: int = 1) -> None:
        """passes: bars that follow each other, each for an equal share."""
        self.current = ""
        self.measure: Callable[[], tuple[str, float]] | None = None
        self._progress, self._passes = progress, passes
        self._begun = 0

    def make(self, arguments: tuple[Any, ...], keywords: dict[str, Any]) -> _Bar:
        """Return a bar in place of the next progress bar."""
        self.current = ""
        if (measure := self.measure) is not None:
            return _Bar(self, lambda _phase, _done: self._progress(*measure()), *arguments, **keywords)
        share = 1 / self._passes
        base = min(share * self._begun, 1 - share)
        self._begun += 1
        return _Bar(self, lambda phase, done: self._progress(phase, base + share * done), *arguments, **keywords)


class _Bar:
    """Stands in for a tqdm bar: reports its progress instead of drawing it."""

    def __init__(
        self, bars: ProgressBars, progress: Progress, iterable: Any = None, *, total: int | None = None, **_: Any
    ) -> None:
        self._bars = bars
        self._progress = progress
        self._iterable = iterable
        self._total = total if total is not None else (len(iterable) if hasattr(iterable, "__len__") else 0)
        self._done = 0
        self._reported = -1

    def __iter__(self) -> Iterator[Any]:
        for item in self._iterable:
            self._bars.current = getattr(item, "name", "")
            yield item
            self.update(1)
        self._bars.current = ""

    def update(self, count: int = 1) -> None:
        self._done += count
        twentieth = 20 * self._done // max(self._total, 1)
        if twentieth != self._reported and self._total > 0:
            self._reported = twentieth
            self._progress("loading weights", min(self._done / self._total, 1.0))

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        pass

    def __getattr__(self, _: str) -> Callable[..., None]:
        return lambda *_args, **_keywords: None  # close, set_description and so on draw nothing


@contextlib.contextmanager
def bars_to(progress: Progress, passes: int = 1) -> Iterator[ProgressBars]:
    """Redirect the progress bars that transformers draws on stderr to `progress`. passes: see ProgressBars."""
    bars = ProgressBars(progress, passes)
    gguf = _gguf_module()
    drawn = getattr(gguf, "tqdm", None)
    previous = transformers_logging.set_tqdm_hook(lambda _factory, arguments, keywords: bars.make(arguments, keywords))
    try:
        if drawn is not None:
            gguf.tqdm = lambda *arguments, **keywords: bars.make(arguments, keywords)
        yield bars
    finally:
        transformers_logging.set_tqdm_hook(previous)
        if drawn is not None:
            gguf.tqdm = drawn


def _gguf_module() -> Any:
    from transformers import modeling_gguf_pytorch_utils

    return inspect.getmodule(modeling_gguf_pytorch_utils.load_gguf_checkpoint)
