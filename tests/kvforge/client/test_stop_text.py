"""Stop strings and top log-probabilities on the client's side: the text watcher, the session, both clients, the CLI."""

from __future__ import annotations

import asyncio
import io
import itertools
import json
import math
import random
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

pytest.importorskip("transformers", reason="the text extra is not installed")

from kvforge import AsyncClient, Client, DeadlineExceeded, InvalidRequest, SamplingParams
from kvforge.client.arguments import stop_strings
from kvforge.client.session import ClientSession
from kvforge.commands import cli
from kvforge.protocol import messages as m
from kvforge.protocol.codec import Decoder, encode
from kvforge.protocol.errors import ProtocolError
from kvforge.text.stop import StopText
from tests.kvforge.client.test_session import accepted, end, take
from tests.kvforge.fake_coordinator import Running
from tests.kvforge.text.test_tokenizer import tiny_gguf

# With the tiny vocabulary token 33 is "A", 34 is "B" and so on, and the fake coordinator counts up from the prompt.
A = 33


@pytest.fixture(scope="module")
def fake() -> Iterator[Running]:
    with tempfile.TemporaryDirectory(prefix="kvf", dir="/tmp") as folder, Running(Path(folder)) as running:
        yield running


@pytest.fixture
def vocabulary(tmp_path: Path) -> Path:
    path = tmp_path / "tiny.gguf"
    path.write_bytes(tiny_gguf())
    return path


@pytest.fixture
def kv(fake: Running, vocabulary: Path) -> Iterator[Client]:
    with Client(fake.endpoint, timeout_s=60, stream_timeout_s=10, tokenizer=vocabulary) as client:
        yield client


# ------------------------------------------------------------------------------------------------------------ watching


def watched(pieces: list[str], stops: list[str]) -> tuple[list[str], bool]:
    watcher = StopText(stops)
    shown = []
    for piece in pieces:
        shown.append(watcher.push(piece))
        if watcher.found:
            break
    return [*shown, watcher.finish()], watcher.found


def test_what_may_begin_a_stop_string_is_held_back_until_it_is_decided() -> None:
    assert watched(["ab", "\n", "cd"], ["\n\n"]) == (["ab", "", "\ncd", ""], False)
    assert watched(["ab\n", "\n", "cd"], ["\n\n"]) == (["ab", "", ""], True)
    assert watched(["x", "STO", "STOP"], ["STOP"]) == (["x", "", "STO", ""], True)
    assert watched(["end ST"], ["STOP"]) == (["end ", "ST"], False)
    assert watched(["abcabd"], ["cab", "bca"]) == (["a", ""], True)
    assert watched(["STOP"], ["STOP"]) == (["", ""], True)
    assert watched(["a", "", "b"], []) == (["a", "", "b", ""], False)


def test_however_the_text_is_split_it_is_cut_at_the_first_stop_string() -> None:
    rng = random.Random(1)
    for _ in range(3000):
        text = "".join(rng.choices("ab", k=rng.randrange(12)))
        stops = ["".join(rng.choices("ab", k=rng.randrange(1, 5))) for _ in range(rng.randrange(1, 4))]
        cuts = sorted(rng.randrange(len(text) + 1) for _ in range(rng.randrange(6)))
        pieces = [text[i:j] for i, j in itertools.pairwise([0, *cuts, len(text)])]
        shown, found = watched(pieces, stops)
        # The first completed stop string in the stream counts: the request ends there.
        complete = [n for n in range(len(text) + 1) if any(stop in text[:n] for stop in stops)]
        assert found == bool(complete)
        if not found:
            assert "".join(shown) == text
        else:
            ends = next(
                sum(map(len, pieces[: i + 1]))
                for i in range(len(pieces))
                if sum(map(len, pieces[: i + 1])) >= complete[0]
            )
            assert "".join(shown) == text[: min(at for at in (text[:ends].find(stop) for stop in stops) if at >= 0)]


# ------------------------------------------------------------------------------------------------------------- session


