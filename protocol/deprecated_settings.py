"""Old names of settings, which files may use for one version after a change.

A class of a configuration lists them as `DEPRECATED = {"old": "new"}`, a class variable.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from typing import Any

import msgspec

from .errors import InvalidConfiguration

Warn = Callable[[str], None]
log = logging.getLogger("configuration")


def log_warning(text: str) -> None:
    """Log a warning."""
    log.warning("%s", text)


def deprecated(cls: type[msgspec.Struct]) -> Mapping[str, str]:
    """Return the old names of the settings of a class, each with the new one."""
    found: Mapping[str, str] = getattr(cls, "DEPRECATED", {})
    return found


def renamed(values: dict[str, Any], cls: type[msgspec.Struct], section: str, warn: Warn) -> dict[str, Any]:
    """Return the values of a section with the new names of its settings.

    Args:
        values: The values as TOML gives them.
        cls: The class of the section.
        section: The path of the section, "" for the top of the file.
        warn: Called with a text for each old name.

    Raises:
        InvalidConfiguration: A setting is given with both names.
    """
    names = deprecated(cls)
    found: dict[str, Any] = {}
    for key, value in values.items():
        new = names.get(key, key)
        if new != key:
            old_path, new_path = (f"{section}.{name}".lstrip(".") for name in (key, new))
            if new in values:
                raise InvalidConfiguration(
                    old_path, f"is the old name of {new_path}, which is given too; keep that one"
                )
            warn(f"{old_path} is deprecated and will be removed in the next version: use {new_path}")
        found[new] = value
    return found
