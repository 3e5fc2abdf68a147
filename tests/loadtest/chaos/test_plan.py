"""Parsing of `--kill`."""

from __future__ import annotations

from itertools import islice

import pytest

from kvforge.loadtest.chaos.plan import Kill, parse, schedule
from kvforge.protocol.errors import InvalidRequest


def test_several_are_named_at_once_or_one_by_one() -> None:
    kills = (Kill("worker", 10.0), Kill("coordinator", 30.0))
    assert parse(["worker:10s,coordinator:30s"]) == parse(["worker:10", "coordinator:30s"]) == kills


def test_a_name_may_hold_a_colon() -> None:
    assert parse(["host:w0:1.5s"]) == (Kill("host:w0", 1.5),)


def test_they_come_in_the_order_of_their_times_and_some_for_ever() -> None:
    kills = parse(["coordinator:45s,worker:every=20s,w1:20s"])
    assert list(islice(schedule(kills), 5)) == [
        (20.0, "w1"),
        (20.0, "worker"),
        (40.0, "worker"),
        (45.0, "coordinator"),
        (60.0, "worker"),
    ]
    assert list(schedule(parse(["worker:2s,worker:1s"]))) == [(1.0, "worker"), (2.0, "worker")]


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("worker", "'worker' lacks a name or a time: expected NAME:TIME"),
        (":10s", "':10s' lacks a name or a time"),
        ("worker:10s,", "'' lacks a name or a time"),
        ("worker:soon", "invalid time 'soon'"),
        ("worker:every=", "invalid time ''"),
        ("worker:-1s", "the time must be 0 to 86400 seconds"),
        ("worker:nan", "the time must be 0"),
        ("worker:every=0.1s", "the interval must be at least 1 s"),
    ],
)
def test_a_wrong_one_names_the_option_and_what_to_do(text: str, problem: str) -> None:
    with pytest.raises(InvalidRequest) as caught:
        parse([text])
    assert caught.value.field == "kill" and problem in caught.value.message
