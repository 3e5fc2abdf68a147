"""Parsing of an answer's bytes, however they are split."""

from __future__ import annotations

import json

import numpy as np
import pytest

from kvforge.loadtest.drive import http_answer
from kvforge.loadtest.drive.http_answer import Answer
from kvforge.loadtest.drive.http_wire import encode, token_ids
from kvforge.loadtest.drive.outcome import FAILED, FINISHED, REFUSED, RUNNING, Outcome

from .raw_http import DONE, event, stream, usage


def read(*pieces: bytes, asked: int = 3, status: int = 200, whole: bool = True) -> tuple[Outcome, tuple[str, str, str]]:
    """Return the outcome and the end of an answer that arrives in these pieces, one a second."""
    outcome = Outcome(session=0, due_s=0.0, state=RUNNING, asked_tokens=asked)
    answer = Answer(outcome, 100.0, whole=whole)
    answer.head(status, 101.0)
    for i, piece in enumerate(pieces):
        answer.body(piece, 102.0 + i)
    answer.complete(102.0 + len(pieces))
    assert answer.end is not None
    return outcome, answer.end


def test_an_answer_split_at_any_byte_is_the_same() -> None:
    data = b": a comment\r\n\r\nevent: message\n" + stream(3).replace(b"\n\n", b"\r\n\r\n", 2)
    for at in range(len(data) + 1):
        outcome, end = read(data[:at], data[at:])
        assert (end, len(outcome.tokens_s), outcome.cached_tokens) == ((FINISHED, "", ""), 3, 2)
    outcome, end = read(*(data[i : i + 1] for i in range(len(data))))
    assert (end, len(outcome.tokens_s)) == ((FINISHED, "", ""), 3)


def test_an_event_is_stamped_when_its_last_byte_came() -> None:
    first, rest = event(), event() + event("z", "length") + event(None, usage=usage(3)) + DONE
    outcome, _ = read(first[:9], first[9:], rest[:5], rest[5:])
    assert list(outcome.tokens_s) == [3.0, 5.0, 5.0]
    assert outcome.accepted_s == 1.0


def test_tokens_that_shared_an_event_are_stamped_with_the_last() -> None:
    outcome, end = read(event("a"), event("bcd", "length"), event(None, usage=usage(5)), DONE, asked=5)
    assert end[0] == FINISHED
    assert list(outcome.tokens_s) == [2.0, 3.0, 3.0, 3.0, 3.0]


def test_a_server_that_counts_in_each_event_says_when_each_token_came() -> None:
    outcome, end = read(event("ab", usage=usage(2)), event("cde", usage=usage(5)), event("", "length", usage=usage(5)))
    assert end == (FAILED, "protocol_error", "5 tokens were generated, but only 3 were requested")
    outcome, end = read(event("ab", usage=usage(2)), event("cde", "length", usage=usage(5)), DONE, asked=5)
    assert list(outcome.tokens_s) == [2.0, 2.0, 3.0, 3.0, 3.0]


def test_token_ids_are_kept() -> None:
    def ids(*numbers: int, finish: str | None = None) -> bytes:
        choice = {"text": "x", "token_ids": numbers, "finish_reason": finish}
        return b"data: " + json.dumps({"choices": [choice]}).encode() + b"\n\n"

    outcome, end = read(ids(4, 5), ids(6, finish="length"), event(None, usage=usage(3)), DONE)
    assert (end[0], list(outcome.tokens), list(outcome.tokens_s)) == (FINISHED, [4, 5, 6], [2.0, 2.0, 3.0])
    assert read(ids(1 << 40), DONE)[1][:2] == (FAILED, "protocol_error")


def test_what_opens_and_closes_a_chat_is_no_token() -> None:
    def said(delta: dict[str, str], finish: str | None = None) -> bytes:
        return b"data: " + json.dumps({"choices": [{"delta": delta, "finish_reason": finish}]}).encode() + b"\n\n"

    opened = said({"role": "assistant", "content": ""})
    outcome, end = read(
        opened, said({"reasoning_content": "a"}), said({"content": "b"}), said({}, "length"), DONE, asked=2
    )
    assert (end[0], list(outcome.tokens_s)) == (FINISHED, [3.0, 4.0])
    # Ollama sends the role in each event, and the reasoning in `reasoning`.
    thought, word = ({"role": "assistant", "content": "", "reasoning": "a"}, {"role": "assistant", "content": "b"})
    outcome, end = read(said(thought), said(word), said({"role": "assistant"}, "length"), DONE, asked=2)
    assert (end[0], len(outcome.tokens_s)) == (FINISHED, 2)
    # A part of a character is a token without text.
    outcome, end = read(opened, said({"content": ""}), said({"content": "b"}, "length"), DONE, asked=2)
    assert (end[0], list(outcome.tokens_s)) == (FINISHED, [3.0, 4.0])


