"""The blocking client and the one for asyncio have the same calls, arguments and docstrings, from one source."""

from __future__ import annotations

import inspect
import typing

import pytest

import kvforge
from tools.twins import generate as twins

PAIRS = (
    (kvforge.Client, kvforge.AsyncClient),
    (kvforge.Request, kvforge.AsyncRequest),
    (kvforge.TextRequest, kvforge.AsyncTextRequest),
)


@pytest.mark.parametrize("name", twins.FILES)
def test_the_blocking_client_is_what_the_description_says(name: str) -> None:
    pytest.importorskip("ruff", reason="formats the generated code; install the extra dev")
    committed = (twins.CLIENT / "blocking" / name).read_text(encoding="utf-8")
    assert committed == twins.blocking(name), "run `python -m tools.twins`"


def calls(cls: type) -> dict[str, str]:
    """Return the public callables with their arguments, kinds, defaults and types."""
    members = inspect.getmembers(cls, lambda member: inspect.isfunction(member) or isinstance(member, property))
    return {
        name: str(inspect.signature(member)) if inspect.isfunction(member) else "property"
        for name, member in members
        if not name.startswith("_") or name == "__init__"
    }


@pytest.mark.parametrize(("blocking", "asynchronous"), PAIRS)
def test_both_have_the_same_calls_with_the_same_arguments_and_types(blocking: type, asynchronous: type) -> None:
    mine, theirs = calls(blocking), calls(asynchronous)
    assert len(mine) >= 4
    assert mine == {name: twins.translated(signature) for name, signature in theirs.items()}


@pytest.mark.parametrize(("blocking", "asynchronous"), PAIRS)
def test_both_say_the_same_of_each_call(blocking: type, asynchronous: type) -> None:
    for name in ("__doc__", *calls(blocking)):
        if name == "__init__":  # the class documents the arguments
            continue
        mine, theirs = (getattr(cls, name) for cls in (blocking, asynchronous))
        if name != "__doc__":
            mine, theirs = inspect.getdoc(mine), inspect.getdoc(theirs)
        assert mine, f"{blocking.__name__}.{name} has no docstring"
        assert mine.split() == twins.translated(theirs).split()
        assert "asyncio" not in mine


@pytest.mark.parametrize("cls", [cls for pair in PAIRS for cls in pair])
def test_every_argument_and_result_has_a_type_that_can_be_looked_up(cls: type) -> None:
    for name in calls(cls):
        member = inspect.getattr_static(cls, name)
        function = member.fget if isinstance(member, property) else member
        hints = typing.get_type_hints(function)
        assert hints.keys() == {*inspect.signature(function).parameters, "return"} - {"self"}, name


def test_only_what_waits_in_asyncio_is_awaited() -> None:
    """Calls that only read local data need no `await`: `text`, `merge`, and iterating itself."""
    at_once = {
        name
        for _, cls in PAIRS
        for name in calls(cls)
        if inspect.isfunction(member := inspect.getattr_static(cls, name)) and not inspect.iscoroutinefunction(member)
    }
    assert at_once == {"__init__", "text", "merge"}
    for blocking, _ in PAIRS:
        assert not any(inspect.iscoroutinefunction(getattr(blocking, name)) for name in calls(blocking))
