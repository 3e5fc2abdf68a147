"""The state of a connection, without sockets."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvforge import Client, Request, SamplingParams
from kvforge.client.arguments import prompt_array
from kvforge.client.handles import MergedStream
from kvforge.client.options import RequestOptions
from kvforge.client.pending import PendingCommand, RequestStream
from kvforge.client.results import finished
from kvforge.client.session import ClientSession
from kvforge.protocol import messages as m
from kvforge.protocol.codec import encode
from kvforge.protocol.errors import (
    CoordinatorUnavailable,
    DeadlineExceeded,
    InternalError,
    InvalidRequest,
    ProtocolError,
    QueueFull,
    WorkerError,
)


def take(session: ClientSession, message: m.Message) -> list[m.Message]:
    return session.receive([bytes(frame) for frame in encode(message)])


def rows(*items: tuple[int, int, int], ended: tuple[m.Ended, ...] = ()) -> m.Stream:
    """Build rows from (request_id, offset, token)."""
    ids, offsets, tokens = zip(*items, strict=True) if items else ((), (), ())
    return m.Stream(
        ended=ended,
        request_ids=np.array(ids, np.int64),
        offsets=np.array(offsets, np.int32),
        tokens=np.array(tokens, np.int32),
        logprobs=np.full(len(items), -1.0, np.float32),
    )


def end(request_id: int, count: int, reason: str = "length", error: m.ErrorInfo | None = None) -> m.Ended:
    return m.Ended(
        request_id=request_id,
        reason=reason,
        generated_tokens=count,
        prompt_tokens=3,
        cached_tokens=1,
        timings=m.Timings(ended_us=9),
        error=error,
    )


def accepted(session: ClientSession, request_id: int) -> RequestStream:
    pending = session.expect(session.new_rid(), m.Accepted, "Submit")
    assert take(session, m.Accepted(rid=pending.rid, request_id=request_id, seed=5)) == []
    pending.answer(m.Accepted)
    (track,) = pending.tracks
    return track


@pytest.fixture
def session() -> ClientSession:
    return ClientSession("ipc:///nowhere")


def test_replies_find_their_command_in_any_order(session: ClientSession) -> None:
    first = session.expect(session.new_rid(), m.Done, "Cancel")
    second = session.expect(session.new_rid(), m.Done, "Drain")
    take(session, m.Done(rid=second.rid))
    assert (first.done, second.done) == (False, True)
    take(session, m.Done(rid=first.rid))
    assert first.answer(m.Done).rid == first.rid


def test_a_refusal_is_raised_as_its_own_class_each_time_anew(session: ClientSession) -> None:
    pending = session.expect(session.new_rid(), m.Accepted, "Submit")
    take(session, m.Refused(rid=pending.rid, error=m.ErrorInfo.of(QueueFull(4, 250))))
    with pytest.raises(QueueFull) as first:
        pending.answer(m.Accepted)
    with pytest.raises(QueueFull) as second:
        pending.answer(m.Accepted)
    assert (first.value.limit, first.value.retry_after_ms) == (4, 250)
    assert first.value is not second.value


def test_an_answer_of_the_wrong_kind_fails_that_command_only(session: ClientSession) -> None:
    pending = session.expect(session.new_rid(), m.Stats, "GetStats")
    other = session.expect(session.new_rid(), m.Done, "Drain")
    take(session, m.Done(rid=pending.rid))
    with pytest.raises(ProtocolError, match="answered GetStats with Done"):
        pending.answer(m.Stats)
    assert not other.done


def test_a_refusal_that_names_no_command_is_for_the_oldest(session: ClientSession) -> None:
    first = session.expect(session.new_rid(), m.Welcome, "Hello")
    second = session.expect(session.new_rid(), m.Done, "Drain")
    take(session, m.Refused(rid=0, error=m.ErrorInfo.of(ProtocolError("unreadable"))))
    with pytest.raises(ProtocolError, match="unreadable"):
        first.answer(m.Welcome)
    assert not second.done


def test_welcome_is_remembered(session: ClientSession) -> None:
    pending = session.expect(session.new_rid(), m.Welcome, "Hello")
    take(session, m.Welcome(rid=pending.rid, version=1, boot="abc", tables_path="/t"))
    assert session.boot == "abc"
    assert session.welcome is not None
    session.lost(CoordinatorUnavailable("gone"))
    assert session.welcome is None
    assert session.boot == "abc"  # sent on the next connection


def test_tokens_of_each_request_are_kept_apart(session: ClientSession) -> None:
    a, b = accepted(session, 10), accepted(session, 11)
    take(session, rows((10, 0, 100), (11, 0, 200), (10, 1, 101)))
    take(session, rows((11, 1, 201), ended=(end(10, 2),)))
    assert (a.tokens, b.tokens) == ([100, 101], [200, 201])
    assert (a.done, b.done) == (True, False)
    assert session.running == (11,)
    done = finished(a)
    assert (done.request_id, done.tokens, done.reason) == (10, (100, 101), "length")
    assert (done.prompt_tokens, done.cached_tokens, done.timings.ended_us) == (3, 1, 9)
    assert done.logprobs == (-1.0, -1.0)


def test_repeated_rows_change_nothing(session: ClientSession) -> None:
    track = accepted(session, 1)
    take(session, rows((1, 0, 5), (1, 1, 6)))
    assert take(session, rows((1, 0, 99), (1, 1, 6), (1, 2, 7))) == []
    assert track.tokens == [5, 6, 7]


@given(st.lists(st.integers(0, 6), max_size=40))
def test_any_order_of_offsets_gives_a_prefix_or_an_error(offsets: list[int]) -> None:
    session = ClientSession("ipc:///nowhere")
    track = accepted(session, 1)
    for offset in offsets:
        take(session, rows((1, offset, 1000 + offset)))
    assert track.tokens == [1000 + i for i in range(len(track.tokens))]
    due = 0
    for offset in offsets:
        if offset > due:
            assert isinstance(track.error, ProtocolError)
            return
        due += offset == due
    assert track.error is None
    assert len(track.tokens) == due


def test_a_gap_ends_that_request_and_cancels_it(session: ClientSession) -> None:
    broken, healthy = accepted(session, 1), accepted(session, 2)
    replies = take(session, rows((1, 0, 5), (1, 2, 7), (2, 0, 8), (1, 1, 6)))
    assert [(type(reply), getattr(reply, "request_id", 0)) for reply in replies] == [(m.Cancel, 1)]
    assert broken.tokens == [5]
    with pytest.raises(ProtocolError, match="request 1 has a gap: token 1 was due and token 2 came"):
        finished(broken)
    assert healthy.tokens == [8]
    assert not healthy.done


def test_an_end_that_counts_more_tokens_than_came_is_a_gap(session: ClientSession) -> None:
    track = accepted(session, 1)
    take(session, rows((1, 0, 5), ended=(end(1, 2),)))
    with pytest.raises(ProtocolError, match="ended after 2 tokens and 1 came"):
        finished(track)


@pytest.mark.parametrize(
    ("reason", "info", "expected"),
    [
        ("failed", m.ErrorInfo.of(WorkerError("broke", worker="w1")), WorkerError),
        ("failed", None, InternalError),
        ("expired", None, DeadlineExceeded),
    ],
)
def test_how_a_request_that_failed_is_raised(
    session: ClientSession, reason: str, info: m.ErrorInfo | None, expected: type[Exception]
) -> None:
    track = accepted(session, 1)
    take(session, rows(ended=(end(1, 0, reason, info),)))
    with pytest.raises(expected) as raised:
        finished(track)
    if info is not None:
        assert getattr(raised.value, "worker", None) == "w1"


def test_a_cancelled_request_is_an_outcome(session: ClientSession) -> None:
    track = accepted(session, 1)
    take(session, rows((1, 0, 5), ended=(end(1, 1, "cancelled"),)))
    assert finished(track).reason == "cancelled"
    assert finished(track).tokens == (5,)


def test_losing_the_connection_fails_what_waits_and_keeps_tokens(session: ClientSession) -> None:
    track = accepted(session, 1)
    over = accepted(session, 2)
    take(session, rows((1, 0, 5), ended=(end(2, 0),)))
    pending = session.expect(session.new_rid(), m.Done, "Drain")
    woken: list[str] = []
    pending.wakers.add(lambda: woken.append("pending"))
    track.wakers.add(lambda: woken.append("track"))
    session.lost(CoordinatorUnavailable("gone"))
    assert sorted(woken) == ["pending", "track"]
    assert track.tokens == [5]
    for wait in (lambda: pending.answer(m.Done), lambda: finished(track)):
        with pytest.raises(CoordinatorUnavailable):
            wait()
    assert finished(over).tokens == ()
    assert session.running == ()


def test_a_request_accepted_after_its_caller_left_is_cancelled(session: ClientSession) -> None:
    pending = session.expect(session.new_rid(), m.Accepted, "Submit")
    assert session.forget(pending) == []
    replies = take(session, m.Accepted(rid=pending.rid, request_id=77, seed=1))
    assert [(type(reply), getattr(reply, "request_id", 0)) for reply in replies] == [(m.Cancel, 77)]
    assert take(session, rows((77, 0, 1))) == []


def test_a_request_accepted_as_its_caller_leaves_is_cancelled(session: ClientSession) -> None:
    pending = session.expect(session.new_rid(), m.Accepted, "Submit")
    take(session, m.Accepted(rid=pending.rid, request_id=77, seed=1))
    assert [type(reply) for reply in session.forget(pending)] == [m.Cancel]


def test_late_and_unknown_messages_are_ignored(session: ClientSession) -> None:
    before = PendingCommand(999, m.Done, "Drain")
    assert take(session, m.Done(rid=999)) == []
    assert take(session, rows((5, 0, 1), ended=(end(5, 1),))) == []
    assert not before.done


@pytest.mark.parametrize(
    "frames",
    [
        [b""],
        [b"\xc1"],
        [b"\x81\xa1t\xa5hello"],
        [b"\x82\xa1t\xa4done\xa3rid\xa1x"],
        [b"\x82\xa1t\xa4done\xa3rid\x01", b"1234"],
        [b"\x81\xa1t\xa6stream", b"\0" * 8, b"", b"", b""],
        [b"\x81\xa1t\xa6stream", b"\0" * 7],
        [b"\x82\xa1t\xa5stats\xa3rid\x01"],
    ],
)
def test_bytes_that_are_no_message_are_a_protocol_error(session: ClientSession, frames: list[bytes]) -> None:
    track = accepted(session, 1)
    with pytest.raises(ProtocolError):
        session.receive(frames)
    assert track.tokens == []
    assert not track.done


def test_a_feed_gives_tokens_in_order_of_offset_and_then_the_error(session: ClientSession) -> None:
    a, b = accepted(session, 1), accepted(session, 2)
    calls = Client("ipc:///nowhere")._calls
    feed = MergedStream([Request(calls, a), Request(calls, b)])
    assert not feed.ready
    take(session, rows((1, 0, 10), (1, 1, 11), (2, 0, 20)))
    assert [(row.id, token.token_id) for row, token in feed.arrived()] == [(1, 10), (2, 20), (1, 11)]
    assert not feed.ready
    take(session, rows((2, 1, 21), ended=(end(1, 2),)))
    session.lost(CoordinatorUnavailable("gone"))
    assert [(row.id, token.token_id) for row, token in feed.arrived()] == [(2, 21)]
    assert list(feed.tracks) == [b]
    with pytest.raises(CoordinatorUnavailable):
        feed.arrived()


@pytest.mark.parametrize(
    ("prompt", "problem"),
    [
        ([], "empty"),
        ("text", "generate"),
        ([1, -2], "item 1 is -2"),
        ([1 << 31], "item 0 is 2147483648"),
        ([1 << 80], "item 0"),
        ([1.0], "item 0 is 1.0 .float"),
        ([1, True], "item 1 is True"),
        ([1, "2"], "item 1 is 2 .str"),
        ([None], "item 0"),
        ([[1]], "2 dimensions"),
        (np.zeros((2, 2), np.int32), "2 dimensions"),
        (np.array([0.5]), "item 0"),
        (5, "not a sequence"),
    ],
)
def test_wrong_prompts_are_named(prompt: Any, problem: str) -> None:
    with pytest.raises(InvalidRequest, match=problem) as raised:
        prompt_array(prompt)
    assert raised.value.field == "prompt"


@pytest.mark.parametrize("prompt", [[1, 2, 3], (1, 2, 3), range(1, 4), np.array([1, 2, 3], np.uint64)])
def test_good_prompts_become_int32(prompt: Any) -> None:
    ids = prompt_array(prompt)
    assert (ids.dtype.str, ids.tolist()) == ("<i4", [1, 2, 3])


@pytest.mark.parametrize(
    ("field", "arguments"),
    [
        ("max_tokens", {"max_tokens": 0}),
        ("max_tokens", {"max_tokens": True}),
        ("max_tokens", {"max_tokens": 1.5}),
        ("max_tokens", {"max_tokens": 1 << 31}),
        ("tenant", {"tenant": ""}),
        ("tenant", {"tenant": 3}),
        ("sampling", {"sampling": {"temperature": 0}}),
        ("sampling.temperature", {"sampling": SamplingParams(temperature=-1)}),
        ("sampling.temperature", {"sampling": SamplingParams(temperature=float("nan"))}),
        ("sampling.temperature", {"sampling": SamplingParams(temperature="hot")}),  # type: ignore[arg-type]
        ("sampling.seed", {"sampling": SamplingParams(seed=-1)}),
        ("sampling.seed", {"sampling": SamplingParams(seed=1 << 64)}),
        ("sampling.stop_tokens", {"sampling": SamplingParams(stop_tokens=(1, -1))}),
        ("sampling.stop_tokens", {"sampling": SamplingParams(stop_tokens="ab")}),  # type: ignore[arg-type]
        ("sampling.ignore_eos", {"sampling": SamplingParams(ignore_eos=1)}),  # type: ignore[arg-type]
    ],
)
def test_wrong_arguments_are_named(field: str, arguments: dict[str, Any]) -> None:
    good: dict[str, Any] = {"max_tokens": 1, "sampling": SamplingParams(), "tenant": "default"}
    RequestOptions(**good)
    with pytest.raises(InvalidRequest) as raised:
        RequestOptions(**{**good, **arguments})
    assert raised.value.field == field


def test_an_unknown_sampling_field_is_refused() -> None:
    with pytest.raises(TypeError, match="temprature"):
        SamplingParams(temprature=1.0)  # type: ignore[call-arg]
