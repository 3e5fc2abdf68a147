"""Operations of Triton's interpreter that are found once for operands of the same types.

For each `x + 1` of a kernel the interpreter unwraps constants, makes a tensor of the 1, compares types, converts,
broadcasts, and then calls one function of numpy. All but the last follows from the types of the tensors and the values
of the constants. The second call with such operands records which functions of the interpreter's builder were called
with which arrays. Later calls repeat these functions alone, those of constants not at all. A kernel computes the same
numbers, because the same functions of numpy get the same operands; errors come from the first call.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from triton import language
from triton.runtime import interpreter

core: Any = language.core
# Operations whose functions follow from the types of their operands.
OF_TENSORS = frozenset(
    f"__{prefix}{name}__"
    for name in ("add", "sub", "mul", "truediv", "floordiv", "mod", "and", "or", "xor", "lshift", "rshift")
    for prefix in ("", "r")
) | {"__gt__", "__ge__", "__lt__", "__le__", "__eq__", "__ne__", "__neg__", "__invert__", "__getitem__", "to"}
FUNCTIONS = frozenset(
    (
        "abs",
        "add",
        "arange",
        "broadcast_to",
        "cast",
        "ceil",
        "cos",
        "dot",
        "erf",
        "exp",
        "exp2",
        "expand_dims",
        "floor",
        "fma",
        "full",
        "load",
        "log",
        "log2",
        "maximum",
        "minimum",
        "mul",
        "permute",
        "reshape",
        "rsqrt",
        "sin",
        "sqrt",
        "store",
        "sub",
        "trans",
        "view",
        "where",
    )
)
KNOWN_MAX = 50_000
# These read or change memory, also where no operand is a tensor.
MEMORY = ("create_load", "create_masked_load", "create_store", "create_masked_store")
Replay = Callable[[list[Any]], Any]
installed: list[Traces] = []


class Unknown(Exception):
    """The operation is not repeated: an operand or a result is of another kind."""


class Traces:
    """The operations that are known, and the recording of others."""

    def __init__(self, builder: Any) -> None:
        self.enabled = True
        self.repeated = 0  # operations that were
        self._builder = builder
        self._known: dict[Any, Replay | None] = {}
        self._seen: set[Any] = set()
        self._is_recording = False
        self._steps: list[tuple[str, tuple[Any, ...], dict[str, Any], Any]] = []
        self._recorders = {
            name: self._recorder(name, getattr(builder, name))
            for name in dir(builder)
            if name.startswith(("create_", "get_")) and callable(getattr(builder, name))
        }

    def traced(self, name: str, plain: Callable[..., Any]) -> Callable[..., Any]:
        """Return `plain`, a function of the language, in less time for operands of known types."""
        known, seen, tensor = self._known, self._seen, core.tensor

        def run(*given: Any, **named: Any) -> Any:
            if self._is_recording or not self.enabled:
                return plain(*given, **named)
            handles: list[Any] = []
            parts: list[Any] = [name]
            try:
                for each in given:  # `_key`, without a call for the most common kind
                    if type(each) is tensor and (not handles or _is_new(each.handle, handles)):
                        handles.append(each.handle)
                        kind = each.type
                        parts.append(vars(kind).get("key_of_traces") or _type_key(kind))
                    else:
                        parts.append(_key(each, handles))
                key = tuple(parts)
                if named:
                    named.pop("_semantic", None)
                    key = key, *[(one, _key(value, handles)) for one, value in named.items()]
            except Unknown:
                return plain(*given, **named)
            if key in known:
                replay = known[key]
                if replay is None:
                    return plain(*given, **named)
                self.repeated += 1
                return replay(handles)
            if key not in seen:  # a loop's number may never come again
                if len(seen) < KNOWN_MAX:
                    seen.add(key)
                return plain(*given, **named)
            with self._recording():
                result = plain(*given, **named)
            known[key] = self._replay(handles, result)
            return result

        return run

    @contextmanager
    def _recording(self) -> Iterator[None]:
        self._is_recording = True
        self._steps = []
        vars(self._builder).update(self._recorders)
        try:
            yield
        finally:
            for name in self._recorders:
                del vars(self._builder)[name]
            self._is_recording = False

    def _recorder(self, name: str, function: Callable[..., Any]) -> Callable[..., Any]:
        inside = [False]

        def record(*given: Any, **named: Any) -> Any:
            if inside[0]:
                return function(*given, **named)
            inside[0] = True
            try:
                result = function(*given, **named)
            finally:
                inside[0] = False
            self._steps.append((name, given, named, result))
            return result

        return record

    def _replay(self, handles: list[Any], result: Any) -> Replay | None:
        """Return what repeats the recorded steps on other handles; None if something is of no known kind."""
        if type(result) is not core.tensor:
            return None
        places = {id(handle): place for place, handle in enumerate(handles)}
        constants: set[int] = set()
        steps: list[tuple[Callable[..., Any], list[int], list[Any]]] = []
        count = len(handles)
        for name, given, named, found in self._steps:
            if any(isinstance(each, interpreter.TensorHandle) for each in named.values()):
                return None
            wanted: list[int] = []
            for each in given:
                if not isinstance(each, interpreter.TensorHandle) or id(each) in constants:
                    wanted.append(-1)
                elif id(each) in places:
                    wanted.append(places[id(each)])
                else:
                    return None
            if max(wanted, default=-1) < 0 and name not in MEMORY:  # computed from constants
                constants.add(id(found))
                continue
            function = getattr(self._builder, name)
            if named:
                return None
            steps.append((function, wanted, list(given)))
            places[id(found)] = count
            count += 1
        return _repeated(steps, len(handles), result, places, constants)


def _repeated(
    steps: list[tuple[Callable[..., Any], list[int], list[Any]]],
    inputs: int,
    result: Any,
    places: dict[int, int],
    constants: set[int],
) -> Replay | None:
    kind, handle, tensor = result.type, result.handle, core.tensor
    if id(handle) in constants:
        if steps:
            return None
        data, dtype = handle.data, handle.dtype
        return lambda _: tensor(interpreter.TensorHandle(data, dtype), kind)
    if id(handle) not in places:
        return None
    return _function_of(steps, inputs, places[id(handle)], result)


def _function_of(
    steps: list[tuple[Callable[..., Any], list[int], list[Any]]], inputs: int, last: int, result: Any
) -> Replay:
    """Return the steps as one Python function, which takes half of the time of a loop over them.

    Args:
        steps: Of each, the function, the places of its operands among the handles and earlier results (-1: a
            constant), and the operands of the recording.
        inputs: The number of handles.
        last: The place of the result.
        result: The tensor of the recording. Each result has its type and shape.
    """
    names: dict[str, Any] = {"new": object.__new__, "tensor": core.tensor}
    lines = [f"{''.join(f'v{place}, ' for place in range(inputs))} = handles"] if inputs else []
    for number, (function, wanted, given) in enumerate(steps):
        names[f"f{number}"] = function
        operands = []
        for at, (place, each) in enumerate(zip(wanted, given, strict=True)):
            operands.append(f"v{place}" if place >= 0 else f"c{number}_{at}")
            if place < 0:
                names[operands[-1]] = each
        lines.append(f"v{inputs + number} = f{number}({', '.join(operands)})")
    for name in ("type", "dtype", "numel", "shape"):
        names[name] = getattr(result, name)
    lines += ["found = new(tensor)", f"found.handle = v{last}"]
    lines += [f"found.{name} = {name}" for name in ("type", "dtype", "numel", "shape")]
    text = "\n    ".join(["def replay(handles):", *lines, "return found"])
    exec(text, names)  # noqa: S102 - made of numbers alone
    made: Replay = names["replay"]
    return made


def _is_new(handle: Any, handles: list[Any]) -> bool:
    return handle is not handles[0] and (len(handles) == 1 or not any(handle is each for each in handles))


def _key(given: Any, handles: list[Any]) -> Any:
    """Return what decides of an operand. The handles of tensors, whose types decide, are appended to `handles`."""
    kind = type(given)
    if kind is core.tensor:
        for place, handle in enumerate(handles):
            if handle is given.handle:  # x * x
                return place, _type_key(given.type)
        handles.append(given.handle)
        return _type_key(given.type)
    if kind is int or kind is bool or kind is str or given is None:
        return kind, given
    if kind is float:
        return kind, repr(given)  # NaN equals itself as a text
    if kind is core.constexpr:
        return core.constexpr, _key(given.value, handles)
    if kind is slice:
        return slice, _key((given.start, given.stop, given.step), handles)
    if kind is core.dtype:
        return core.dtype, given.name
    if kind is tuple or kind is list or kind is core.tuple:
        return kind, *[_key(each, handles) for each in given]
    raise Unknown


def _type_key(kind: Any) -> str:
    found: str | None = vars(kind).get("key_of_traces")
    if found is None:
        shape = tuple(kind.shape.values) if kind.is_block() else ()
        scalar = kind.scalar
        found = kind.key_of_traces = f"{scalar.name} {getattr(scalar, 'address_space', '')} {shape}"
    return found


def quicken() -> None:
    """Trace the functions of the language in this process. Call before a kernel runs."""
    traces = Traces(interpreter.interpreter_builder)
    patch_attribute = interpreter._patch_attr

    def patch(part: Any, name: str, member: Any, builder: Any, scope: Any) -> None:
        patch_attribute(part, name, member, builder, scope)
        if builder is interpreter.interpreter_builder and name in (OF_TENSORS if part is core.tensor else FUNCTIONS):
            setattr(part, name, traces.traced(name, getattr(part, name)))

    interpreter._patch_attr = patch
    installed.append(traces)
