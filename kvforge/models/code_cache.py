"""Cache folders with files that are run as code: compiled kernels, and files that Numba and torch unpickle.

A folder that another user can write to would run that user's code. Such a folder is never read: the user's own cache
folder is used instead, and a warning names the reason.
"""

from __future__ import annotations

import logging
from functools import lru_cache
from pathlib import Path

from kvforge.protocol.errors import InvalidConfiguration
from kvforge.protocol.trust import check_private

from .store import default_cache_dir, user_cache_dir

FIELD = "KVFORGE_CACHE_DIR"
log = logging.getLogger("worker")


def code_folder(name: str) -> Path | None:
    """Return a folder of the cache that only this user and root can write to, and create it if it is missing.

    Args:
        name: The folder within the cache, such as "numba".

    Returns:
        Its path without symbolic links; None if neither KVFORGE_CACHE_DIR nor the user's own cache is private.

    Raises:
        OSError: The folder cannot be created or examined.
        Unavailable: There is no KVFORGE_CACHE_DIR, and this user has no home folder.
    """
    base = default_cache_dir()
    if (folder := _private(base, name)) is not None:
        return folder
    own = user_cache_dir()
    return _private(own, name) if own != base else None


@lru_cache(maxsize=16)
def _private(base: Path, name: str) -> Path | None:
    folder = base / name
    base.mkdir(mode=0o700, parents=True, exist_ok=True)
    if not folder.is_symlink():
        folder.mkdir(mode=0o700, exist_ok=True)
    try:
        return check_private(folder, FIELD, base)
    except InvalidConfiguration as error:
        log.warning("not using the compiled code in %s: %s", folder, error)
        return None
