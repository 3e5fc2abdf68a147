"""Whatever bytes a peer sends: a message or a typed error, and nothing else."""

from __future__ import annotations

import typing

import msgpack
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvforge.protocol import codec, messages
from kvforge.protocol.codec import Decoder, InvalidMessage, encode
from kvforge.protocol.errors import InvalidRequest, ProtocolError
from kvforge.protocol.messages import (
    ANY_ROWS,
    CLIENT_MESSAGES,
    CLIENT_REPLIES,
    WORKER_MESSAGES,
    WORKER_REPLIES,
    Append,
    Ended,
    Health,
    Message,
    ModelInfo,
    RowStart,
    SamplingParams,
    Step,
    StepResult,
    Stream,
    Submit,
    Timings,
    WorkerHealth,
    WorkerReady,
    WorkerWelcome,
    tag_of,
)
from tests.amount import examples

UNIONS = {
    "client": CLIENT_MESSAGES,
    "client reply": CLIENT_REPLIES,
    "worker": WORKER_MESSAGES,
    "worker reply": WORKER_REPLIES,
}
CLIENT = Decoder(CLIENT_MESSAGES)


def submit(**changes: object) -> Submit:
    values: dict[str, object] = {"rid": 3, "max_tokens": 5, "prompt": np.array([1, 2, 3], np.int32)}
    return Submit(**{**values, **changes})  # type: ignore[arg-type]


def packed(message: Message, **changes: object) -> list[bytes]:
    """The message's frames with some of its body replaced; a value of ... removes the field."""
    frames = [bytes(frame) for frame in encode(message)]
    body = msgpack.unpackb(frames[0])
    body.update(changes)
    return [msgpack.packb({key: value for key, value in body.items() if value is not ...}), *frames[1:]]


def test_a_message_that_cannot_be_packed_leaves_nothing_in_the_next() -> None:
    whole = encode(submit())
    with pytest.raises(OverflowError):
        encode(submit(tenant="a" * 100, rid=1 << 70))
    assert encode(submit()) == whole


def test_arrays_and_scalars_survive_the_round_trip() -> None:
    step = Step(
        step_id=9,
        begins=(RowStart(slot=1, request_id=2, sampling=SamplingParams(temperature=0.5), seed=2**64 - 1),),
        slots=np.array([1, 2], np.int32),
        tokens=np.array([-1, 70000], np.int32),
    )
    back = Decoder(WORKER_REPLIES).decode([bytes(frame) for frame in encode(step)])
    assert isinstance(back, Step)
    assert (back.step_id, back.begins) == (9, step.begins)
    assert back.slots.tolist() == [1, 2]
    assert back.tokens.tolist() == [-1, 70000]
    assert back.copies.size == 0
    assert back.tokens.dtype == np.int32

    ended = Ended(
        request_id=2**40, reason="stop", generated_tokens=1, prompt_tokens=2, cached_tokens=0, timings=Timings()
    )
    stream = Stream(ended=(ended,), request_ids=np.array([2**40]), logprobs=np.array([-0.5], np.float32))
    again = Decoder(CLIENT_REPLIES).decode([bytes(frame) for frame in encode(stream)])
    assert isinstance(again, Stream)
    assert again.ended == (ended,)
    assert again.request_ids.tolist() == [2**40]
    assert again.logprobs.tolist() == [-0.5]


def test_drafts_and_proposals_survive_the_round_trip_and_take_no_byte_where_there_are_none() -> None:
    step = Step(step_id=9, counts=np.array([1, 3], np.int32), drafts=np.array([0, 2], np.int32))
    back = Decoder(WORKER_REPLIES).decode([bytes(frame) for frame in encode(step)])
    assert isinstance(back, Step)
    assert (back.counts.tolist(), back.drafts.tolist(), back.following.size) == ([1, 3], [0, 2], 0)
    lists = {"slots": [4, 6, 6], "draft_slots": [6, 4], "draft_counts": [1, 2], "draft_tokens": [7, 8, 9]}
    arrays = {name: np.array(values, np.int32) for name, values in lists.items()}
    result = Decoder(WORKER_MESSAGES).decode([bytes(frame) for frame in encode(StepResult(9, 1, **arrays))])  # type: ignore[arg-type]
    assert isinstance(result, StepResult)
    assert {name: getattr(result, name).tolist() for name in lists} == lists
    for without in (Step(step_id=9, slots=step.counts), StepResult(9, 1, slots=step.counts)):
        names = [name for name, _ in type(without).FRAMES]
        sizes = msgpack.unpackb(bytes(encode(without)[0]))["n"]
        assert len(sizes) == names.index("slots") + 1


