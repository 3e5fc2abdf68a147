"""Resumption of a session on a new connection, and the fate of all waiting commands."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pytest

from kvforge.client.pending import PendingCommand, RequestStream
from kvforge.client.results import finished
from kvforge.client.session import UNANSWERED_MAX, ClientSession
from kvforge.coordinator.core.limits import Bounds
from kvforge.protocol import messages as m
from kvforge.protocol.errors import AlreadyFinished, Conflict, CoordinatorUnavailable, RequestNotFound, StateLost
from tests.kvforge.client.test_session import accepted, end, rows, take

PROMPT = np.array([1], np.int32)


@pytest.fixture
def session() -> ClientSession:
    made = ClientSession("ipc:///nowhere")
    assert reconnected(made, resumed=False) == []
    return made


def reconnected(session: ClientSession, *, resumed: bool) -> list[m.Message]:
    hello = session.expect(session.new_rid(), m.Welcome, "Hello")
    return take(session, m.Welcome(rid=hello.rid, version=1, boot="abc", tables_path="/t", resumed=resumed))


def sent(session: ClientSession, message: m.Message, expects: type[m.Message], count: int = 1) -> PendingCommand:
    pending = session.expect(message.rid, expects, type(message).__name__, count)  # type: ignore[attr-defined]
    pending.sent = message
    pending.keyed = isinstance(message, m.Submit) and bool(message.key)
    return pending


def submitted(session: ClientSession, key: str = "", count: int = 1) -> PendingCommand:
    return sent(
        session, m.Submit(rid=session.new_rid(), max_tokens=3, key=key, count=count, prompt=PROMPT), m.Accepted, count
    )


def attaches(messages: Sequence[m.Message]) -> list[tuple[int, int, bool]]:
    return [(one.request_id, one.offset, one.resume) for one in messages if isinstance(one, m.Attach)]


def attached(attach: m.Message, offset: int | None = None) -> m.Attached:
    assert isinstance(attach, m.Attach)
    return m.Attached(
        rid=attach.rid, request_id=attach.request_id, seed=5, offset=attach.offset if offset is None else offset
    )


def test_the_name_lasts_as_long_as_what_is_kept_for_it(session: ClientSession) -> None:
    name = session.name
    assert (len(name), int(name, 16) >= 0, ClientSession("x").name != name) == (32, True, True)
    session.interrupt()
    assert (session.name, session.interrupted, session.welcome) == (name, True, None)
    reconnected(session, resumed=True)
    assert (session.name, session.interrupted) == (name, False)
    session.lost(CoordinatorUnavailable("gone"))
    assert session.name != name


def test_commands_without_an_answer_are_sent_again_in_their_order_with_their_rids(session: ClientSession) -> None:
    first = sent(session, m.Append(rid=session.new_rid()), m.Appended)
    answered = sent(session, m.GetStats(rid=session.new_rid()), m.Stats)
    take(session, m.Refused(rid=answered.rid, error=m.ErrorInfo.of(Conflict("no"))))
    unsent = session.expect(session.new_rid(), m.Done, "Drain")
    second = sent(session, m.Drain(rid=session.new_rid()), m.Done)
    session.interrupt()
    assert not first.done
    assert reconnected(session, resumed=True) == [first.sent, second.sent]
    take(session, m.Appended(rid=first.rid, lengths=np.array([4], np.int32)))
    assert first.answer(m.Appended).lengths.tolist() == [4]
    assert (second.done, unsent.done) == (False, False)


@pytest.mark.parametrize("resumed", [True, False])
def test_streams_go_on_where_they_stopped_and_rows_of_the_old_place_are_skipped(
    session: ClientSession, resumed: bool
) -> None:
    track = accepted(session, 7)
    take(session, rows((7, 0, 10), (7, 1, 11)))
    over = accepted(session, 8)
    take(session, rows(ended=(end(8, 0),)))
    session.interrupt()
    messages = reconnected(session, resumed=resumed)
    assert attaches(messages) == [(7, 2, resumed)]
    take(session, rows((7, 5, 15), (7, 6, 16), ended=(end(7, 7),)))  # rows before the answer are outdated
    assert (track.tokens, track.done) == ([10, 11], False)
    take(session, attached(messages[0]))
    take(session, rows((7, 2, 12), (7, 3, 13), ended=(end(7, 4),)))
    assert finished(track).tokens == (10, 11, 12, 13)
    assert finished(over).tokens == ()


def test_a_connection_that_is_lost_again_and_again(session: ClientSession) -> None:
    track = accepted(session, 7)
    for token in range(5):
        session.interrupt()
        session.interrupt()
        (attach,) = reconnected(session, resumed=True)
        assert attaches([attach]) == [(7, token, True)]
        take(session, attached(attach))
        take(session, rows((7, token, token)))
    take(session, rows(ended=(end(7, 5),)))
    assert finished(track).tokens == (0, 1, 2, 3, 4)


def test_the_streams_of_a_submit_whose_answer_was_lost_are_read_from_their_first_token(session: ClientSession) -> None:
    pending = submitted(session, count=2)
    session.interrupt()
    assert reconnected(session, resumed=True) == [pending.sent]
    replies = take(session, m.Accepted(rid=pending.rid, request_id=4, seed=1, count=2))
    assert attaches(replies) == [(4, 0, True), (5, 0, True)]
    take(session, rows((4, 2, 12)))  # the first two were sent on the lost connection
    for reply in replies:
        take(session, attached(reply))
    take(session, rows((4, 0, 10), (4, 1, 11), (4, 2, 12), ended=(end(4, 3), end(5, 0))))
    assert [finished(track).tokens for track in pending.tracks] == [(10, 11, 12), ()]


def test_an_attach_whose_answer_was_lost_is_read_from_its_offset(session: ClientSession) -> None:
    pending = sent(session, m.Attach(rid=session.new_rid(), request_id=4, offset=3), m.Attached)
    session.interrupt()
    assert reconnected(session, resumed=True) == [pending.sent]
    (reply,) = take(session, m.Attached(rid=pending.rid, request_id=4, seed=1, offset=3))
    assert attaches([reply]) == [(4, 3, True)]
    take(session, attached(reply))
    take(session, rows((4, 3, 13), ended=(end(4, 4),)))
    assert pending.tracks[0].tokens == [13]


def test_a_coordinator_that_has_forgotten_us(session: ClientSession) -> None:
    keyed, plain = submitted(session, key="k"), submitted(session)
    asked = sent(session, m.GetRequest(rid=session.new_rid(), request_id=3), m.RequestInfo)
    made = sent(session, m.CreateSequence(rid=session.new_rid()), m.SequenceInfo)
    appended = sent(session, m.Append(rid=session.new_rid()), m.Appended)
    woken: list[str] = []
    plain.wakers.add(lambda: woken.append("plain"))
    session.interrupt()
    assert reconnected(session, resumed=False) == [keyed.sent, asked.sent]
    assert woken == ["plain"]
    for failed, words in ((plain, "Submit .*key"), (made, "CreateSequence .*check"), (appended, "Append .*length")):
        with pytest.raises(CoordinatorUnavailable, match=words):
            failed.answer(failed.expects)
    assert take(session, m.Accepted(rid=keyed.rid, request_id=9, seed=1, repeated=True)) == []
    assert [track.request_id for track in keyed.tracks] == [9]


def test_a_request_that_a_coordinator_has_forgotten_fails_by_name(session: ClientSession) -> None:
    track = accepted(session, 7)
    session.interrupt()
    (attach,) = reconnected(session, resumed=False)
    take(session, m.Refused(rid=attach.rid, error=m.ErrorInfo.of(RequestNotFound(7))))  # type: ignore[attr-defined]
    with pytest.raises(RequestNotFound):
        finished(track)


def test_a_submit_that_was_given_up_is_asked_for_again_and_cancelled(session: ClientSession) -> None:
    pending = submitted(session)
    assert session.forget(pending) == []
    session.interrupt()
    assert reconnected(session, resumed=True) == [pending.sent]
    (cancel,) = take(session, m.Accepted(rid=pending.rid, request_id=4, seed=1))
    assert isinstance(cancel, m.Cancel)
    assert cancel.request_id == 4
    # An unanswered cancel is resent too.
    session.interrupt()
    assert reconnected(session, resumed=True) == [cancel]
    take(session, m.Refused(rid=cancel.rid, error=m.ErrorInfo.of(AlreadyFinished(4, "finished"))))
    session.interrupt()
    assert reconnected(session, resumed=True) == []


def test_a_submit_that_was_given_up_ends_with_a_session_that_is_forgotten(session: ClientSession) -> None:
    session.forget(submitted(session))
    session.interrupt()
    assert reconnected(session, resumed=False) == []


def test_a_request_that_is_cancelled_while_there_is_no_connection(session: ClientSession) -> None:
    track = accepted(session, 7)
    session.interrupt()
    (cancel,) = session.cancel((7,))
    messages = reconnected(session, resumed=True)
    assert messages[0] is cancel
    assert attaches(messages) == [(7, 0, True)]
    take(session, m.Done(rid=cancel.rid))  # type: ignore[attr-defined]
    take(session, attached(messages[1]))
    take(session, rows(ended=(end(7, 0, "cancelled"),)))
    assert finished(track).reason == "cancelled"


def test_losing_all_after_an_interruption_fails_everything(session: ClientSession) -> None:
    track, pending = accepted(session, 7), submitted(session)
    session.interrupt()
    session.lost(StateLost("a", "b"))
    assert not session.interrupted
    for wait in (lambda: finished(track), lambda: pending.answer(m.Accepted)):
        with pytest.raises(StateLost):
            wait()
    assert reconnected(session, resumed=False) == []


def test_a_track_of_an_interrupted_session_is_the_one_that_attach_gives(session: ClientSession) -> None:
    track: RequestStream = accepted(session, 7)
    session.interrupt()
    assert session.tracked(7, 0) is track


def test_no_more_commands_are_under_way_than_answers_are_kept(session: ClientSession) -> None:
    pendings = [session.expect(session.new_rid(), m.Done, "Drain") for _ in range(UNANSWERED_MAX + 2)]
    assert [session.has_room(pending.rid) for pending in pendings[-3:]] == [True, False, False]
    take(session, m.Done(rid=pendings[1].rid))
    assert not session.has_room(pendings[-2].rid)
    take(session, m.Done(rid=pendings[0].rid))
    assert [session.has_room(pending.rid) for pending in pendings[-2:]] == [True, True]
    assert Bounds().answers_kept_max > UNANSWERED_MAX
