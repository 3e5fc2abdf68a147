"""Log-probabilities of a prompt in a client's session, without sockets."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from kvforge import SamplingParams
from kvforge.client.options import RequestOptions
from kvforge.client.pending import RequestStream
from kvforge.client.results import ScoredToken, finished
from kvforge.client.session import ClientSession
from kvforge.protocol import messages as m
from kvforge.protocol.errors import InvalidRequest, ProtocolError
from tests.kvforge.client.test_session import end, take

PROMPT = np.array([5, 6, 7, 8], np.int32)


@pytest.fixture
def session() -> ClientSession:
    return ClientSession("ipc:///nowhere")


def submitted(session: ClientSession, count: int = 1, repeated: bool = False) -> tuple[RequestStream, ...]:
    """Submit a request that wants log-probabilities of its prompt, as request 7 and those behind it."""
    options = RequestOptions(max_tokens=2, sampling=SamplingParams(prompt_logprobs=1))
    pending = session.expect(session.new_rid(), m.Accepted, "Submit", count)
    pending.sent = options.command(pending.rid, PROMPT, 0, count)
    accepted = m.Accepted(rid=pending.rid, request_id=7, seed=5, count=count, repeated=repeated)
    assert take(session, accepted) == []
    pending.answer(m.Accepted)
    return pending.tracks


def rows(*offsets: int, request_id: int = 7, ended: tuple[m.Ended, ...] = (), **changes: Any) -> m.Stream:
    """Build rows of request 7: prompt tokens at negative offsets with one top token, then generated tokens."""
    tops = [int(offset < 0) for offset in offsets]
    values = {
        "request_ids": np.full(len(offsets), request_id, np.int64),
        "offsets": np.array(offsets, np.int32),
        "tokens": np.array([PROMPT[offset] if offset < 0 else 40 + offset for offset in offsets], np.int32),
        "logprobs": np.array(offsets, np.float32),
        "top_counts": np.array(tops, np.int32),
        "top_tokens": np.array([90 - offset for offset in offsets if offset < 0], np.int32),
        "top_logprobs": np.zeros(sum(tops), np.float32),
        "ranks": np.array([-offset if offset < 0 else 0 for offset in offsets], np.int32),
    }
    return m.Stream(ended=ended, **{**values, **changes})


def expected(*offsets: int) -> tuple[ScoredToken, ...]:
    return tuple(
        ScoredToken(4 + offset, int(PROMPT[offset]), float(offset), -offset, ((90 - offset, 0.0),))
        for offset in offsets
    )


def test_they_come_before_the_tokens_and_apart_from_them(session: ClientSession) -> None:
    (track,) = submitted(session)
    assert track.due == -3 and track.reach == 0
    take(session, rows(-3, -2))
    assert track.due == -1 and track.tokens == []
    take(session, rows(-1, 0, 1, ended=(end(7, 2),)))
    done = finished(track)
    assert done.prompt_logprobs == expected(-3, -2, -1)
    assert (done.tokens, done.logprobs, done.top_logprobs) == ((40, 41), (0.0, 1.0), ((), ()))


def test_repeated_rows_change_nothing(session: ClientSession) -> None:
    (track,) = submitted(session)
    take(session, rows(-3, -2))
    take(session, rows(-3, -2, -1))
    assert track.prompt is not None and track.prompt.tokens == [6, 7, 8]


def test_a_missing_row_ends_the_request_with_an_error(session: ClientSession) -> None:
    (track,) = submitted(session)
    (cancel,) = take(session, rows(-3, -1))
    assert isinstance(cancel, m.Cancel)
    with pytest.raises(ProtocolError, match="prompt token -2 was due and -1 came"):
        finished(track)


@pytest.mark.parametrize(("reason", "whole"), [("length", False), ("stop", False), ("cancelled", True)])
def test_an_end_in_the_middle_of_a_prompt(reason: str, whole: bool, session: ClientSession) -> None:
    (track,) = submitted(session)
    take(session, rows(-3, ended=(end(7, 0, reason),)))
    if whole:
        assert finished(track).prompt_logprobs == expected(-3)
    else:
        with pytest.raises(ProtocolError, match="ended before 2 log-probabilities"):
            finished(track)


def test_a_lost_connection_resumes_in_the_middle_of_a_prompt(session: ClientSession) -> None:
    (track,) = submitted(session)
    take(session, rows(-3))
    session.interrupt()
    hello = session.expect(session.new_rid(), m.Welcome, "Hello")
    (attach,) = take(session, m.Welcome(rid=hello.rid, version=1, boot="b", tables_path="", resumed=True))
    assert isinstance(attach, m.Attach) and (attach.offset, attach.resume) == (-2, True)
    take(session, rows(-1))  # from before the answer: outdated
    take(session, m.Attached(rid=attach.rid, request_id=7, seed=5, offset=-2))
    take(session, rows(-2, -1, 0, 1, ended=(end(7, 2),)))
    assert finished(track).prompt_logprobs == expected(-3, -2, -1)
    assert finished(track).tokens == (40, 41)


def test_a_row_that_a_signal_interrupted_is_read_again(session: ClientSession) -> None:
    (track,) = submitted(session)
    take(session, rows(-3))
    assert track.prompt is not None
    track.prompt.tokens.append(7)
    session.interrupt()
    assert track.due == -2


def test_a_repeated_command_reads_the_prompt_again(session: ClientSession) -> None:
    (track,) = submitted(session, repeated=True)
    take(session, rows(-3, -2, -1, 0, 1, ended=(end(7, 2),)))
    assert finished(track).prompt_logprobs == expected(-3, -2, -1)


def test_only_the_first_of_several_answers_has_them(session: ClientSession) -> None:
    first, second = submitted(session, count=2)
    take(session, rows(0, request_id=8))
    assert first.prompt is not None and second.prompt is None and second.tokens == [40]


def test_ranks_of_another_length_are_refused(session: ClientSession) -> None:
    submitted(session)
    with pytest.raises(ProtocolError, match="ranks has 1 entries, tokens 2"):
        take(session, rows(-3, -2, ranks=np.ones(1, np.int32)))


@pytest.mark.parametrize(
    ("options", "named"),
    [
        ({"max_tokens": 0}, "max_tokens"),
        ({"max_tokens": -1, "sampling": SamplingParams(prompt_logprobs=0)}, "max_tokens"),
        ({"sampling": SamplingParams(prompt_logprobs=21)}, "sampling.prompt_logprobs"),
        ({"sampling": SamplingParams(prompt_logprobs=-1)}, "sampling.prompt_logprobs"),
    ],
)
def test_what_is_refused_before_it_is_sent(options: dict[str, Any], named: str) -> None:
    with pytest.raises(InvalidRequest) as caught:
        RequestOptions(**options)
    assert caught.value.fields["field"] == named


def test_no_token_is_generated_if_only_the_prompt_is_wanted() -> None:
    options = RequestOptions(max_tokens=0, sampling=SamplingParams(prompt_logprobs=2))
    command = options.command(1, PROMPT, 0, 1)
    assert (command.max_tokens, command.sampling.prompt_logprobs) == (0, 2)
