"""Checks constraints on answers before a request is accepted, with llguidance's error texts.

llguidance enforces the constraints in the worker. It is strict here: unsupported features are refused by name, even if
a schema asks for leniency (`x-guidance`). The bounds of `grammar_bounds` are kvforge's own: they keep llguidance from
taking seconds, or from crashing the process.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections import OrderedDict
from typing import Any

from kvforge.protocol.errors import InvalidRequest
from kvforge.protocol.messages import GRAMMAR_BYTES_MAX, Grammar

from .grammar_bounds import check_rules, check_schemas

FIELDS = {
    "json_schema": "sampling.json_schema",
    "json_object": "sampling.json_object",
    "regex": "sampling.regex",
    "lark": "sampling.grammar",
}
OPTIONS, STRICT = "x-guidance", {"lenient": False, "coerce_one_of": False}
# Whitespace between two parts of a document. Small models may otherwise write blanks until their answer is cut off.
BLANKS = {"whitespace_pattern": r"[\x20\x0A\x0D\x09]{1,32}"}
PROBLEM_LENGTH_MAX = 300
VERDICTS_MAX = 4096  # remembered answers of llguidance; each takes less than 1 KB
# Limits that stop a matcher before it takes longer than about 0.1 s for a mask, or more than 100 MB of memory.
ITEMS_LIMITS: dict[str, Any] = {
    "initial_lexer_fuel": 200_000,
    "step_lexer_fuel": 50_000,
    "step_max_items": 20_000,
    "max_lexer_states": 50_000,
    "verbose_errors": False,
}
_LOOKS_AWAY = "Unimplemented"  # starts a warning if a grammar asked for leniency
_UNIMPLEMENTED = re.compile(r"Unimplemented keys: (\[.*?\])")
_UNKNOWN_FORMAT = re.compile(r"Unknown format: (\S+)")
_verdicts: OrderedDict[bytes, str] = OrderedDict()  # by the digest of a grammar's text, least recently used first


def check(grammar: Grammar, field: str = "") -> None:
    """Check that a grammar can be enforced.

    Without llguidance, only the bounds are checked here, and the worker checks the rest.

    Args:
        grammar: The grammar.
        field: The caller's name for it, by default that of `kvforge.SamplingParams`.

    Raises:
        InvalidRequest: It cannot be enforced. Names the keyword.
    """
    field = field or FIELDS[grammar.kind]
    if problem := validated(grammar, field):
        raise InvalidRequest(field, problem)


def validated(grammar: Grammar, field: str) -> str:
    """Return why llguidance cannot enforce a grammar. A new grammar may take 10 s; the result is cached.

    Args:
        grammar: The grammar.
        field: The caller's name for the grammar.

    Returns:
        "" if llguidance enforces it, or is not installed.

    Raises:
        InvalidRequest: The grammar is out of bounds.
    """
    schema = _bounded(grammar, field)
    try:
        words = _words(grammar, schema)
        problem = _remembered(words)
        if problem is None:
            problem = _validate(words, str(schema.get("$schema")))
            _remember(words, problem)
    except ImportError:
        return ""
    return problem


def known(grammar: Grammar) -> bool:
    """Return whether `check` answers at once, because the result is cached or needs no llguidance."""
    try:
        return _remembered(_words(grammar, _bounded(grammar, FIELDS[grammar.kind]))) is not None
    except (ImportError, InvalidRequest):
        return True


def note(grammar: Grammar, problem: str) -> None:
    """Cache the result of `validated` in another process.

    Args:
        grammar: A grammar within the bounds.
        problem: The result.
    """
    _remember(_words(grammar, _bounded(grammar, FIELDS[grammar.kind])), problem)


def _validate(words: str, dialect: str) -> str:
    """Validate a grammar with llguidance."""
    from llguidance import LLMatcher

    failed, warnings = LLMatcher.validate_grammar_with_warnings(words, limits=limits())
    wrong = warnings[0] if failed else overlooked(warnings)
    return explained(wrong, dialect) if wrong else ""


def _remembered(words: str) -> str | None:
    key = _digest(words)
    if key in _verdicts:
        _verdicts.move_to_end(key)
    return _verdicts.get(key)


def _remember(words: str, problem: str) -> None:
    _verdicts[_digest(words)] = problem
    _verdicts.move_to_end(_digest(words))
    while len(_verdicts) > VERDICTS_MAX:
        _verdicts.popitem(last=False)


def _digest(words: str) -> bytes:
    return hashlib.sha256(words.encode("utf-8", "surrogatepass")).digest()


def compiled_text(grammar: Grammar) -> str:
    """Return the grammar in the form that llguidance's matchers take. `check` finds all other errors.

    Raises:
        InvalidRequest: The grammar is out of bounds.
        ImportError: llguidance is not installed.
    """
    return _words(grammar, _bounded(grammar, FIELDS[grammar.kind]))


def limits() -> Any:
    """Return the LLParserLimits of matchers.

    Raises:
        ImportError: llguidance is not installed.
    """
    import llguidance

    return llguidance.LLParserLimits(**ITEMS_LIMITS)


def overlooked(warnings: list[str]) -> str:
    """Return the warning of llguidance that it enforces less than requested, "" if there is none."""
    return next((each for each in warnings if _LOOKS_AWAY in each), "")


def explained(problem: str, dialect: str = "") -> str:
    """Return llguidance's reason why a grammar cannot be enforced, prefixed by the keyword at fault.

    Args:
        problem: llguidance's text.
        dialect: The schema's own `$schema`.
    """
    unimplemented = _UNIMPLEMENTED.search(problem)
    if unimplemented is not None:
        keywords = json.loads(unimplemented[1])
        return f"{', '.join(keywords)}: cannot be enforced; leave {'it' if len(keywords) == 1 else 'them'} out"
    unknown = _UNKNOWN_FORMAT.search(problem)
    if unknown is not None:
        return f"format: {unknown[1]!r} cannot be enforced; leave it out, or use pattern"
    if "oneOf" in problem:
        return "oneOf: its alternatives may overlap, so it cannot be enforced; use anyOf if one or more may hold"
    if problem.startswith(("Resource '", "Pointer '")):
        named = problem.split("'")[1]
        if named == dialect.rstrip("#"):
            return f"$schema: unknown dialect {dialect!r}; leave it out"
        return f"$ref: {named!r} is not in the schema; only references within the schema are allowed"
    if problem.startswith("circular"):
        return f"$ref: {problem}"
    if problem.startswith("regex parse error"):
        return _short(f"pattern: {problem.rpartition('error: ')[2]}")
    return _short(problem)


def _bounded(grammar: Grammar, field: str) -> dict[str, Any]:
    """Return the schema, or {} if there is none. Raises InvalidRequest if the grammar is out of bounds or not JSON."""
    try:
        size = len(grammar.text.encode())
    except UnicodeEncodeError:
        raise InvalidRequest(field, "is not text that UTF-8 can hold") from None
    if size > GRAMMAR_BYTES_MAX:
        raise InvalidRequest(field, f"has {size} bytes; at most {GRAMMAR_BYTES_MAX}")
    if grammar.kind == "json_object":
        return {"type": "object"}
    if not grammar.text:
        raise InvalidRequest(field, "is empty")
    if grammar.kind == "lark":
        check_rules(grammar.text, field)
    return _schema(grammar.text, field) if grammar.kind == "json_schema" else {}


def _schema(text: str, field: str) -> dict[str, Any]:
    try:
        schema = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise InvalidRequest(field, f"is not JSON ({error})") from None
    if not isinstance(schema, dict):
        raise InvalidRequest(field, "must be a JSON object; {} allows any JSON")
    if not isinstance(schema.get(OPTIONS, {}), dict):
        raise InvalidRequest(field, f"{OPTIONS}: must be an object")
    check_schemas([schema], field)
    return schema


def _words(grammar: Grammar, schema: dict[str, Any]) -> str:
    from llguidance import LLMatcher

    if grammar.kind == "regex":
        return LLMatcher.grammar_from_regex(grammar.text)
    if grammar.kind == "lark":
        return LLMatcher.grammar_from_lark(grammar.text)
    given = schema.get(OPTIONS, {})
    options = {**({} if "whitespace_flexible" in given else BLANKS), **given, **STRICT}
    return json.dumps({"grammars": [{"json_schema": {**schema, OPTIONS: options}}]})


def _short(problem: str) -> str:
    line = " ".join(problem.replace("<non-verbose/>", "").split())
    return line if len(line) <= PROBLEM_LENGTH_MAX else line[: PROBLEM_LENGTH_MAX - 3] + "..."
