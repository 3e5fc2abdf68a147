"""Triton's interpreter, patched for these tests to run with the installed numpy, and in less time.

Triton 3.6's interpreter replaces the functions of `triton.language` by numpy versions. It does so for each launch of a
kernel and restores them afterwards, but repeats this for every call of one @triton.jit function by another, which finds
nothing to replace and leaves the names of `triton.language.core` replaced. Here a launch replaces all functions once. A
kernel computes the same, because the replacements are the interpreter's own.

Each result of an operation is a tensor, which describes its shape anew, with the type of that description. Here tensors
of one shape share it, and the type of a tuple is made where it is read.
"""

from __future__ import annotations

import math
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

    _share_shapes()
    interpreter._patch_lang_tensor = patch_tensor_for_numpy
    interpreter._patch_lang = patch_once
    interpreter._get_np_dtype = lambda kind: of_pointers if kind.scalar.is_ptr() else of_numbers(kind.scalar)


def _share_shapes() -> None:
    core: Any = language.core
    described: dict[tuple[int, ...], tuple[Any, Any]] = {}
    blocks: dict[tuple[int, ...], tuple[Any, int]] = {}
    other_attribute = core.tuple.__getattr__

    def make_tensor(self: Any, handle: object, type: Any) -> None:  # noqa: A002 - Triton's name
        sizes = (*type.shape,) if type.is_block() else ()
        if sizes not in described:
            numbers = [core.constexpr(size) for size in sizes]
            described[sizes] = core.constexpr(math.prod(sizes)), core.tuple(numbers)
        self.handle, self.type, self.dtype = handle, type, type.scalar
        self.numel, self.shape = described[sizes]

    def make_tuple(self: Any, args: Any, type: Any = None) -> None:  # noqa: A002
        self.values = [*args]
        if type is not None:
            self.type = type if isinstance(type, core.tuple_type) else core.tuple_type(type)

    def make_block(self: Any, element_ty: Any, shape: Any) -> None:
        sizes = tuple(size.value if isinstance(size, core.constexpr) else size for size in shape)
        if sizes not in blocks:
            if not sizes:
                raise TypeError("0d block_type is forbidden")
            blocks[sizes] = core.tuple(sizes), core.validate_block_shape(sizes)
        self.element_ty = element_ty
        self.shape, self.numel = blocks[sizes]

    def attribute(self: Any, name: str) -> Any:
        if name != "type":
            return other_attribute(self, name)
        self.type = core._type_for_tuple_values(self.values)
        return self.type

    core.block_type.__init__ = make_block
    core.block_type.name = property(lambda self: f"<{self.shape}, {self.element_ty}>")
    core.tensor.__init__, core.tuple.__init__, core.tuple.__getattr__ = make_tensor, make_tuple, attribute
