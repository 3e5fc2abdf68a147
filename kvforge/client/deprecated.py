"""Old names of the public API, which work for one version with a warning that names the new one."""

from __future__ import annotations

import warnings
from collections.abc import Awaitable, Callable
from functools import wraps
from inspect import iscoroutinefunction
from typing import Any, ParamSpec, TypeVar, cast

P = ParamSpec("P")
R = TypeVar("R")


def renamed_keywords(**renamed: str) -> Callable[[Callable[P, R]], Callable[P, R]]:
    """Return a decorator that accepts old keywords of a function, with a DeprecationWarning.

    The function raises TypeError for a call that has both an old keyword and the new one. Type checkers know the new
    ones only.

    Args:
        renamed: The new keyword by the old one.
    """

    def decorate(function: Callable[P, R]) -> Callable[P, R]:
        @wraps(function)
        def call(*args: P.args, **kwargs: P.kwargs) -> R:
            rename(function.__name__, kwargs)
            return function(*args, **kwargs)

        @wraps(function)
        async def call_async(*args: P.args, **kwargs: P.kwargs) -> Any:
            rename(function.__name__, kwargs)
            return await cast("Awaitable[Any]", function(*args, **kwargs))

        return cast("Callable[P, R]", call_async) if iscoroutinefunction(function) else call

    def rename(name: str, given: dict[str, Any]) -> None:
        for old, new in renamed.items():
            if old in given:
                if new in given:
                    raise TypeError(f"{name}() got both {new!r} and {old!r}, its deprecated name")
                warn_renamed(f"{name}({old}=)", f"{new}=", frames=4)
                given[new] = given.pop(old)

    return decorate


def warn_renamed(old: str, new: str, frames: int = 3) -> None:
    """Warn of an old name.

    Args:
        old: The old name.
        new: The new one.
        frames: As `stacklevel` of `warnings.warn`. 3: the warning points at the caller of the function that calls this.
    """
    warning = f"{old} is deprecated and will be removed in the next version: use {new}"
    warnings.warn(warning, DeprecationWarning, stacklevel=frames)
