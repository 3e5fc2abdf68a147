"""Bounds on the size of a grammar, above which llguidance would take seconds or overflow a thread's stack.

llguidance runs on a worker's only thread, and recurses from one definition to the next. Of the 8 MB of stack, each
level of a schema takes 4.5 kB, and each rule or group of a grammar 3 kB. 99 % of the 495 schemas of SchemaStore are
within these bounds. llguidance itself bounds the cost of a mask (`grammar.limits`).
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from fractions import Fraction
from math import lcm
from typing import Any

from kvforge.protocol.errors import InvalidRequest

DEPTH_MAX = 1000  # a schema and all targets of its references, together
NESTING_MAX = 100  # levels within one schema
PROPERTIES_MAX = 2000
MULTIPLES_MAX = 10_000  # each multipleOf in units of its last digit: the states of its automaton
# The least common multiple of all multipleOf: the states of a conjunction, direct or through references.
COMMON_MAX = 10_000
RULES_MAX = 600  # rules and groups within rules
INLINE, RULE_SIGNS = "%json", ":(["


def check_schemas(schemas: Sequence[dict[str, Any]], field: str) -> None:
    """Check the bounds of several schemas together.

    Raises:
        InvalidRequest: Names the keyword that exceeds a bound.
    """
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
        raise InvalidRequest(field, f"properties: {properties} in total; at most {PROPERTIES_MAX} are allowed")
    if multiples > MULTIPLES_MAX:
        raise InvalidRequest(field, f"multipleOf: at most {MULTIPLES_MAX} units of the last digit in total")
    if len(factors) > 1 and (common := _common(factors)) > COMMON_MAX:
        problem = f"the least common multiple has {common} units of the last digit"
        raise InvalidRequest(field, f"multipleOf: {problem}; at most {COMMON_MAX}")
    if depth > DEPTH_MAX:
        problem = f"the targets of all references are {depth} levels deep in total; at most {DEPTH_MAX}"
        raise InvalidRequest(field, f"$ref: {problem}")


def check_rules(text: str, field: str) -> None:
    """Check the bounds of a Lark grammar and of the schemas in it.

    Raises:
        InvalidRequest: A bound is exceeded.
    """
    schemas, rest = [], ""
    decoder = json.JSONDecoder()
    while INLINE in text:
        before, _, text = text.partition(INLINE)
        try:
            schema, end = decoder.raw_decode(text.lstrip())
        except (ValueError, RecursionError) as error:
            raise InvalidRequest(field, f"{INLINE}: must be followed by JSON ({error})") from None
        text = text.lstrip()[end:]
        rest += before
        if isinstance(schema, dict):
            schemas.append(schema)
    rules = sum((rest + text).count(sign) for sign in RULE_SIGNS)
    if rules > RULES_MAX:
        raise InvalidRequest(field, f"has {rules} rules and groups, by its colons and brackets; at most {RULES_MAX}")
    check_schemas(schemas, field)


def _objects(schema: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """Yield every object in a schema."""
    waiting: list[Any] = [schema]
    while waiting:
        node = waiting.pop()
        if isinstance(node, dict):
            yield node
        waiting += _inner(node)


def _height(node: Any, field: str) -> int:
    """Return the number of levels of objects and arrays. Raises InvalidRequest if there are too many."""
    level, height = [node], 0
    while level:
        level = [inner for each in level for inner in _inner(each)]
        height += 1
        if height > NESTING_MAX:
            raise InvalidRequest(field, f"nests more than {NESTING_MAX} levels deep: flatten it, or use $ref")
    return height


def _inner(node: Any) -> list[Any]:
    values = node.values() if isinstance(node, dict) else node if isinstance(node, list) else ()
    return [value for value in values if isinstance(value, dict | list)]


def _place(schema: dict[str, Any], reference: str) -> Any:
    """Return the target of a reference, or the whole schema if it is not a path in the schema."""
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
    """Return the number of remainders: 25 for 0.25, 7 for 7."""
    digits, _, exponent = f"{multiple:.16g}".partition("e")
    whole, _, fraction = digits.partition(".")
    units = abs(int(whole + fraction))
    return int(units * 10 ** min(6, max(0, int(exponent or 0) - len(fraction))))


def _fraction(multiple: float) -> Fraction:
    """Return the number as written: 1/4 for 0.25."""
    try:
        return abs(Fraction(f"{multiple:.16g}"))
    except ValueError:  # infinite
        return Fraction(0)


def _common(factors: set[Fraction]) -> int:
    """Return the least common multiple, in units of the last digit of any factor."""
    positive = [factor for factor in factors if factor]
    unit = lcm(*(factor.denominator for factor in positive))
    return lcm(*(int(factor * unit) for factor in positive))