def top_rows(counts: list[int], tokens: list[int], logprobs: list[float]) -> m.Stream:
    n = len(counts)
    return m.Stream(
        request_ids=np.full(n, 1, np.int64),
        offsets=np.arange(n, dtype=np.int32),
        tokens=np.arange(n, dtype=np.int32),
        logprobs=np.zeros(n, np.float32),
        top_counts=np.array(counts, np.int32),
        top_tokens=np.array(tokens, np.int32),
        top_logprobs=np.array(logprobs, np.float32),
    )


def test_tops_reach_their_token_and_a_cut_shortens_the_track() -> None:
    session = ClientSession("ipc:///nowhere")
    track = accepted(session, 1)
    take(session, top_rows([2, 0, 1], [5, 6, 7], [-0.5, -1.0, -2.0]))
    assert track.top_logprobs == [((5, -0.5), (6, -1.0)), (), ((7, -2.0),)]
    fields = {name: getattr(end(1, 2, "stop"), name) for name in m.Ended.__struct_fields__}
    take(session, m.Stream(ended=(m.Ended(**{**fields, "cut_tokens": 1}),)))
    assert (track.tokens, len(track.top_logprobs), track.done, track.failure()) == ([0, 1], 2, True, None)


@pytest.mark.parametrize(
    ("counts", "tokens", "logprobs"),
    [([1, 1], [5], [0.0]), ([-1, 2], [5], [0.0]), ([1], [5], []), ([1], [], [])],
)
def test_top_columns_that_do_not_fit_are_a_protocol_error(
    counts: list[int], tokens: list[int], logprobs: list[float]
) -> None:
    with pytest.raises(ProtocolError, match="top columns"):
        take(ClientSession("ipc:///nowhere"), top_rows(counts, tokens, logprobs))


@pytest.mark.parametrize(
    "message",
    [
        m.FinishAt(rid=1, request_id=2, tokens=3),
        m.Submit(
            rid=1,
            max_tokens=1,
            sampling=m.SamplingParams(
                top_k=3, top_p=0.5, logit_bias=((5, -math.inf), (6, 1.5)), logprobs=20, min_p=0.1
            ),
        ),
    ],
)
def test_messages_survive_the_round_trip(message: m.Message) -> None:
    back = Decoder(m.CLIENT_MESSAGES).decode([bytes(frame) for frame in encode(message)])
    for name in set(message.__struct_fields__) - {"prompt"}:
        assert getattr(back, name) == getattr(message, name)


def test_step_and_result_survive_the_round_trip() -> None:
    start = m.RowStart(
        slot=1, request_id=2, sampling=m.SamplingParams(min_p=0.5), seed=3, prompt_history=2, generated_history=1
    )
    step = m.Step(step_id=1, begins=(start,), history=np.array([7, 8, 9], np.int32))
    back: Any = Decoder(m.WORKER_REPLIES).decode([bytes(frame) for frame in encode(step)])
    assert (back.begins, back.history.tolist()) == ((start,), [7, 8, 9])
    result = m.StepResult(step_id=1, epoch=1, top_counts=np.array([2], np.int32), top_tokens=np.array([1, 2], np.int32))
    back = Decoder(m.WORKER_MESSAGES).decode([bytes(frame) for frame in encode(result)])
    assert (back.top_counts.tolist(), back.top_tokens.tolist(), back.top_logprobs.tolist()) == ([2], [1, 2], [])


# ----------------------------------------------------------------------------------------------------------- arguments


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("top_k", -1),
        ("top_k", 1.5),
        ("top_k", True),
        ("top_p", 0.0),
        ("top_p", float("nan")),
        ("top_p", "half"),
        ("min_p", 1.5),
        ("repetition_penalty", 0),
        ("presence_penalty", -3.0),
        ("frequency_penalty", 2.5),
        ("logprobs", 21),
        ("logprobs", 1.0),
        ("logit_bias", {1: "x"}),
        ("logit_bias", ((1,),)),
        ("logit_bias", ((-1, 0.0),)),
        ("logit_bias", ((1, "x"),)),
        ("logit_bias", ((1, float("inf")),)),
        ("logit_bias", ((1, 0.0), (1, 0.0))),
        ("logit_bias", tuple((i, 0.0) for i in range(301))),
    ],
)
def test_wrong_sampling_is_named(field: str, value: Any) -> None:
    with pytest.raises(InvalidRequest) as caught:
        SamplingParams(**{field: value}).message()
    assert caught.value.field == f"sampling.{field}"


