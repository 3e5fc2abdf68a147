"""Parser of PTX: one kernel's parameters, registers, and instructions with resolved names."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass, field

from tools.amdgcn.checks import Unsupported

# Files of registers, by their width.
FILES = {"pred": "p", "b16": "h", "b32": "w", "b64": "d"}
_WIDTHS = {"8": "b16", "16": "b16", "32": "b32", "64": "b64"}
_ENTRY = re.compile(r"\.visible\s+\.entry\s+([\w$]+)\s*\((.*?)\)(.*?)\{", re.DOTALL)
_CONSTANT = re.compile(r"\.global \.align \d+ \.b8 ([\w$]+)\[\d+\] = \{([\d, ]+)\}")
_PARAMETER = re.compile(r"\.param\s+(?:\.align\s+(\d+)\s+)?\.(\w+)\s+(?:\.ptr\s[^,]*\s)?([\w$]+)(?:\[(\d+)\])?\s*$")


@dataclass(frozen=True)
class Register:
    """A register. file: one of `FILES`' values. index: its row. negated: whether a predicate's opposite is meant."""

    file: str
    index: int
    negated: bool = False


@dataclass(frozen=True)
class Place:
    """An address in brackets: of a register, a symbol or neither, and an offset in bytes.

    coordinates: of a box, with the place of its descriptor.
    """

    base: Register | str | None
    offset: int = 0
    coordinates: tuple[Operand, ...] = ()


Operand = Register | Place | str | tuple["Operand", ...]


@dataclass
class Instruction:
    """One instruction. parts: its name, cut at the dots. guard: the predicate for which lanes execute it."""

    text: str
    parts: tuple[str, ...]
    operands: tuple[Operand, ...]
    guard: Register | None = None

    @property
    def name(self) -> str:
        """The first part."""
        return self.parts[0]


@dataclass(frozen=True)
class Parameter:
    """A parameter of a kernel. offset and size in bytes."""

    name: str
    offset: int
    size: int


@dataclass
class Kernel:
    """A parsed kernel.

    Attributes:
        name: its name.
        threads: of a block.
        parameters: in their order.
        instructions: in their order.
        labels: the place of each label.
        tables: the labels of each table of branches.
        counts: registers of each file.
        local_bytes: private memory of a thread.
        constants: tables of the module, by name.
    """

    name: str
    threads: int
    parameters: list[Parameter]
    instructions: list[Instruction] = field(default_factory=list)
    labels: dict[str, int] = field(default_factory=dict)
    tables: dict[str, tuple[str, ...]] = field(default_factory=dict)
    counts: dict[str, int] = field(default_factory=lambda: dict.fromkeys(FILES.values(), 0))
    local_bytes: int = 0
    constants: dict[str, bytes] = field(default_factory=dict)


def parse(text: str) -> Kernel:
    """Return the kernel in a PTX module.

    Raises:
        Unsupported: there is not exactly one kernel, or a statement is unknown.
    """
    text = re.sub(r"//[^\n]*|/\*.*?\*/", "", text, flags=re.DOTALL)
    entries = [*_ENTRY.finditer(text)]
    if len(entries) != 1:
        raise Unsupported(f"{len(entries)} kernels in a module")
    (entry,) = entries
    threads = re.search(r"\.reqntid\s+(\d+)", entry[3])
    if threads is None:
        raise Unsupported("a kernel without its number of threads")
    constants = {name: bytes(map(int, numbers.split(","))) for name, numbers in _CONSTANT.findall(text)}
    kernel = Kernel(entry[1], int(threads[1]), _parameters(entry[2]), constants=constants)
    _Body(kernel).read(re.sub(r"^\s*\.loc\b[^\n]*$", "", text[entry.end() :], flags=re.MULTILINE))
    return kernel


def _parameters(text: str) -> list[Parameter]:
    found, offset = [], 0
    for line in filter(None, map(str.strip, text.split(",\n"))):
        match = _PARAMETER.match(line)
        if match is None:
            raise Unsupported(line)
        one = int(re.sub(r"\D", "", match[2])) // 8
        size, align = one * int(match[4] or 1), int(match[1] or one)
        offset = -(-offset // align) * align
        found.append(Parameter(match[3], offset, size))
        offset += size
    return found


class _Body:
    """Reads statements. Names of registers and labels hold in their scope and those inside."""

    def __init__(self, kernel: Kernel) -> None:
        self._kernel = kernel
        self._scopes: list[dict[str, Register | str]] = [{}]
        self._made = 0

    def read(self, text: str) -> None:
        """Read the statements of a body until its closing brace."""
        waiting: list[tuple[list[dict[str, Register | str]], str]] = []
        for statement in _statements(text):
            if statement == "{":
                self._scopes.append({})
            elif statement == "}":
                self._scopes.pop()
                if not self._scopes:
                    break
            elif statement.endswith(":"):
                self._label(statement[:-1])
            elif statement.startswith(".reg"):
                self._declare(statement)
            elif statement.startswith(".branchtargets"):
                targets = tuple(part.strip() for part in statement.split(None, 1)[1].split(","))
                label = next(reversed(self._kernel.labels))
                self._kernel.tables[label] = targets
            elif statement.startswith(".local"):
                self._kernel.local_bytes = _local_bytes(statement)
            elif not statement.startswith((".pragma", ".global", ".shared", ".extern")):
                waiting.append(([*self._scopes], statement))
                self._kernel.instructions.append(Instruction(statement, (), ()))
        if self._scopes:
            raise Unsupported("a kernel without an end")
        # A branch may precede its label: operands are resolved at the end.
        for place, (scopes, statement) in enumerate(waiting):
            self._scopes = scopes
            self._kernel.instructions[place] = self._instruction(statement)

    def _label(self, name: str) -> None:
        unique = name
        if len(self._scopes) > 1:  # of inline assembly, which repeats
            self._made += 1
            unique = f"{name}@{self._made}"
            self._scopes[-1][name] = unique
        self._kernel.labels[unique] = len(self._kernel.instructions)

    def _declare(self, statement: str) -> None:
        _, kind, names = statement.split(None, 2)
        kind = kind[1:]
        file = FILES["pred" if kind == "pred" else _WIDTHS[re.sub(r"\D", "", kind)]]
        for name in map(str.strip, names.split(",")):
            many = re.fullmatch(r"([%\w$]+)<(\d+)>", name)
            for each in (f"{many[1]}{number}" for number in range(int(many[2]))) if many else (name,):
                self._scopes[-1][each] = Register(file, self._kernel.counts[file])
                self._kernel.counts[file] += 1

    def _instruction(self, statement: str) -> Instruction:
        guard = None
        rest = statement
        if rest.startswith("@"):
            word, rest = rest[1:].split(None, 1)
            found = self._operand(word)
            assert isinstance(found, Register), statement
            guard = found
        name, _, operands = rest.partition(" ")
        return Instruction(
            statement, tuple(name.split(".")), tuple(self._operand(each) for each in _split(operands)), guard
        )

    def _find(self, name: str) -> Register | str:
        return next((scope[name] for scope in reversed(self._scopes) if name in scope), name)

    def _operand(self, text: str) -> Operand:
        if text.startswith("{"):
            return tuple(self._operand(each) for each in _split(text[1:-1]))
        if text.startswith("["):
            return self._place(text[1:-1].strip())
        if "|" in text:
            return tuple(self._operand(each) for each in text.split("|"))
        if text.startswith("!"):
            found = self._find(text[1:])
            assert isinstance(found, Register), text
            return Register(found.file, found.index, negated=True)
        return self._find(text)

    def _place(self, text: str) -> Place:
        first, *rest = _split(text)
        coordinates = self._operand(rest[0]) if rest else ()
        assert isinstance(coordinates, tuple)
        match = re.fullmatch(r"([%$\w]+?)\s*(?:\+\s*(-?\w+))?", first)
        if match is None:
            raise Unsupported(text)
        if match[1].isdigit():
            return Place(None, int(match[1]))
        base = self._find(match[1])
        return Place(base, int(match[2] or "0", 0), coordinates)


def _local_bytes(statement: str) -> int:
    match = re.fullmatch(r"\.local \.align \d+ \.b8 __local_depot0\[(\d+)\]", statement)
    if match is None:
        raise Unsupported(statement)
    return int(match[1])


def _statements(text: str) -> Iterator[str]:
    """Yield statements without their semicolon, labels with their colon, and braces that open and close scopes."""
    place = 0
    label = re.compile(r"[\w$]+\s*:")
    while place < len(text):
        if text[place].isspace() or text[place] == ";":
            place += 1
        elif text[place] in "{}":
            yield text[place]
            place += 1
        elif match := label.match(text, place):
            yield re.sub(r"\s", "", match[0])
            place = match.end()
        else:
            end = text.find(";", place)
            if end < 0:
                raise Unsupported(f"a statement without an end: {text[place : place + 80]}")
            yield " ".join(text[place:end].split())
            place = end + 1


def _split(text: str) -> list[str]:
    """Split at commas outside of brackets and braces."""
    parts, depth, part = [], 0, ""
    for character in text:
        depth += (character in "[{") - (character in "]}")
        if character == "," and not depth:
            parts.append(part.strip())
            part = ""
        else:
            part += character
    return [*parts, part.strip()] if part.strip() else parts