def test_fewer_tokens_than_asked_for_are_a_failure_where_the_server_was_told_to_go_on() -> None:
    early = event() + event("", "stop") + event(None, usage=usage(1)) + DONE
    outcome, end = read(early)
    assert (end[:2], len(outcome.tokens_s)) == ((FAILED, "stop"), 1)
    assert read(early, whole=False)[1][:2] == (FINISHED, "stop")


def test_without_usage_events_are_counted_and_the_outcome_says_so() -> None:
    outcome, end = read(event("ab"), event("c", "length"), DONE)
    assert (end[0], len(outcome.tokens_s)) == (FINISHED, 2)
    assert "no usage" in end[2]
    assert read(event("a"), event("b", "stop"), DONE)[1][:2] == (FAILED, "stop")


def test_done_twice_or_never() -> None:
    assert read(stream(3) + DONE + b"data: {garbage\n\n")[1] == (FINISHED, "", "")
    assert read(stream(3).removesuffix(DONE))[1] == (FINISHED, "", "")
    assert read(stream(3).removesuffix(b"\n\n"))[1] == (FINISHED, "", "")
    state, code, message = read(event() * 3)[1]
    assert (state, code) == (FAILED, "protocol_error")
    assert "[DONE]" in message


@pytest.mark.parametrize(
    "body",
    [
        b"data: {\n\n",
        b"data: \xff\xfe\n\n",
        b"data: []\n\n",
        b'data: {"choices": [{"text": 7}]}\n\n',
        event(None, usage={"completion_tokens": -1}),
        event() * 100,
        b'{"id": "1", "choices": [{"text": "a whole answer"}]}',
        b"<html>\n<p>no events</p>",
        b"",
    ],
)
def test_what_is_no_answer_is_a_failure(body: bytes) -> None:
    assert read(body)[1][:2] == (FAILED, "protocol_error")


def test_a_line_without_an_end_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(http_answer, "LINE_BYTES_MAX", 10_000)
    outcome = Outcome(session=0, due_s=0.0, asked_tokens=1)
    answer = Answer(outcome, 0.0, whole=True)
    answer.head(200, 1.0)
    came = 0
    while answer.end is None:
        answer.body(b"data: " + b"x" * 994, 2.0)
        came += 1000
    assert (answer.end[0], came) == (FAILED, 11_000)


@pytest.mark.parametrize(
    ("status", "body", "end"),
    [
        (
            400,
            b'{"error": {"message": "too\\n long", "type": "invalid", "code": "context_length_exceeded"}}',
            (FAILED, "context_length_exceeded", "too long"),
        ),
        (400, b'{"object": "error", "message": "too long", "code": 400}', (FAILED, "http_400", "too long")),
        (404, b'{"detail": "Not Found"}', (FAILED, "http_404", "Not Found")),
        (
            429,
            b'{"error": {"message": "slower", "code": "rate_limit_exceeded"}}',
            (REFUSED, "rate_limit_exceeded", "slower"),
        ),
        (503, b'{"error": "no slot"}', (REFUSED, "http_503", "no slot")),
        (500, b"<html> \xff</html>", (FAILED, "http_500", "<html> \ufffd</html>")),
        (502, b"", (FAILED, "http_502", "HTTP status 502")),
        (302, b"", (FAILED, "http_302", "HTTP status 302")),
    ],
)
def test_errors_by_status_and_body(status: int, body: bytes, end: tuple[str, str, str]) -> None:
    for at in (0, len(body) // 2):
        assert read(body[:at], body[at:], status=status)[1] == end


def test_an_error_within_an_answer() -> None:
    error = b'data: {"error": {"message": "out of memory", "type": "server", "code": 500}}\n\n'
    outcome, end = read(event(), error, DONE)
    assert (end, len(outcome.tokens_s)) == ((FAILED, "server", "out of memory"), 1)


def test_an_endless_error_is_not_kept() -> None:
    _, (state, code, message) = read(*[b"x" * 50_000] * 20, status=500)
    assert (state, code, len(message)) == (FAILED, "http_500", 500)


@pytest.mark.parametrize("ids", [[], [0], [5, 99, 262_143, 7], [1, 262_144], [-1, 3]])
def test_token_ids_are_written_as_json(ids: list[int]) -> None:
    assert json.loads(encode({"prompt": token_ids(np.array(ids, np.int32))})) == {"prompt": ids}
