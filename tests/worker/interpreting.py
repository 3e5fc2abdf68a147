"""Triton's interpreter, patched for these tests to run with the installed numpy, and in less time.

Triton 3.6's interpreter replaces the functions of `triton.language` by numpy versions. It does so for each launch of a
kernel and restores them afterwards, but repeats this for every call of one @triton.jit function by another, which finds
nothing to replace and leaves the names of `triton.language.core` replaced. Here a launch replaces all functions once,
by the replacements that the first launch made. A kernel computes the same, because they are the interpreter's own.

Besides:

- A sum of integers is not computed again in 64 bits, for an assertion that only `options.debug` evaluates.
- Results are tensors, which describe their shapes, with the type of that description. Tensors of one shape share it,
  and the type of a tuple is made where it is read.
- Equal types of blocks are one object, so that comparing them is quick.
- Operands of one type stay as they are: Triton's rules would convert and broadcast them to themselves. How others are
  broadcast follows from their types, and is found once.
- Addresses are computed in one array, and a number is repeated without numpy's checks.
- Operations with operands of known types repeat what the first ones called: interpreting_traces.py.
"""

from __future__ import annotations

import math
from dataclasses import replace
from functools import cache, partial
from types import SimpleNamespace
from typing import Any

import numpy as np
import triton
from triton import language
from triton.language import int8, pointer_type
from triton.language.semantic import TritonSemantic
from triton.runtime import interpreter

from tests.worker import interpreting_traces


def prepare() -> None:
    """Patch the interpreter of this process. Call once, before a kernel runs."""
    patch_tensor = interpreter._patch_lang_tensor
    of_pointers, of_numbers = interpreter._get_np_dtype(pointer_type(int8)), cache(interpreter._get_np_dtype)

    def patch_tensor_for_numpy(tensor: Any, scope: Any) -> None:
        patch_tensor(tensor, scope)
        # Scalars are kept in arrays of shape [1], and numpy 2.4 no longer makes an int of those.
        scope.set_attr(tensor, "__index__", lambda self: int(self.handle.data.item()))

    if not triton.__version__.startswith("3.6."):
        _unwrap_products()
    options = interpreter.interpreter_builder.options
    if not getattr(options, "debug", False):
        interpreter.interpreter_builder.options = replace(options, sanitize_overflow=False)
    _share_types()
    _share_shapes()
    _keep_equal_operands()
    _make_few_arrays()
    interpreter._patch_lang_tensor = patch_tensor_for_numpy
    interpreter._patch_lang = _Replacements().replaced
    _make_handles_quickly()
    interpreting_traces.quicken()
    interpreter._get_np_dtype = lambda kind: of_pointers if kind.scalar.is_ptr() else of_numbers(kind.scalar)


def _unwrap_products() -> None:
    """Let constant x tensor be a tensor: Triton 3.7's interpreter makes a constant of it, which no function takes."""
    core: Any = language.core

    def unwrapped(operation: Any) -> Any:
        def apply(self: Any, other: Any) -> Any:
            found = operation(self, other)
            value = getattr(found, "value", None)
            return value if isinstance(found, core.constexpr) and isinstance(value, core.tensor) else found

        return apply

    for name in ("__add__", "__sub__", "__mul__", "__truediv__"):
        setattr(core.constexpr, name, unwrapped(getattr(core.constexpr, name)))


class _Replacements:
    """Replaces the functions of `triton.language` while a kernel runs: also the scope that restores them."""

    def __init__(self) -> None:
        self._patch = interpreter._patch_lang
        self._everything = SimpleNamespace(__globals__={"tl": language, "core": language.core})
        self._changes: list[tuple[Any, str, Any, Any]] = []  # object, name, before, replacement
        self._is_running = False

    def replaced(self, _function: object) -> Any:
        """Replace all, and return the scope to restore. A function that a kernel calls has nothing to replace."""
        if self._is_running:
            return interpreter._LangPatchScope()
        if self._changes:
            for part, name, _, replacement in self._changes:
                setattr(part, name, replacement)
        else:
            made = self._patch(self._everything)._changes
            self._changes = [(part, name, before, getattr(part, name)) for part, name, before in made]
        self._is_running = True
        return self

    def restore(self) -> None:
        """Undo the replacements of a launch."""
        for part, name, before, _ in reversed(self._changes):
            if before is interpreter._MISSING:
                delattr(part, name)
            else:
                setattr(part, name, before)
        self._is_running = False


