"""[kv_events]: refusals name the field."""

from __future__ import annotations

from pathlib import Path

import pytest

from kvforge.coordinator.config import CoordinatorConfig, load_config
from kvforge.protocol.errors import InvalidConfiguration


def read(folder: Path, text: str) -> CoordinatorConfig:
    path = folder / "coordinator.toml"
    path.write_text(f"[kv_events]\n{text}\n")
    return load_config(path)


def test_nothing_is_told_unless_it_is_asked_for(tmp_path: Path) -> None:
    assert CoordinatorConfig().kv_events.publish == ""
    assert read(tmp_path, 'publish = "ipc:///run/kv"\nreplay = "ipc:///run/kv-replay"').kv_events.topic == ""
    read(tmp_path, 'publish = "tcp://127.0.0.1:5557"\nreplay = "tcp://*:5558"\nunencrypted_tcp = true')


@pytest.mark.parametrize(
    ("text", "field"),
    [
        ('publish = "tcp://127.0.0.1:5557"', "publish"),
        ('publish = "tcp://10.0.0.1"\nunencrypted_tcp = true', "publish"),
        ('publish = "inproc://a"', "publish"),
        ('publish = "ipc://here"', "publish"),
        (f'publish = "ipc:///{"x" * 120}"', "publish"),
        ('publish = "ipc:///a"\nreplay = "ipc:///a"', "replay"),
        ('replay = "ipc:///a"', "replay"),
        ('encoding = "json"', "encoding"),
        ('tenant = ""', "tenant"),
        (f'topic = "{"x" * 300}"', "topic"),
        ("replay_bytes_max = 1", "replay_bytes_max"),
        ("replay_batches_max = 0", "replay_batches_max"),
        ("subscribers = 3", "subscribers"),
    ],
)
def test_a_refusal_names_the_field(tmp_path: Path, text: str, field: str) -> None:
    with pytest.raises(InvalidConfiguration, match=field) as caught:
        read(tmp_path, text)
    assert caught.value.field.startswith("kv_events")