def test_an_older_worker_and_an_older_coordinator_have_no_drafts() -> None:
    worker = Decoder(WORKER_MESSAGES).decode(packed(ready(drafts=4), drafts=...))
    assert isinstance(worker, WorkerReady)
    assert worker.drafts == 0
    welcome = WorkerWelcome(1, 1, "b", "/t", 16, 4, 8, 64, 4, drafts_max=4)
    coordinator = Decoder(WORKER_REPLIES).decode(packed(welcome, drafts_max=..., draft_rows_max=...))
    assert isinstance(coordinator, WorkerWelcome)
    assert (coordinator.drafts_max, coordinator.draft_rows_max) == (0, ANY_ROWS)
    start = RowStart(slot=1, request_id=2, sampling=SamplingParams(), seed=3, drafts=4)
    body = packed(Step(step_id=9, begins=(start,)))
    entry = msgpack.unpackb(body[0])["begins"][0]
    del entry["drafts"]
    step = Decoder(WORKER_REPLIES).decode(packed(Step(step_id=9), begins=[entry]))
    assert isinstance(step, Step)
    assert step.begins[0].drafts == 0


def ready(**changes: object) -> WorkerReady:
    model = ModelInfo(
        name="m", source="m", architecture="a", fingerprint="f", vocab_size=9, context_tokens_max=9, eos_tokens=(2,)
    )
    values: dict[str, object] = {"rid": 4, "blocks": 2, "bytes_per_block": 8, "kv_dtype": "int8", "device": "d"}
    return WorkerReady(**{**values, "model": model, **changes})  # type: ignore[arg-type]


def test_device_bytes_survive_the_way_to_the_coordinator_and_on_to_a_client() -> None:
    held = {"weights": 3 << 40, "pool": 16, "other": 0}
    back = Decoder(WORKER_MESSAGES).decode([bytes(frame) for frame in encode(ready(device_bytes=held))])
    assert isinstance(back, WorkerReady)
    assert (back.device_bytes, back.model.eos_tokens) == (held, (2,))
    worker = WorkerHealth(name="w", pid=1, state="ready", device_bytes=back.device_bytes)
    health = Health(rid=1, live=True, ready=True, reason="", workers=(worker,))
    told = Decoder(CLIENT_REPLIES).decode([bytes(frame) for frame in encode(health)])
    assert isinstance(told, Health)
    assert told.workers == (worker,)


def test_a_worker_that_says_nothing_of_its_device_bytes_has_none() -> None:
    back = Decoder(WORKER_MESSAGES).decode(packed(ready(device_bytes={"pool": 1}), device_bytes=...))
    assert isinstance(back, WorkerReady)
    assert back.device_bytes == {}


@pytest.mark.parametrize("value", [None, [1], 7, {"pool": "much"}, {"pool": 1.5}, {"pool": True}, {"pool": None}])
def test_device_bytes_of_another_type_are_refused_by_name(value: object) -> None:
    with pytest.raises(InvalidMessage) as caught:
        Decoder(WORKER_MESSAGES).decode(packed(ready(), device_bytes=value))
    assert caught.value.field.startswith("device_bytes")
    assert caught.value.rid == 4


def test_arrays_travel_as_little_endian_frames_whatever_the_sender_had() -> None:
    frames = encode(submit(prompt=np.array([1, 256], ">i8")))
    assert bytes(frames[1]) == b"\x01\x00\x00\x00\x00\x01\x00\x00"


