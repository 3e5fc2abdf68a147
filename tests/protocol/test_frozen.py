"""Version 1 of the protocol stays frozen: its peers work with all later versions."""

from __future__ import annotations

import dataclasses
import typing
from typing import Any

import msgspec
import numpy as np
import pytest

from kvforge.protocol import messages as m
from kvforge.protocol.codec import Decoder, encode
from kvforge.protocol.errors import BY_CODE
from tests.protocol.frozen import UNIONS, JsonMap, Peer, Version, described, example, frozen_name, structs

V1 = Version.read(1)
NOW = structs()
MESSAGES = [name for name, frozen in V1.structs.items() if frozen["tag"]]


def of(said: JsonMap) -> str:
    return f"{said['message']} {'whole' if said['whole'] else 'least'}"


def later() -> dict[str, frozenset[str]]:
    """Return the fields that a newer coordinator leaves at their default for a peer of version 1, by struct.

    These are arrays unknown to the peer, and fields of a struct that refuses unknown ones.
    """
    left = {}
    for name, frozen in V1.structs.items():
        today, known = described(NOW[name]), frozen["fields"]
        arrays = {array for array, _ in today["arrays"]}
        left[name] = frozenset(
            field for field in today["fields"] if field not in known and (field in arrays or frozen["forbids_unknown"])
        )
    return left


@pytest.mark.parametrize("said", V1.examples, ids=of)
def test_bytes_of_version_1_mean_today_what_they_meant(said: JsonMap) -> None:
    message = Decoder(UNIONS[said["from"]]).decode([bytes.fromhex(frame) for frame in said["frames"]])
    assert frozen_name(type(message)) == said["message"]
    assert V1.meaning(message) == said["meaning"]
    for field in msgspec.structs.fields(type(message)):
        if field.name not in V1.structs[said["message"]]["fields"]:
            value = getattr(message, field.name)
            assert (value.size == 0) if isinstance(value, np.ndarray) else value in (field.default, (), {}, [])


@pytest.mark.parametrize("whole", [True, False])
@pytest.mark.parametrize("name", MESSAGES)
def test_a_peer_of_version_1_reads_what_is_sent_today(name: str, whole: bool) -> None:
    message = example(NOW[name], whole=whole, leave=later())
    read = Peer(V1).read(name, encode(message))
    assert V1.meaning(read) == V1.meaning(message)


def as_known(today: JsonMap | None, frozen: JsonMap) -> JsonMap | None:
    """Return a field of today. A struct default is limited to the fields of that version."""
    default = frozen.get("default")
    if today is None or not isinstance(default, dict) or not isinstance(today.get("default"), dict):
        return today
    return {**today, "default": {name: value for name, value in today["default"].items() if name in default}}


@pytest.mark.parametrize("name", V1.structs)
def test_no_field_of_version_1_was_removed_or_changed(name: str) -> None:
    frozen, today = V1.structs[name], described(NOW[name])
    kept = {field: as_known(today["fields"].get(field), spec) for field, spec in frozen["fields"].items()}
    if name == "Hello":  # contains the supported versions
        kept["version_max"] = frozen["fields"]["version_max"]
    assert kept == frozen["fields"]
    added = [field for field in today["fields"] if field not in frozen["fields"]]
    assert all("default" in today["fields"][field] for field in added), "a new field needs a default"
    assert today["tag"] == frozen["tag"]
    assert today["arrays"][: len(frozen["arrays"])] == frozen["arrays"], "new arrays come after all others"
    assert today["forbids_unknown"] <= frozen["forbids_unknown"]
    if frozen["forbids_unknown"] and added:
        assert NOW[name].__struct_config__.omit_defaults, "new fields are sent on request only"


@pytest.mark.parametrize("direction", UNIONS)
def test_no_message_of_version_1_was_removed(direction: str) -> None:
    frozen = {said["message"] for said in V1.examples if said["from"] == direction}
    assert frozen <= {frozen_name(cls) for cls in typing.get_args(UNIONS[direction])}


def test_no_error_of_version_1_was_removed() -> None:
    assert set(V1.errors) <= set(BY_CODE)


def test_version_1_is_still_spoken() -> None:
    assert m.PROTOCOL_VERSION_MIN <= 1 <= m.PROTOCOL_VERSION


def test_the_examples_show_every_field_other_than_by_default() -> None:
    for said in V1.examples:
        if said["whole"]:
            fields = V1.structs[said["message"]]["fields"]
            assert all(said["meaning"][name] != spec["default"] for name, spec in fields.items() if "default" in spec)


def without(name: str, field: str) -> Version:
    """Return version 1 as if one field had been added only today."""
    frozen = V1.structs[name]
    fields = {other: spec for other, spec in frozen["fields"].items() if other != field}
    arrays = [array for array in frozen["arrays"] if array[0] != field]
    return dataclasses.replace(V1, structs={**V1.structs, name: {**frozen, "fields": fields, "arrays": arrays}})


@pytest.mark.parametrize(
    ("message", "field"),
    [
        (m.Welcome(rid=1, version=1, boot="b", tables_path="/t"), "tables_path"),
        (m.Stream(request_ids=np.array([1])), "top_logprobs"),
        (m.Step(step_id=1, tokens=np.array([4], np.int32)), "history"),
        (m.Submit(rid=1, max_tokens=2, prompt=np.array([4], np.int32)), "key"),
    ],
)
def test_a_field_that_came_later_does_not_disturb_who_does_not_know_it(message: Any, field: str) -> None:
    earlier = without(frozen_name(type(message)), field)
    assert earlier.meaning(Peer(earlier).read(frozen_name(type(message)), encode(message))) == earlier.meaning(message)


def test_a_peer_of_version_1_refuses_a_sampling_parameter_that_it_does_not_know() -> None:
    earlier = without("Sampling", "min_p")
    asked = m.Submit(rid=1, max_tokens=2, sampling=m.SamplingParams(min_p=0.5))
    with pytest.raises(msgspec.ValidationError, match="min_p"):
        Peer(earlier).read("Submit", encode(asked))
    Peer(earlier).read("Submit", encode(msgspec.structs.replace(asked, sampling=m.SamplingParams(top_p=0.5))))
