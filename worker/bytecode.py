"""Keeps the bytecode of imports in the user's cache folder where Python can keep none beside the sources.

If packages were installed without bytecode, on a read-only file system or with PYTHONDONTWRITEBYTECODE, Python compiles
the 3,000 files of torch and transformers at each start.
"""

from __future__ import annotations

import os
import sys
from importlib.util import cache_from_source, find_spec
from pathlib import Path

from kvforge.models.store import default_cache_dir

PACKAGES = ("torch", "transformers")


def keep_bytecode(folder: Path | None = None) -> bool:
    """Let this process read and write bytecode in a folder of its own if torch or transformers could get none.

    Args:
        folder: The folder, by default `bytecode` in the user's cache folder.

    Returns:
        Whether it does so.
    """
    if sys.pycache_prefix is not None:
        return False  # chosen by the user
    if not any(map(_lacks_bytecode, PACKAGES)):
        return False
    sys.pycache_prefix = str(default_cache_dir() / "bytecode" if folder is None else folder)
    sys.dont_write_bytecode = False
    return True


def _lacks_bytecode(package: str) -> bool:
    """Return whether a package has no bytecode, and Python would write none."""
    spec = find_spec(package)
    if spec is None or spec.origin is None or not spec.origin.endswith(".py"):
        return False
    bytecode = Path(cache_from_source(spec.origin))
    return not bytecode.exists() and (sys.dont_write_bytecode or not _can_write(bytecode.parent))


def _can_write(folder: Path) -> bool:
    """Return whether files can be made in a folder that may not exist yet."""
    return os.access(folder if folder.exists() else folder.parent, os.W_OK)