def test_an_array_that_is_not_contiguous_travels_like_any_other() -> None:
    tokens = np.arange(8, dtype=np.int32)
    views = messages.StepResult(
        step_id=1, epoch=1, slots=tokens[::2], tokens=tokens[1::2], logprobs=np.zeros(4, np.float32)
    )
    copies = messages.StepResult(
        step_id=1, epoch=1, slots=tokens[::2].copy(), tokens=tokens[1::2].copy(), logprobs=np.zeros(4, np.float32)
    )
    assert list(map(bytes, codec.encode(views))) == list(map(bytes, codec.encode(copies)))


def test_a_missing_new_field_takes_its_default_and_an_unknown_one_is_skipped() -> None:
    frames = packed(submit(), stream=..., salt=..., from_the_future=[1, 2])
    back = CLIENT.decode(frames)
    assert isinstance(back, Submit)
    assert (back.stream, back.salt) == (True, "")
    assert CLIENT.decode(packed(submit(), n=...)[:1]).prompt.size == 0  # type: ignore[attr-defined]


def test_tags_are_unique_and_lower_case_words() -> None:
    for union in UNIONS.values():
        tags = [tag_of(cls) for cls in typing.get_args(union)]
        assert len(set(tags)) == len(tags)
        assert all(tag.replace("_", "").isalpha() and tag.islower() for tag in tags)


def test_frames_name_real_fields_of_fixed_little_endian_dtypes() -> None:
    for union in UNIONS.values():
        for cls in typing.get_args(union):
            for name, dtype in cls.FRAMES:
                assert name in cls.__struct_fields__
                assert dtype in ("<i4", "<i8", "<f4")


@pytest.mark.parametrize(
    ("changes", "field"),
    [
        ({"max_tokens": "many"}, "max_tokens"),
        ({"max_tokens": None}, "max_tokens"),
        ({"max_tokens": ...}, "max_tokens"),
        ({"sampling": {"temprature": 1.0}}, "sampling.temprature"),
        ({"sampling": {"temperature": "hot"}}, "sampling.temperature"),
        ({"sampling": {"stop_tokens": [1, "x"]}}, "sampling.stop_tokens[1]"),
        ({"sampling": 3}, "sampling"),
        ({"tenant": 5}, "tenant"),
        ({"stream": 1}, "stream"),
    ],
)
def test_a_wrong_field_of_a_command_is_named_to_that_command(changes: dict[str, object], field: str) -> None:
    with pytest.raises(InvalidMessage) as caught:
        CLIENT.decode(packed(submit(), **changes))
    assert caught.value.field == field
    assert caught.value.rid == 3
    assert caught.value.code == InvalidRequest.code


@pytest.mark.parametrize(
    "frames",
    [
        pytest.param([], id="nothing"),
        pytest.param([b""], id="empty body"),
        pytest.param([b"\xc1"], id="reserved byte"),
        pytest.param([msgpack.packb([1, 2])], id="a list"),
        pytest.param([msgpack.packb({"t": "no such"})], id="unknown tag"),
        pytest.param([msgpack.packb({"t": 5})], id="tag of another type"),
        pytest.param([msgpack.packb({})], id="no tag"),
        pytest.param([msgpack.packb({"t": "cancel", "rid": "x", "request_id": 1})], id="rid of another type"),
        pytest.param([msgpack.packb({"t": "cancel", "rid": -4, "request_id": "x"})], id="rid below zero"),
        pytest.param([msgpack.packb({"t": "step_result"})], id="a worker's tag on the client socket"),
        pytest.param([*packed(submit()), b"1234"], id="a frame too many"),
        pytest.param([packed(submit())[0], b"12345"], id="half an integer"),
        pytest.param([msgpack.packb({"t": "cancel"})[:-2]], id="truncated"),
        pytest.param([msgpack.packb({1: 2})], id="keys that are no text"),
        pytest.param([b"\x81\xa1t" + b"\x91" * 5000], id="nested without end"),
        pytest.param([b"\x81\xa1t" + b"\x91" * 14 + b"\x00"], id="nested too deep"),
        pytest.param([b"\x81\xa1t\xdd\xff\xff\xff\xff"], id="a list of four billion"),
        pytest.param([b"\x81\xa1t\xdb\xff\xff\xff\xff"], id="a text of four gigabytes"),
        pytest.param([msgpack.packb({"t": msgpack.ExtType(5, b"abc")})], id="an extension type"),
        pytest.param([b"x" * (codec.BODY_BYTES_MAX + 1)], id="a body beyond the limit"),
        pytest.param([b""] * 40, id="forty frames"),
    ],
)
def test_hostile_frames_are_a_protocol_error(frames: list[bytes]) -> None:
    with pytest.raises(ProtocolError) as caught:
        CLIENT.decode(frames)
    assert len(str(caught.value)) < 1000