def test_right_sampling_and_stop_strings() -> None:
    SamplingParams(top_k=5, top_p=1, min_p=0, repetition_penalty=2, logit_bias=((0, -math.inf), (1, 100))).message()
    assert stop_strings("x") == ("x",)
    assert stop_strings(["a", "b"]) == ("a", "b")
    for wrong in (5, [5], "", [""], ["a"] * 17, ["a" * 1025]):
        with pytest.raises(InvalidRequest) as caught:
            stop_strings(wrong)
        assert caught.value.field == "stop"


# ------------------------------------------------------------------------------------------------------------- clients


def test_generate_stops_before_the_string_and_ends_the_request(fake: Running, kv: Client) -> None:
    sampling = SamplingParams(logprobs=2)
    done = kv.generate("A", raw=True, max_tokens=2, tenant="hang", sampling=sampling, stop=["Z", "B"])
    assert (done.text, done.finished.tokens, done.finished.reason) == ("A", (A, A + 1), "stop")
    assert done.finished.top_logprobs == tuple(((t, -0.5), (t + 1, -1.5)) for t in (A, A + 1))
    fake.expect("FinishAt")


def test_tokens_after_the_stop_string_do_not_count(fake: Running, kv: Client) -> None:
    text = kv.generate_stream("A", raw=True, max_tokens=9, tenant="hang", stop="A")
    for _ in zip(range(2), text.request, strict=False):
        pass  # both tokens arrive before the text is checked
    assert list(text) == []
    fake.expect("FinishAt")
    done = text.result()
    assert (done.text, done.finished.tokens, done.finished.reason) == ("", (A,), "stop")
    assert len(done.finished.logprobs) == 1
    assert text.request.result().tokens == (A,)


def test_a_request_that_ended_by_itself_is_cut_all_the_same(kv: Client) -> None:
    text = kv.generate_stream("A", raw=True, max_tokens=6, stop="CD")
    assert text.request.result().reason == "length"
    assert list(text) == ["A", "B"]
    done = text.result()
    assert (done.text, done.finished.tokens, done.finished.reason) == ("AB", tuple(range(A, A + 4)), "stop")


def test_without_the_string_the_whole_text_comes(kv: Client) -> None:
    text = kv.generate_stream("A", raw=True, max_tokens=4, stop=["DE", "x"])
    assert "".join(text) == "ABCD"
    done = text.result()
    assert (done.text, done.finished.reason) == ("ABCD", "length")
    with pytest.raises(DeadlineExceeded, match="has not ended within"):
        kv.generate("A", raw=True, max_tokens=4, tenant="hang", stop="never", timeout_s=0.3)


def test_an_attached_request_is_read_as_text_and_stopped(fake: Running, kv: Client) -> None:
    request = kv.submit([A], max_tokens=2, tenant="hang", detached=True)
    with pytest.raises(InvalidRequest) as wrong:
        request.text(stop="")
    assert wrong.value.field == "stop"
    with Client(fake.endpoint, timeout_s=60, stream_timeout_s=10, tokenizer=kv._calls._tokenizer_source) as other:
        text = other.attach(request.id).text(stop="B")
        assert list(text) == ["A"]
        fake.expect("FinishAt")
        assert (text.result().text, text.result().finished.reason) == ("A", "stop")
        over = other.attach(request.id).text(stop=["x"])
        assert "".join(over) == over.result().text == "AB"


