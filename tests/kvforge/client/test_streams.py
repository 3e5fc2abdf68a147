"""Readers and offsets of streams: samples, attaching, repeated commands, streams that pause or are taken over."""

from __future__ import annotations

from typing import Any

import pytest

from kvforge import Client, Request
from kvforge.client.handles import MergedStream
from kvforge.client.pending import PendingCommand, RequestStream
from kvforge.client.results import finished, token_at
from kvforge.client.session import ClientSession
from kvforge.protocol import messages as m
from kvforge.protocol.errors import (
    Conflict,
    CoordinatorUnavailable,
    DeadlineExceeded,
    ProtocolError,
    RequestNotFound,
)
from tests.kvforge.client.test_session import accepted, end, rows, take


@pytest.fixture
def session() -> ClientSession:
    return ClientSession("ipc:///nowhere")


def submit(session: ClientSession, count: int = 1, key: bool = False) -> PendingCommand:
    pending = session.expect(session.new_rid(), m.Accepted, "Submit", count)
    pending.keyed = key
    return pending


def attach(session: ClientSession, request_id: int, offset: int) -> RequestStream:
    """Return the caller's result of an Attach that is answered at once."""
    pending = session.expect(session.new_rid(), m.Attached, "Attach")
    assert take(session, m.Attached(rid=pending.rid, request_id=request_id, seed=5, offset=offset)) == []
    (track,) = pending.tracks
    return track


def attaches(replies: list[m.Message]) -> list[tuple[int, int]]:
    """Return (request_id, offset) of the Attach messages that the session sent by itself."""
    assert all(isinstance(reply, m.Attach) for reply in replies)
    return [(reply.request_id, reply.offset) for reply in replies if isinstance(reply, m.Attach)]


def cancelled(replies: list[m.Message]) -> list[int]:
    assert all(isinstance(reply, m.Cancel) for reply in replies)
    return [reply.request_id for reply in replies if isinstance(reply, m.Cancel)]


def test_samples_are_requests_of_their_own(session: ClientSession) -> None:
    pending = submit(session, 3)
    assert take(session, m.Accepted(rid=pending.rid, request_id=10, seed=(1 << 64) - 2, count=3)) == []
    assert [(track.request_id, track.seed) for track in pending.tracks] == [
        (10, (1 << 64) - 2),
        (11, (1 << 64) - 1),
        (12, 0),
    ]
    take(session, rows((10, 0, 1), (12, 0, 3), (11, 0, 2), ended=(end(11, 1),)))
    assert [track.tokens for track in pending.tracks] == [[1], [2], [3]]
    assert [track.done for track in pending.tracks] == [False, True, False]


def test_giving_up_cancels_every_sample_that_still_runs(session: ClientSession) -> None:
    pending = submit(session, 3)
    take(session, m.Accepted(rid=pending.rid, request_id=10, seed=1, count=3))
    take(session, rows((11, 0, 2), ended=(end(11, 1),)))
    assert cancelled(session.forget(pending)) == [10, 12]


def test_samples_accepted_after_their_caller_left_are_all_cancelled(session: ClientSession) -> None:
    pending = submit(session, 3)
    assert session.forget(pending) == []
    late = take(session, m.Accepted(rid=pending.rid, request_id=10, seed=1, count=3))
    assert cancelled(late) == [10, 11, 12]
    assert session.running == ()


def test_another_number_of_requests_than_asked_for_is_an_error(session: ClientSession) -> None:
    pending = submit(session, 3)
    assert cancelled(take(session, m.Accepted(rid=pending.rid, request_id=10, seed=1))) == [10]
    with pytest.raises(ProtocolError, match="started 1 requests for a Submit of 3"):
        pending.answer(m.Accepted)
    assert session.running == ()


def test_an_attached_stream_begins_at_its_offset(session: ClientSession) -> None:
    track = attach(session, 7, 2)
    assert (track.start, track.reach, track.seed) == (2, 2, 5)
    assert take(session, rows((7, 1, 11), (7, 2, 12), (7, 3, 13))) == []
    assert token_at(track, 3).token_id == 13
    take(session, rows(ended=(end(7, 4),)))
    assert finished(track).tokens == (12, 13)
    assert finished(track, 3).tokens == (13,)
    assert finished(track, 9).tokens == ()