def test_all_arrays_of_a_message_travel_in_one_frame() -> None:
    command = Append(
        rid=1,
        sequence_ids=np.array([5, 1 << 40], np.int64),
        counts=np.array([1, 2], np.int32),
        tokens=np.arange(3, dtype=np.int32),
    )
    body, arrays = encode(command)
    assert msgpack.unpackb(body)["n"] == [2, 2, 3]
    assert len(arrays) == 2 * 8 + 2 * 4 + 3 * 4
    back = CLIENT.decode([body, arrays])
    assert isinstance(back, Append)
    assert (back.sequence_ids.tolist(), back.counts.tolist(), back.tokens.tolist()) == ([5, 1 << 40], [1, 2], [0, 1, 2])


@pytest.mark.parametrize(
    "sizes", [[2], [4], [3, 0], [-3], [True], [3.0], "3", {"a": 3}, [1 << 62], [[3]], [0]], ids=repr
)
def test_sizes_that_do_not_fit_the_arrays_are_refused(sizes: object) -> None:
    with pytest.raises(ProtocolError, match="submit: "):
        CLIENT.decode(packed(submit(), n=sizes))


def test_an_array_beyond_the_limit_is_refused_without_being_read(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(codec, "FRAME_BYTES_MAX", 8)
    with pytest.raises(ProtocolError, match=r"submit: arrays are at most 8 bytes"):
        CLIENT.decode(packed(submit()))


@settings(max_examples=examples(600), deadline=None, derandomize=True)
@given(st.sampled_from(sorted(UNIONS)), st.lists(st.binary(max_size=200), max_size=6))
def test_random_bytes_never_raise_anything_else(union: str, frames: list[bytes]) -> None:
    try:
        message = Decoder(UNIONS[union]).decode(frames)
    except (ProtocolError, InvalidMessage):
        return
    assert isinstance(message, Message)


VALUES = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-(2**63), 2**64 - 1)
    | st.floats()
    | st.text(max_size=8)
    | st.binary(max_size=8),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=8), inner, max_size=4),
    max_leaves=8,
)


@settings(max_examples=examples(800), deadline=None, derandomize=True)
@given(st.data())
def test_random_fields_under_a_valid_tag_never_raise_anything_else(data: st.DataObject) -> None:
    union = UNIONS[data.draw(st.sampled_from(sorted(UNIONS)))]
    cls = data.draw(st.sampled_from(typing.get_args(union)))
    body = {"t": tag_of(cls)}
    for name in cls.__struct_fields__:
        if data.draw(st.booleans()):
            body[name] = data.draw(VALUES)
    frames = [msgpack.packb(body), *data.draw(st.lists(st.binary(max_size=16), max_size=8))]
    try:
        message = Decoder(union).decode(frames)
    except (ProtocolError, InvalidMessage):
        return
    assert type(message) is cls


@settings(max_examples=examples(300), deadline=None, derandomize=True)
@given(st.integers(0, 400), st.integers(0, 255), st.integers(0, 4))
def test_a_flipped_byte_never_raises_anything_else(position: int, value: int, frame: int) -> None:
    frames = [bytearray(part) for part in encode(submit(sampling=SamplingParams(seed=1, stop_tokens=(1, 2))))]
    target = frames[frame % len(frames)]
    if target:
        target[position % len(target)] = value
    try:
        message = CLIENT.decode([bytes(part) for part in frames])
    except (ProtocolError, InvalidMessage):
        return
    assert isinstance(message, Message)


def test_every_message_is_in_exactly_the_unions_that_its_senders_use() -> None:
    members = {cls for union in UNIONS.values() for cls in typing.get_args(union)}
    assert members == set(messages.Message.__subclasses__())
