"""How large a grammar may be: what would take llguidance seconds, or more stack than a thread has.

It works on the only thread of a worker, and it recurses where one definition leads to the next (4.5 kB of stack for
each level of a schema, 3 kB for each rule or group of a grammar, of 8 MB). Of 495 schemas of SchemaStore 99 in 100 are
within these bounds. What a mask takes is bounded by llguidance itself (`grammar.limits`).
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from fractions import Fraction
from math import lcm
from typing import Any

from kvforge.protocol.errors import InvalidRequest

DEPTH_MAX = 1000  # of a schema and of all places that references lead to, together
NESTING_MAX = 100  # of a schema in itself
PROPERTIES_MAX = 2000
MULTIPLES_MAX = 10_000  # of each multipleOf in units of its last digit: the states of its automaton
# The least common multiple of every multipleOf: a conjunction, direct or through references, has so many states.
COMMON_MAX = 10_000
RULES_MAX = 600  # and groups in them
INLINE, RULE_SIGNS = "%json", ":(["


def check_schemas(schemas: Sequence[dict[str, Any]], field: str) -> None:
    """Raises InvalidRequest naming the keyword of which these schemas together have too much."""
    depth = properties = multiples = 0
    factors: set[Fraction] = set()
    for schema in schemas:
        references: set[str] = set()
        depth += _height(schema, field)
        for node in _objects(schema):
            reference, inside, multiple = node.get("$ref"), node.get("properties"), node.get("multipleOf")
            if isinstance(reference, str) and reference not in references:
                references.add(reference)
                depth += _height(_place(schema, reference), field)
            if isinstance(inside, dict):
                properties += len(inside)
            if isinstance(multiple, int | float) and not isinstance(multiple, bool):
                multiples += _states(multiple)
                factors.add(_fraction(multiple))
    if properties > PROPERTIES_MAX:
        raise InvalidRequest(field, f"properties: there are {properties} in all; at most {PROPERTIES_MAX}")
    if multiples > MULTIPLES_MAX:
        raise InvalidRequest(field, f"multipleOf: at most {MULTIPLES_MAX} units of the last digit, all together")
    if len(factors) > 1 and (common := _common(factors)) > COMMON_MAX:
        problem = f"the least common multiple has {common} units of the last digit"
        raise InvalidRequest(field, f"multipleOf: {problem}; at most {COMMON_MAX}")
    if depth > DEPTH_MAX:
        problem = f"all that references lead to is {depth} levels deep together; at most {DEPTH_MAX}"
        raise InvalidRequest(field, f"$ref: {problem}")


def check_rules(text: str, field: str) -> None:
    """The same for a Lark grammar, with the schemas that it holds. Raises InvalidRequest."""
    schemas, rest = [], ""
    decoder = json.JSONDecoder()
    while INLINE in text:
        before, _, text = text.partition(INLINE)
        try:
            schema, end = decoder.raw_decode(text.lstrip())
        except (ValueError, RecursionError) as error:
            raise InvalidRequest(field, f"{INLINE}: what follows is not JSON ({error})") from None
        text = text.lstrip()[end:]
        rest += before
        if isinstance(schema, dict):
            schemas.append(schema)
    rules = sum((rest + text).count(sign) for sign in RULE_SIGNS)
    if rules > RULES_MAX:
        raise InvalidRequest(field, f"has {rules} rules and groups, by its colons and brackets; at most {RULES_MAX}")
    check_schemas(schemas, field)


def _objects(schema: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """Every object in it."""
    waiting: list[Any] = [schema]
    while waiting:
        node = waiting.pop()
        if isinstance(node, dict):
            yield node
        waiting += _inner(node)


def _height(node: Any, field: str) -> int:
    """How many levels of objects and arrays it has. Raises InvalidRequest where they are too many."""
    level, height = [node], 0
    while level:
        level = [inner for each in level for inner in _inner(each)]
        height += 1
        if height > NESTING_MAX:
            raise InvalidRequest(field, f"nests more than {NESTING_MAX} levels deep")
    return height


def _inner(node: Any) -> list[Any]:
    values = node.values() if isinstance(node, dict) else node if isinstance(node, list) else ()
    return [value for value in values if isinstance(value, dict | list)]


def _place(schema: dict[str, Any], reference: str) -> Any:
    """What a reference leads to: the whole schema where it is no path in it."""
    node: Any = schema
    if reference.startswith("#/"):
        for part in reference[2:].split("/"):
            name = part.replace("~1", "/").replace("~0", "~")
            if isinstance(node, dict) and name in node:
                node = node[name]
            elif isinstance(node, list) and name.isdecimal() and int(name) < len(node):
                node = node[int(name)]
            else:
                return schema
    return node


def _states(multiple: float) -> int:
    """How many remainders there are: 25 of 0.25, 7 of 7."""
    digits, _, exponent = f"{multiple:.16g}".partition("e")
    whole, _, fraction = digits.partition(".")
    units = abs(int(whole + fraction))
    return int(units * 10 ** min(6, max(0, int(exponent or 0) - len(fraction))))


def _fraction(multiple: float) -> Fraction:
    """As it is written: 1/4 of 0.25."""
    try:
        return abs(Fraction(f"{multiple:.16g}"))
    except ValueError:  # infinite
        return Fraction(0)


def _common(factors: set[Fraction]) -> int:
    """Return the least common multiple, in units of the last digit that any factor has."""
    positive = [factor for factor in factors if factor]
    unit = lcm(*(factor.denominator for factor in positive))
    return lcm(*(int(factor * unit) for factor in positive))