def test_a_gap_in_an_attached_stream_is_noticed(session: ClientSession) -> None:
    skipped, short, empty = attach(session, 7, 2), attach(session, 8, 2), attach(session, 9, 2)
    assert cancelled(take(session, rows((7, 2, 12), (7, 4, 14)))) == [7]
    with pytest.raises(ProtocolError, match="token 3 was due and token 4 came"):
        finished(skipped)
    take(session, rows((8, 2, 12), ended=(end(8, 4),)))
    with pytest.raises(ProtocolError, match="ended after 4 tokens and 3 came"):
        finished(short)
    take(session, rows((9, 3, 13), ended=(end(9, 4),)))
    with pytest.raises(ProtocolError, match="ended after 4 tokens and 2 came"):
        finished(empty)


def test_attaching_behind_the_end_gives_no_tokens(session: ClientSession) -> None:
    track = attach(session, 7, 100)
    take(session, rows((7, 3, 13), ended=(end(7, 50),)))
    assert finished(track, 100).tokens == ()
    assert finished(track).reason == "length"


def test_tokens_that_a_stop_took_back_are_taken_from_what_was_attached(session: ClientSession) -> None:
    track, behind = attach(session, 7, 2), attach(session, 8, 4)
    for request_id in (7, 8):
        ended = end(request_id, 3, "stop")
        fields = {name: getattr(ended, name) for name in m.Ended.__struct_fields__}
        items = [(request_id, offset, 10 + offset) for offset in range(2, 6)]
        take(session, rows(*items, ended=(m.Ended(**{**fields, "cut_tokens": 3}),)))
    assert finished(track).tokens == (12,)
    assert finished(behind).tokens == ()


@pytest.mark.parametrize(("again", "cut"), [(0, 0), (2, 0), (3, 0), (4, 1)])
def test_tokens_taken_back_before_the_stream_began_anew_are_not_missed(
    session: ClientSession, again: int, cut: int
) -> None:
    """A repeated submit by key, or an earlier offset, does not stream tokens that were rolled back meanwhile."""
    track = accepted(session, 7)
    take(session, rows(*[(7, offset, 10 + offset) for offset in range(5)]))
    attach(session, 7, again)
    fields = {name: getattr(end(7, 3, "stop"), name) for name in m.Ended.__struct_fields__}
    items = [(7, offset, 10 + offset) for offset in range(again, 3)]
    take(session, rows(*items, ended=(m.Ended(**{**fields, "cut_tokens": cut}),)))
    assert finished(track).tokens == (10, 11, 12)


@pytest.mark.parametrize("again", [None, 0])
def test_an_end_before_what_was_streamed_is_a_gap_all_the_same(session: ClientSession, again: int | None) -> None:
    """If the stream did not restart, or its rows since then stop before the offset of the end."""
    track = accepted(session, 7)
    take(session, rows(*[(7, offset, 10 + offset) for offset in range(5)]))
    if again is not None:
        attach(session, 7, again)
    take(session, rows(*([(7, 0, 10)] if again is not None else []), ended=(end(7, 3, "stop"),)))
    with pytest.raises(ProtocolError, match="ended after 3 tokens and 5 came"):
        finished(track)


def test_tokens_that_count_are_missed_whatever_was_taken_back(session: ClientSession) -> None:
    track = accepted(session, 7)
    fields = {name: getattr(end(7, 3, "stop"), name) for name in m.Ended.__struct_fields__}
    take(session, rows((7, 0, 10), (7, 1, 11), ended=(m.Ended(**{**fields, "cut_tokens": 2}),)))
    with pytest.raises(ProtocolError, match="ended after 3 tokens and 2 came"):
        finished(track)


def test_what_this_connection_reads_already_needs_no_command(session: ClientSession) -> None:
    track = accepted(session, 7)
    assert session.tracked(7, 0) is track
    assert session.tracked(7, 50) is track
    late = attach(session, 8, 5)
    assert session.tracked(8, 5) is late
    assert session.tracked(8, 4) is None
    take(session, rows(ended=(end(7, 0),)))
    assert session.tracked(7, 0) is None  # ended here, but the coordinator still has it


def test_an_earlier_offset_is_a_stream_of_its_own(session: ClientSession) -> None:
    late = attach(session, 7, 3)
    take(session, rows((7, 3, 13), (7, 4, 14)))
    early = attach(session, 7, 0)
    assert early is not late
    assert take(session, rows(*((7, offset, 10 + offset) for offset in range(6)), ended=(end(7, 6),))) == []
    assert late.tokens == [13, 14, 15]
    assert early.tokens == [10, 11, 12, 13, 14, 15]
    assert finished(late).reason == finished(early).reason == "length"