def _share_types() -> None:
    """Make equal types of blocks one object, and comparisons of an object with itself quick."""
    core: Any = language.core
    types: dict[tuple[Any, ...], Any] = {}
    unwrap, equal, pointers_equal, blocks_equal = (
        core._unwrap_if_constexpr,
        core.dtype.__eq__,
        core.pointer_type.__eq__,
        core.block_type.__eq__,
    )
    plain = frozenset((int, float, bool, str, type(None), core.tensor, core.dtype, core.block_type, core.pointer_type))
    integers = frozenset(core.dtype.SINT_TYPES + core.dtype.UINT_TYPES)

    def make_block(cls: type[Any], element_ty: Any, shape: Any) -> Any:
        sizes = tuple(size.value if isinstance(size, core.constexpr) else size for size in shape)
        key = cls, element_ty.name, getattr(element_ty, "address_space", None), sizes
        made = types.get(key)
        if made is None:
            if not sizes:
                raise TypeError("0d block_type is forbidden")
            made = types[key] = object.__new__(cls)
            made.element_ty = element_ty
            made.shape, made.numel = core.tuple(sizes), core.validate_block_shape(sizes)
        return made

    core._unwrap_if_constexpr = lambda found: found if type(found) in plain else unwrap(found)
    core.block_type.__new__ = staticmethod(make_block)
    core.block_type.__init__ = lambda self, element_ty, shape: None
    core.block_type.name = property(lambda self: f"<{self.shape}, {self.element_ty}>")
    core.block_type.__eq__ = lambda self, other: self is other or blocks_equal(self, other)
    core.dtype.__eq__ = lambda self, other: self is other or equal(self, other)
    core.pointer_type.__eq__ = lambda self, other: self is other or pointers_equal(self, other)
    core.dtype.is_int = lambda self: self.name in integers


def _share_shapes() -> None:
    core: Any = language.core
    described: dict[tuple[int, ...], tuple[Any, Any]] = {}
    other_attribute = core.tuple.__getattr__

    def describe(type: Any) -> tuple[Any, Any, Any]:  # noqa: A002 - Triton's name
        sizes = (*type.shape.values,) if type.is_block() else ()
        if sizes not in described:
            numbers = [core.constexpr(size) for size in sizes]
            described[sizes] = core.constexpr(math.prod(sizes)), core.tuple(numbers)
        type.described_once = type.scalar, *described[sizes]
        return type.described_once  # type: ignore[no-any-return]

    def make_tensor(self: Any, handle: object, type: Any) -> None:  # noqa: A002
        self.handle, self.type = handle, type
        self.dtype, self.numel, self.shape = vars(type).get("described_once") or describe(type)

    def make_tuple(self: Any, args: Any, type: Any = None) -> None:  # noqa: A002
        self.values = [*args]
        if type is not None:
            self.type = type if isinstance(type, core.tuple_type) else core.tuple_type(type)

    def attribute(self: Any, name: str) -> Any:
        if name != "type":
            return other_attribute(self, name)
        self.type = core._type_for_tuple_values(self.values)
        return self.type

    core.tensor.__init__, core.tuple.__init__, core.tuple.__getattr__ = make_tensor, make_tuple, attribute


