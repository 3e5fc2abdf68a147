"""Configuration files: an unknown key is an error that names the key."""

from __future__ import annotations

from pathlib import Path

import pytest

from coordinator.config import CoordinatorConfig, load_config
from kvforge.protocol.errors import InvalidConfiguration
from worker.config import WorkerConfig
from worker.config import load_config as load_worker


@pytest.mark.parametrize(
    ("text", "field"),
    [
        ("spelling = 1", "spelling"),
        ("[limits]\nsequence_max = 4", "limits.sequence_max"),
        ("[limits]\nsequences_max = 0", "limits.sequences_max"),
        ("[limits]\nsequences_max = 'many'", "limits.sequences_max"),
        ("[cache]\nblock_size = 0", "cache.block_size"),
        ("[cache]\nblock_size = -3", "cache.block_size"),
        ("[cache]\npolicy = 'random'", "cache.policy"),
        ("[limits]\nblocks_per_sequence_max = 1000000000", "limits.blocks_per_sequence_max"),
        ("[limits]\nclients_max = 0", "limits.clients_max"),
        ("[quotas.a]\nfloor = 5\nceiling = 2", "quotas.a"),
        ("[quotas.a]\nroof = 5", "quotas.a.roof"),
        ("log_level = 'loud'", "log_level"),
        ("drain_s = -1", "drain_s"),
    ],
)
def test_a_wrong_setting_of_the_coordinator_is_named(tmp_path: Path, text: str, field: str) -> None:
    path = tmp_path / "c.toml"
    path.write_text(text)
    with pytest.raises(InvalidConfiguration) as caught:
        load_config(path).core_limits()
    assert caught.value.field == field


@pytest.mark.parametrize(
    ("text", "field"),
    [
        ("model = 'm'", "name"),
        ("name = 'w'", "model"),
        ("name = 'two words'\nmodel = 'm'", "name"),
        ("name = 'w'\nmodel = 'm'\nblocks = -1", "blocks"),
        ("name = 'w'\nmodel = 'm'\nblocks = 1\nkv_bytes = 1", "kv_bytes"),
        ("name = 'w'\nmodel = 'm'\nthread = 1", "thread"),
        ("name = 'w'\nmodel = 'm'\nthreads = 1.5", "threads"),
    ],
)
def test_a_wrong_setting_of_a_worker_is_named(tmp_path: Path, text: str, field: str) -> None:
    path = tmp_path / "w.toml"
    path.write_text(text)
    with pytest.raises(InvalidConfiguration) as caught:
        load_worker(path)
    assert caught.value.field == field


def test_a_file_that_is_missing_or_no_toml_is_named(tmp_path: Path) -> None:
    with pytest.raises(InvalidConfiguration, match="cannot be read"):
        load_config(tmp_path / "none.toml")
    (tmp_path / "bad.toml").write_text("= 1")
    with pytest.raises(InvalidConfiguration, match="is not TOML"):
        load_config(tmp_path / "bad.toml")


def test_the_defaults_are_valid_and_ones_are_accepted() -> None:
    """behaviour 1: all-ones is accepted."""
    assert CoordinatorConfig().core_limits().context_tokens_max == 16 * 512
    ones = {"sequences_max": 1, "blocks_max": 1, "blocks_per_sequence_max": 1}
    config = CoordinatorConfig.__struct_fields__
    assert "limits" in config
    limits = load_ones(ones).core_limits()
    assert (limits.bounds.sequences_max, limits.context_tokens_max) == (1, 1)
    assert WorkerConfig(name="w", model="m").blocks == 0


def load_ones(limits: dict[str, int]) -> CoordinatorConfig:
    from kvforge.protocol.configuration import convert

    return convert({"limits": limits, "cache": {"block_size": 1}}, CoordinatorConfig)