def test_a_later_offset_that_was_under_way_does_not_tear_the_stream(session: ClientSession) -> None:
    first = session.expect(session.new_rid(), m.Attached, "Attach")
    second = session.expect(session.new_rid(), m.Attached, "Attach")
    take(session, m.Attached(rid=first.rid, request_id=7, seed=5, offset=0))
    take(session, rows((7, 0, 10)))
    moved = take(session, m.Attached(rid=second.rid, request_id=7, seed=5, offset=4))
    assert attaches(moved) == [(7, 1)]
    assert first.tracks == second.tracks
    assert take(session, rows((7, 4, 14), ended=(end(7, 5),))) == []  # sent before the stream's offset was reset
    (track,) = first.tracks
    assert (track.tokens, track.done) == ([10], False)
    take(session, m.Attached(rid=getattr(moved[0], "rid", 0), request_id=7, seed=5, offset=1))
    take(session, rows(*((7, offset, 10 + offset) for offset in range(1, 5)), ended=(end(7, 5),)))
    assert finished(track).tokens == (10, 11, 12, 13, 14)


def test_giving_up_an_attach_cancels_nothing(session: ClientSession) -> None:
    before = session.expect(session.new_rid(), m.Attached, "Attach")
    assert session.forget(before) == []
    assert take(session, m.Attached(rid=before.rid, request_id=7, seed=5, offset=0)) == []
    assert take(session, rows((7, 0, 10), ended=(end(7, 1),))) == []
    after = session.expect(session.new_rid(), m.Attached, "Attach")
    take(session, m.Attached(rid=after.rid, request_id=8, seed=5, offset=0))
    assert session.forget(after) == []


def test_a_feed_of_handles_on_one_stream_gives_each_its_own_part(session: ClientSession) -> None:
    calls = Client("ipc:///nowhere")._calls
    track = accepted(session, 7)
    whole, rest = Request(calls, track), Request(calls, track, 2)
    feed = MergedStream([whole, rest])
    take(session, rows((7, 0, 10), (7, 1, 11)))
    assert [(request is whole, token.offset) for request, token in feed.arrived()] == [(True, 0), (True, 1)]
    assert not feed.ready
    take(session, rows((7, 2, 12), ended=(end(7, 3),)))
    assert [(request is whole, token.token_id) for request, token in feed.arrived()] == [(True, 12), (False, 12)]
    assert (whole.tokens, rest.tokens) == ((10, 11, 12), (12,))
    assert not feed.tracks


def test_a_paused_stream_is_taken_up_where_it_stopped(session: ClientSession) -> None:
    track, other = accepted(session, 7), attach(session, 8, 5)
    take(session, rows((7, 0, 10), (8, 5, 15)))
    over = accepted(session, 9)
    take(session, rows(ended=(end(9, 0),)))
    replies = take(session, m.Stream(paused=(7, 8, 9, 99)))
    assert attaches(replies) == [(7, 1), (8, 6)]
    for reply in replies:
        assert isinstance(reply, m.Attach)
        attached = m.Attached(rid=reply.rid, request_id=reply.request_id, seed=5, offset=reply.offset)
        assert take(session, attached) == []
    assert take(session, rows((7, 0, 10), (7, 1, 11), (8, 6, 16), ended=(end(7, 2), end(8, 7)))) == []
    assert finished(track).tokens == (10, 11)
    assert finished(other).tokens == (15, 16)
    assert finished(over).tokens == ()


def test_a_paused_stream_that_is_refused_ends_with_that_error(session: ClientSession) -> None:
    track = accepted(session, 7)
    take(session, rows((7, 0, 10)))
    (reply,) = take(session, m.Stream(paused=(7,)))
    woken: list[int] = []
    track.wakers.add(lambda: woken.append(1))
    take(session, m.Refused(rid=getattr(reply, "rid", 0), error=m.ErrorInfo.of(RequestNotFound(7))))
    with pytest.raises(RequestNotFound):
        finished(track)
    assert (track.tokens, woken, session.running) == ([10], [1], ())


def test_a_connection_that_ends_while_a_stream_is_paused(session: ClientSession) -> None:
    track = accepted(session, 7)
    take(session, m.Stream(paused=(7,)))
    session.lost(CoordinatorUnavailable("gone"))
    with pytest.raises(CoordinatorUnavailable):
        finished(track)
    again = accepted(session, 7)  # a restarted coordinator knows nothing of the Attach
    take(session, rows((7, 0, 10), ended=(end(7, 1),)))
    assert finished(again).tokens == (10,)