def _make_handles_quickly() -> None:
    """Check the size of an array's numbers without a search for the size of its type."""
    handle: Any = interpreter.TensorHandle
    check = handle.__post_init__
    sizes: dict[int, tuple[Any, int]] = {}  # by the identity of a type, which is kept

    def make_handle(self: Any, data: Any, dtype: Any, attr: Any = None) -> None:
        self.data, self.dtype, self.attr = data, dtype, {} if attr is None else attr
        known = sizes.get(id(dtype))
        if known is None:
            check(self)
            if not dtype.is_ptr():
                sizes[id(dtype)] = dtype, max(dtype.primitive_bitwidth // 8, 1)
        elif data.itemsize > known[1]:
            check(self)

    handle.__init__ = make_handle


def _make_few_arrays() -> None:
    """Add offsets to addresses in one new array, not in three; repeat numbers and add axes without numpy's checks."""
    handle: Any = interpreter.TensorHandle
    sizes: dict[int, tuple[Any, int]] = {}  # of the numbers behind addresses, by the identity of their kept type

    def add(_builder: Any, ptr: Any, offset: Any) -> Any:
        known = sizes.get(id(ptr.dtype))
        if known is None:
            known = sizes[id(ptr.dtype)] = ptr.dtype, max(1, ptr.get_element_ty().primitive_bitwidth // 8)
        addresses = offset.data.astype(np.uint64)  # a negative offset wraps around, and the sum back
        if addresses.shape != ptr.data.shape:
            return handle(ptr.data + known[1] * addresses, ptr.dtype)
        if known[1] > 1:
            addresses *= known[1]
        addresses += ptr.data
        return handle(addresses, ptr.dtype)

    def repeat(_builder: Any, ret_ty: Any, arg: Any) -> Any:
        numbers = np.empty(ret_ty.shape, interpreter._get_np_dtype(arg.dtype))
        numbers.fill(arg.data.item())
        return handle(numbers, arg.dtype.scalar)

    def expand(_builder: Any, arg: Any, axis: int) -> Any:
        sizes = arg.data.shape
        return handle(arg.data.reshape((*sizes[:axis], 1, *sizes[axis:])), arg.dtype.scalar)

    def broadcast(_builder: Any, arg: Any, shape: Any) -> Any:
        numbers = np.empty(shape, arg.data.dtype)
        numbers[...] = arg.data
        return handle(numbers, arg.dtype.scalar)

    interpreter.InterpreterBuilder.create_addptr = add
    interpreter.InterpreterBuilder.create_broadcast = broadcast
    interpreter.InterpreterBuilder.create_expand_dims = expand
    interpreter.InterpreterBuilder.create_splat = repeat


def _keep_equal_operands() -> None:
    """Leave operands of one type as they are, and find once how operands of two types are broadcast."""
    tensor: Any = language.core.tensor
    check, broadcast = TritonSemantic.binary_op_type_checking_impl, TritonSemantic.broadcast_impl_value
    known: dict[tuple[int, int], tuple[Any, Any]] = {}

    def checked(self: Any, lhs: Any, rhs: Any, *allowed: Any, **more: Any) -> Any:
        # A division, for which Triton converts 16 bits to 32, passes more than the two permissions for pointers.
        is_plain = type(lhs) is tensor and type(rhs) is tensor and len(allowed) < 3 and not more
        if is_plain and lhs.dtype is rhs.dtype and not lhs.dtype.is_ptr():
            return broadcasted(self, lhs, rhs)
        return check(self, lhs, rhs, *allowed, **more)

    def broadcasted(self: Any, lhs: Any, rhs: Any) -> Any:
        if lhs.type is rhs.type:
            return lhs, rhs
        if not (lhs.type.is_block() and rhs.type.is_block() and len(lhs.shape) == len(rhs.shape)):
            return broadcast(self, lhs, rhs)
        key = id(lhs.type), id(rhs.type)  # types of blocks are never deleted
        if key not in known:
            one, other = broadcast(self, lhs, rhs)
            known[key] = one.type, other.type
            return one, other
        return tuple(map(partial(widened, self), (lhs, rhs), known[key]))

    def widened(self: Any, found: Any, wanted: Any) -> Any:
        if found.type is wanted:
            return found
        return tensor(self.builder.create_broadcast(found.handle, wanted.shape.values), wanted)

    TritonSemantic.binary_op_type_checking_impl = checked
    TritonSemantic.broadcast_impl_value = broadcasted
