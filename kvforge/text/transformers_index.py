"""A faster import of transformers, which builds the index of its 1,700 files of models.

The index lists the public names of each file. transformers 5 builds it twice, because its own cache of folders is
smaller than the number of folders, and looks for `__all__` line by line: 0.45 s of processor time in each process that
loads a model or a tokenizer. Here each folder is read once, and the search begins at the last `__all__`.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import cache
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec, PathFinder
from types import ModuleType
from typing import Any

from kvforge.process.collector import collector_paused

INDEXER = "transformers.utils.import_utils"


@contextmanager
def quick_import() -> Iterator[None]:
    """Make an import of transformers inside the block faster. Another version's index is built its own way."""
    finder = _Finder()
    sys.meta_path.insert(0, finder)
    try:
        with collector_paused():
            yield
    finally:
        sys.meta_path.remove(finder)


def speed_up(module: ModuleType) -> None:
    """Replace the slow parts of transformers' module `import_utils`, where they are as expected."""
    folders, names = (getattr(module, name, None) for name in ("create_import_structure_from_path", "fetch__all__"))
    if (plain := getattr(folders, "__wrapped__", None)) is not None:
        vars(module)["create_import_structure_from_path"] = cache(plain)
    if names is not None:
        vars(module)["fetch__all__"] = _from_the_last(names)


def _from_the_last(names: Callable[[str], list[str]]) -> Callable[[str], list[str]]:
    def fetch__all__(content: str) -> list[str]:
        return names(content[max(0, content.rfind("\n__all__") + 1) :])

    return fetch__all__


class _Finder(MetaPathFinder):
    """Finds one module, as the import system would, and changes it once it has run."""

    def find_spec(self, name: str, path: Sequence[str] | None, target: ModuleType | None = None) -> ModuleSpec | None:
        if name != INDEXER or (spec := PathFinder.find_spec(name, path, target)) is None or spec.loader is None:
            return None
        spec.loader = _Loader(spec.loader)
        return spec


class _Loader(Loader):
    def __init__(self, loader: Loader) -> None:
        self._loader = loader

    def __getattr__(self, name: str) -> Any:
        return getattr(self._loader, name)

    def create_module(self, spec: ModuleSpec) -> ModuleType | None:
        return self._loader.create_module(spec)

    def exec_module(self, module: ModuleType) -> None:
        self._loader.exec_module(module)
        speed_up(module)