def test_a_stream_that_another_connection_took(session: ClientSession) -> None:
    track, other = accepted(session, 7), accepted(session, 8)
    message = rows((7, 0, 10))
    fields: dict[str, Any] = {name: getattr(message, name) for name in message.__struct_fields__}
    assert take(session, m.Stream(**{**fields, "taken": (7, 99)})) == []
    with pytest.raises(Conflict, match="request 7 is read by another connection now; attach again to take it back"):
        finished(track)
    assert track.tokens == [10]
    assert not other.done
    back = attach(session, 7, track.reach)
    take(session, rows((7, 1, 11), ended=(end(7, 2),)))
    assert finished(back).tokens == (11,)


def test_a_stream_that_was_taken_before_our_attach_arrives_comes_back_with_it(session: ClientSession) -> None:
    track = accepted(session, 7)
    (reply,) = take(session, m.Stream(paused=(7,)))
    take(session, m.Stream(taken=(7,)))
    assert not track.done
    take(session, m.Attached(rid=getattr(reply, "rid", 0), request_id=7, seed=5, offset=0))
    take(session, rows((7, 0, 10), ended=(end(7, 1),)))
    assert finished(track).tokens == (10,)


def test_a_repeated_command_reads_the_stream_that_is_there(session: ClientSession) -> None:
    first = submit(session, 2, key=True)
    take(session, m.Accepted(rid=first.rid, request_id=7, seed=5, count=2))
    take(session, rows((7, 0, 10), ended=(end(8, 0),)))
    again = submit(session, 2, key=True)
    take(session, m.Accepted(rid=again.rid, request_id=7, seed=5, count=2, repeated=True))
    assert again.tracks[0] is first.tracks[0]
    assert again.tracks[1] is not first.tracks[1]  # the first had ended: a new track
    take(session, rows((7, 0, 10), (7, 1, 11), ended=(end(7, 2), end(8, 0))))
    assert [finished(track).tokens for track in again.tracks] == [(10, 11), ()]


def test_giving_up_a_repeated_command_leaves_what_was_there(session: ClientSession) -> None:
    before = submit(session)
    take(session, m.Accepted(rid=before.rid, request_id=7, seed=5, repeated=True))
    assert session.forget(before) == []
    late = submit(session)
    session.forget(late)
    assert take(session, m.Accepted(rid=late.rid, request_id=7, seed=5, repeated=True)) == []


def test_giving_up_a_command_with_a_key_leaves_it_for_its_repetition(session: ClientSession) -> None:
    lost = submit(session, key=True)
    assert session.forget(lost) == []
    assert take(session, m.Accepted(rid=lost.rid, request_id=7, seed=5)) == []
    take(session, rows((7, 0, 10)))
    again = submit(session, key=True)
    take(session, m.Accepted(rid=again.rid, request_id=7, seed=5, repeated=True))
    take(session, rows((7, 0, 10), (7, 1, 11), ended=(end(7, 2),)))
    assert finished(again.tracks[0]).tokens == (10, 11)


def test_a_request_that_expired_raises_what_the_coordinator_said(session: ClientSession) -> None:
    track = accepted(session, 7)
    error = m.ErrorInfo.of(DeadlineExceeded("request 7 had no token after 50 ms"))
    take(session, rows(ended=(end(7, 0, "expired", error),)))
    with pytest.raises(DeadlineExceeded, match="no token after 50 ms"):
        finished(track)


def test_rows_from_before_an_attach_may_come_after_its_answer(session: ClientSession) -> None:
    late = attach(session, 7, 2)
    take(session, rows((7, 2, 12)))
    early = attach(session, 7, 0)
    assert take(session, rows((7, 3, 13), (7, 0, 10), (7, 1, 11), (7, 2, 12), (7, 3, 13), ended=(end(7, 4),))) == []
    assert finished(early).tokens == (10, 11, 12, 13)
    assert finished(late).tokens == (12, 13)


def test_rows_that_come_with_the_pause_may_lack_those_before_them(session: ClientSession) -> None:
    track = accepted(session, 7)
    take(session, rows((7, 0, 10)))
    message = rows((7, 2, 12))
    fields: dict[str, Any] = {name: getattr(message, name) for name in message.__struct_fields__}
    assert attaches(take(session, m.Stream(**{**fields, "paused": (7,)}))) == [(7, 1)]
    assert (track.tokens, track.done) == ([10], False)
