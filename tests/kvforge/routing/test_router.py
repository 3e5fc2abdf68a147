"""The router alone: its choices, its memory, and the handling of a hot prefix."""

from __future__ import annotations

from collections import Counter
from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from kvforge.protocol.messages import PrefixFound
from kvforge.routing import ROUND_ROBIN, Offer, Router, seed_of
from kvforge.routing.router import QUESTIONS_MAX, ROW_TOKENS, SESSION_TOKENS, weight

NAMES = tuple("abcdefgh")


def found(**fields: Any) -> PrefixFound:
    return PrefixFound(**{"rid": 0, "ready": True, "rows_free": 256, "room_tokens": 1 << 20, **fields})


def choose(router: Router, prompt: int, answers: dict[str, PrefixFound], **options: Any) -> str | None:
    question = router.ask()
    try:
        return router.choose(prompt, {name: Offer(question, said) for name, said in answers.items()}, **options)
    finally:
        router.close(question)


answers = st.dictionaries(
    st.sampled_from(NAMES),
    st.builds(
        found,
        ready=st.booleans(),
        known=st.booleans(),
        cached_tokens=st.integers(0, 9000),
        queued_tokens=st.integers(0, 90_000),
        running=st.integers(0, 300),
        pending=st.integers(0, 50),
        rows_free=st.integers(0, 256),
        room_tokens=st.integers(0, 1 << 20),
    ),
)


@given(answers, st.integers(1, 9000), st.text(max_size=3), st.sets(st.sampled_from(NAMES)))
def test_whoever_is_chosen_is_ready_and_was_not_tried(
    said: dict[str, PrefixFound], prompt: int, session: str, tried: set[str]
) -> None:
    chosen = choose(Router(NAMES), prompt, said, session=session, without=tried)
    able = {name for name, one in said.items() if one.ready} - tried
    assert chosen in able if able else chosen is None
    if knowing := {name for name in able if said[name].known}:
        assert chosen in knowing, "only the replica that has the key's request may get it"


@given(answers, st.integers(1, 9000))
def test_less_to_do_is_never_worse(said: dict[str, PrefixFound], prompt: int) -> None:
    router = Router(NAMES)
    chosen = choose(router, prompt, said)
    if chosen is None or any(one.known for one in said.values()):
        return
    best = router.score(chosen, prompt, Offer(0, said[chosen]))
    assert all(router.score(n, prompt, Offer(0, one)) >= best for n, one in said.items() if one.ready)


@given(st.lists(st.tuples(st.booleans(), st.integers(0, 7), st.integers(1, 5000)), max_size=200))
def test_nothing_is_kept_longer_than_the_oldest_question(deeds: list[tuple[bool, int, int]]) -> None:
    router, opened = Router(NAMES), []
    for ask, which, prompt in deeds:
        if ask or not opened:
            opened.append(router.ask())
        else:
            question = opened.pop(which % len(opened))
            router.choose(prompt, {name: Offer(question, found()) for name in NAMES})
            router.close(question)
        if not opened:
            assert not router.remembered
    for question in opened:
        router.close(question)
    assert not router.remembered


def test_questions_that_nobody_closes_are_forgotten() -> None:
    router = Router(NAMES)
    for _ in range(QUESTIONS_MAX + 10):
        router.ask()
    assert len(router._open) == QUESTIONS_MAX


def test_requests_that_come_together_are_spread() -> None:
    router, idle = Router(NAMES), {name: found() for name in NAMES}
    questions = [router.ask() for _ in range(64)]
    chosen = Counter()
    for question in questions:
        chosen[router.choose(1000, {name: Offer(question, one) for name, one in idle.items()})] += 1
    assert set(chosen.values()) == {8}


def test_an_answer_that_has_seen_the_decision_does_not_count_it_twice() -> None:
    router = Router(NAMES)
    held = router.ask()
    first = router.choose(1000, {name: Offer(held, found()) for name in NAMES})
    assert first is not None
    later = router.ask()
    said = Offer(later, found(queued_tokens=1000, running=1))
    assert router.score(first, 1000, said) == 2000 + ROW_TOKENS
    assert router.score(first, 1000, Offer(held, found())) == 2000 + ROW_TOKENS


def test_a_prefix_is_followed_until_it_costs_more_than_it_saves() -> None:
    router = Router(NAMES)
    holder = found(cached_tokens=8000)
    others = {name: found() for name in NAMES[1:]}
    assert choose(router, 8100, {"a": holder, **others}) == "a"
    busy = found(cached_tokens=8000, running=8000 // ROW_TOKENS + 1)
    assert choose(router, 8100, {"a": busy, **others}) != "a"
    queued = found(cached_tokens=8000, queued_tokens=8001)
    assert choose(router, 8100, {"a": queued, **others}) != "a"


def test_a_hot_prefix_is_held_by_all_before_anybody_is_overrun() -> None:
    """Requests that never end, all with one prefix: the worst case."""
    router, load, holds = Router(NAMES), Counter(), set()
    for _ in range(2000):
        said = {
            name: found(cached_tokens=8000 * (name in holds), running=load[name], rows_free=10_000) for name in NAMES
        }
        chosen = choose(router, 8100, said)
        assert chosen is not None
        holds.add(chosen)
        load[chosen] += 1
        assert max(load.values()) - min(load[name] for name in NAMES) <= 8000 // ROW_TOKENS + 1
    assert holds == {*NAMES}
    assert max(load.values()) - min(load.values()) <= 1


def test_a_session_prefers_one_replica_while_that_costs_little() -> None:
    router, idle = Router(NAMES), {name: found() for name in NAMES}
    home = max(NAMES, key=lambda name: weight("s", name))
    assert {choose(router, 100, idle, session="s") for _ in range(20)} == {home}
    assert choose(router, 100, {**idle, home: found(queued_tokens=SESSION_TOKENS + 1)}, session="s") != home
    left = {name: one for name, one in idle.items() if name != home}
    assert choose(router, 100, left, session="s") in left


def test_where_all_are_alike_they_take_turns() -> None:
    router, idle = Router(NAMES), {name: found() for name in NAMES}
    assert [choose(router, 100, idle) for _ in range(16)] == [*NAMES, *NAMES]


def test_round_robin_looks_at_nothing_but_whether_one_is_ready() -> None:
    router = Router(NAMES, ROUND_ROBIN)
    said = {name: found(queued_tokens=at * 1000, ready=name != "c") for at, name in enumerate(NAMES)}
    assert [choose(router, 100, said) for _ in range(8)] == [*"abdefgha"]


def test_a_replica_without_room_is_left_for_one_that_has_some() -> None:
    router = Router("ab")
    assert choose(router, 1000, {"a": found(rows_free=0, running=10), "b": found(running=10)}) == "b"
    assert choose(router, 1000, {"a": found(room_tokens=10), "b": found()}) == "b"


def test_a_seed_follows_from_tenant_and_key_alone() -> None:
    assert seed_of("a", "k") == seed_of("a", "k")
    assert len({seed_of("a", "k"), seed_of("a", "l"), seed_of("b", "k")}) == 3
    assert 0 <= seed_of("a", "k") < 1 << 64