def test_samples_are_read_as_text(kv: Client) -> None:
    requests = kv.submit_samples(kv.encode("A", raw=True), 2, max_tokens=3)
    assert [request.text().result().text for request in requests] == ["ABC", "ABC"]


def test_the_asyncio_client_stops_too(fake: Running, vocabulary: Path) -> None:
    async def run() -> None:
        async with AsyncClient(fake.endpoint, timeout_s=60, stream_timeout_s=10, tokenizer=vocabulary) as kv:
            done = await kv.generate("A", raw=True, max_tokens=2, tenant="hang", stop="B")
            assert (done.text, done.finished.tokens, done.finished.reason) == ("A", (A, A + 1), "stop")
            text = await kv.generate_stream("A", raw=True, max_tokens=9, tenant="hang", stop=("AB",))
            assert [piece async for piece in text] == []
            assert (await text.result()).finished.reason == "stop"
            samples = await kv.submit_samples(await kv.encode("A", raw=True), 2, max_tokens=3)
            assert [(await one.text(stop="C").result()).text for one in samples] == ["AB", "AB"]
            again = await kv.attach(samples[0].id)
            assert "".join([piece async for piece in again.text()]) == "ABC"

    asyncio.run(run())


# ---------------------------------------------------------------------------------------------------------------- shell


def test_generate_takes_every_option(
    fake: Running, vocabulary: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("sys.stdin", io.StringIO(""))
    options = [
        "--top-k",
        "5",
        "--top-p",
        "0.9",
        "--min-p",
        "0.1",
        "--repetition-penalty",
        "1.1",
        "--presence-penalty",
        "0.5",
    ]
    options += [
        "--frequency-penalty",
        "-0.5",
        "--logit-bias",
        "5:-inf",
        "--logit-bias",
        "6:2.5",
        "--logprobs",
        "2",
        "--json",
    ]
    where = ["--endpoint", fake.endpoint, "--tokenizer", str(vocabulary)]
    assert (
        cli.main(["generate", "A", "--raw", "--max-tokens", "4", "--stop", "C", "--stop", "x", *options, *where]) == 0
    )
    document = json.loads(capsys.readouterr().out)
    assert (document["text"], document["tokens"], document["reason"]) == ("AB", [A, A + 1, A + 2], "stop")
    assert document["top_logprobs"][0] == [[A, -0.5], [A + 1, -1.5]]


def test_samples_and_attached_requests_are_shown_as_text(
    fake: Running, vocabulary: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    where = ["--endpoint", fake.endpoint, "--tokenizer", str(vocabulary)]
    generate = ["generate", "A", "--raw", "--max-tokens", "4", *where]
    assert cli.main([*generate, "--samples", "2", "--seed", "5", "--stop", "C"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert [lines[0][:4], *lines[1:3], lines[3][:4], *lines[4:]] == ["[1] ", "AB", "", "[2] ", "AB"]
    assert cli.main([*generate, "--detach"]) == 0
    request_id = capsys.readouterr().out.strip()
    assert cli.main(["attach", request_id, *where]) == 0
    assert capsys.readouterr().out == "ABCD\n"
    assert cli.main(["attach", request_id, "--stop", "D", "--json", *where]) == 0
    document = json.loads(capsys.readouterr().out)
    assert (document["text"], document["reason"], document["request_id"]) == ("ABC", "stop", int(request_id))


@pytest.mark.parametrize(
    ("arguments", "named"),
    [
        (["--logit-bias", "5"], "logit_bias"),
        (["--logit-bias", "5:900"], "sampling.logit_bias"),
        (["--top-p", "0"], "sampling.top_p"),
        (["--stop", "x"], "stop"),
    ],
)
def test_wrong_options_are_named(
    fake: Running, capsys: pytest.CaptureFixture[str], arguments: list[str], named: str
) -> None:
    assert cli.main(["generate", "--prompt-tokens", "1", *arguments, "--endpoint", fake.endpoint]) == 2
    assert capsys.readouterr().err.startswith(f"kvforge: {named}: ")
