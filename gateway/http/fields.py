"""Fields of a body that no structure has: known ones are accepted or refused by name, unknown ones are ignored.

A body is decoded twice only if it has such a field. `null` stands for a missing field.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Generic, TypeVar

import msgspec
from msgspec import inspect

from kvforge.protocol.errors import InvalidRequest

from .ignored import Ignored

T = TypeVar("T")
# Parts of msgspec's messages for errors that removing fields can resolve.
MENDED = ("unknown field", "got `null`")
UNKNOWN = "unknown field: remove it, or see the API's documentation"


@dataclass(frozen=True, slots=True)
class UnimplementedField:
    """A field of a published specification that no structure has.

    Attributes:
        why: Why it has no effect, or why it is refused.
        harmless: Whether the answer with this value equals the answer without the field; None: with any value.
        accepted: The harmless values, for the documentation.
        left_out: Other values are ignored and reported, as an unknown field is, instead of refused.
        refusal: The error for other values.
    """

    why: str
    harmless: Callable[[Any], bool] | None = None
    accepted: str = "any value"
    left_out: bool = False
    refusal: type[InvalidRequest] = InvalidRequest

    def check(self, name: str, value: Any, ignored: Ignored) -> None:
        """Refuse a value that would change the answer, or note that it is ignored.

        Raises:
            InvalidRequest: Names the field.
        """
        if value is None or self.harmless is None or self.harmless(value):
            return
        problem = f"{self.why} (accepted: {self.accepted})"
        if not self.left_out:
            raise self.refusal(name, problem)
        ignored.add(name, problem)


def no_effect(why: str) -> UnimplementedField:
    """Return a field that has no effect, whatever its value."""
    return UnimplementedField(why)


def only(why: str, *values: Any) -> UnimplementedField:
    """Return a field that is refused unless it has one of these values, which match the default behaviour."""
    kept = tuple(values)
    words = ", ".join(f"`{msgspec.json.encode(value).decode()}`" for value in (None, *kept))
    return UnimplementedField(why, lambda value: any(_same(value, one) for one in kept), words)


def left_out(why: str, *values: Any) -> UnimplementedField:
    """Return a field that asks the provider for extra work: ignored and reported, unless its value asks for none."""
    return replace(only(why, *values), left_out=True)


def _same(value: Any, other: Any) -> bool:
    # In JSON `true` is not 1, though Python's True is; 0.0 is 0.
    return bool(value == other) and isinstance(value, bool) == isinstance(other, bool)


# The keys are msgspec structures, for which mypy has no type.
Table = Mapping[Any, Mapping[str, UnimplementedField]]
ReadPredicates = Mapping[Any, Callable[[Mapping[str, Any]], bool]]


@dataclass(slots=True)
class _Field:
    """A field that is read.

    Attributes:
        node: Its type.
        optional: It may be missing.
        nullable: Its type includes null.
    """

    node: _Node
    optional: bool
    nullable: bool


@dataclass(slots=True)
class _Node:
    """The named parts of a type: the fields of its objects, the items of its arrays.

    Attributes:
        fields: The fields; None if objects are not inspected.
        known: The known fields that are not read.
        read_if: Whether an object is of a kind that is read. Fields of another kind are not reported, since the whole
            object is refused or ignored by its kind.
        items: The type of the items.
    """

    fields: dict[str, _Field] | None = None
    known: Mapping[str, UnimplementedField] = field(default_factory=dict)
    read_if: Callable[[Mapping[str, Any]], bool] | None = None
    items: _Node | None = None


class Reader(Generic[T]):
    """Decoder of bodies of one type.

    Args:
        kind: A msgspec structure that forbids unknown fields, as do those within it.
        known: The known fields that are not read, by structure.
        read_if: For some structures, whether an object is of a kind that is read (see `_Node`).
    """

    def __init__(
        self,
        kind: type[T],
        known: Table | None = None,
        read_if: ReadPredicates | None = None,
    ) -> None:
        self._kind, self._known, self._read_if = kind, known or {}, read_if or {}
        self._decoder = msgspec.json.Decoder(kind)
        self._made: dict[type, _Node] = {}
        self._root = self._node(inspect.type_info(kind))

    @property
    def kind(self) -> type[T]:
        """The structure."""
        return self._kind

    @property
    def unimplemented_fields(self) -> dict[type, Mapping[str, UnimplementedField]]:
        """The known fields that are not read, by structure."""
        return {kind: node.known for kind, node in self._made.items()}

    @property
    def names(self) -> frozenset[str]:
        """The fields of a body that are read or known."""
        return frozenset({*(self._root.fields or ()), *self._root.known})

    def read(self, content: bytes, ignored: Ignored) -> T:
        """Decode a body.

        Args:
            content: The bytes of the body.
            ignored: Collects the ignored fields.

        Raises:
            InvalidRequest: Names a known field with a value that cannot be ignored, or any unknown field if `ignored`
                is strict.
            msgspec.DecodeError: The body is not JSON of this type.
            RecursionError: It is nested too deeply.
        """
        try:
            return self._decoder.decode(content)
        except msgspec.ValidationError as error:
            if not any(word in str(error) for word in MENDED):
                raise
            plain = msgspec.json.decode(content)
            self._clean(self._root, plain, "", ignored)
            return msgspec.convert(plain, self._kind)

    def _clean(self, node: _Node, value: Any, path: str, ignored: Ignored) -> None:
        """Remove from `value` what is not read."""
        if isinstance(value, list):
            if node.items is not None:
                ignored.look(len(value), path)
                for at, item in enumerate(value):
                    if isinstance(item, dict | list):
                        self._clean(node.items, item, f"{path}[{at}]", ignored)
        elif isinstance(value, dict) and node.fields is not None:
            self._clean_object(node, node.fields, value, path, ignored)

    def _clean_object(
        self, node: _Node, fields: Mapping[str, _Field], value: dict[str, Any], path: str, ignored: Ignored
    ) -> None:
        ignored.look(len(value), path)
        read_if = node.read_if is None or node.read_if(value)
        for name, given in list(value.items()):
            read = fields.get(name)
            if read is None:
                del value[name]
                if read_if:
                    self._unread(node, _joined(path, name), name, given, ignored)
            elif given is None and read.optional and not read.nullable:
                del value[name]
            elif given is not None:
                self._clean(read.node, given, _joined(path, name), ignored)

    def _unread(self, node: _Node, path: str, name: str, given: Any, ignored: Ignored) -> None:
        known = node.known.get(name)
        if known is not None:
            known.check(path, given, ignored)
        else:
            ignored.add(path, UNKNOWN)

    # ------------------------------------------------------------------------------------------------- the type's names

    def _node(self, kind: inspect.Type) -> _Node:
        if isinstance(kind, inspect.Metadata):
            return self._node(kind.type)
        if isinstance(kind, inspect.UnionType):
            return self._union(kind.types)
        if isinstance(kind, inspect.ListType | inspect.VarTupleType):
            inner = self._node(kind.item_type)
            return _Node(items=inner if inner.fields is not None or inner.items is not None else None)
        if isinstance(kind, inspect.StructType):
            return self._object(kind)
        return _Node()

    def _union(self, kinds: Iterable[inspect.Type]) -> _Node:
        nodes = [self._node(kind) for kind in kinds]
        objects = [node for node in nodes if node.fields is not None]
        arrays = [node.items for node in nodes if node.items is not None]
        assert len(objects) < 2, "an object is of one type, whatever its fields are"
        both = objects[0] if objects else _Node()
        if not arrays:
            return both
        return _Node(both.fields, both.known, both.read_if, arrays[0])

    def _object(self, kind: inspect.StructType) -> _Node:
        if kind.cls in self._made:
            return self._made[kind.cls]
        assert kind.forbid_unknown_fields, f"{kind.cls.__name__} would drop fields silently"
        node = self._made[kind.cls] = _Node(fields={}, read_if=self._read_if.get(kind.cls))
        node.known = {
            name: known for base in reversed(kind.cls.__mro__) for name, known in self._known.get(base, {}).items()
        }
        assert node.fields is not None
        for one in kind.fields:
            node.fields[one.encode_name] = _Field(self._node(one.type), not one.required, _nullable(one.type))
        return node


def _nullable(kind: inspect.Type) -> bool:
    if isinstance(kind, inspect.Metadata):
        return _nullable(kind.type)
    if isinstance(kind, inspect.UnionType):
        return any(_nullable(one) for one in kind.types)
    return isinstance(kind, inspect.NoneType | inspect.AnyType)


def _joined(path: str, name: str) -> str:
    return f"{path}.{name}" if path else name
