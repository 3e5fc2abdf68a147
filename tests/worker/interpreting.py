"""Triton's interpreter, patched for these tests to run with the installed numpy and to replace functions only once.

Triton 3.6's interpreter replaces the functions of `triton.language` by numpy versions. It does so for each launch of a
kernel and restores them afterwards, but repeats this for every call of one @triton.jit function by another, which finds
nothing to replace and leaves the names of `triton.language.core` replaced. Here a launch replaces all functions once. A
kernel computes the same, because the replacements are the interpreter's own.
"""

from __future__ import annotations

from functools import cache
from types import SimpleNamespace
from typing import Any

from triton import language
from triton.language import int8, pointer_type
from triton.runtime import interpreter


def prepare() -> None:
    """Patch the interpreter of this process. Call once, before a kernel runs."""
    patch_tensor, patch_language = interpreter._patch_lang_tensor, interpreter._patch_lang
    of_pointers, of_numbers = interpreter._get_np_dtype(pointer_type(int8)), cache(interpreter._get_np_dtype)
    everything = SimpleNamespace(__globals__={"tl": language, "core": language.core})
    launched: list[Any] = []

    def patch_tensor_for_numpy(tensor: Any, scope: Any) -> None:
        patch_tensor(tensor, scope)
        # Scalars are kept in arrays of shape [1], and numpy 2.4 no longer makes an int of those.
        scope.set_attr(tensor, "__index__", lambda self: int(self.handle.data.item()))

    def patch_once(_function: object) -> Any:
        if launched:
            return interpreter._LangPatchScope()  # nothing to restore
        scope = patch_language(everything)
        undo = scope.restore

        def restore() -> None:
            undo()
            launched.clear()

        scope.restore = restore
        launched.append(scope)
        return scope

    interpreter._patch_lang_tensor = patch_tensor_for_numpy
    interpreter._patch_lang = patch_once
    interpreter._get_np_dtype = lambda kind: of_pointers if kind.scalar.is_ptr() else of_numbers(kind.scalar)
