"""Models that are not there are refused by the name of the setting, before torch is imported."""

from __future__ import annotations

from pathlib import Path

import pytest

from kvforge.protocol.errors import InvalidConfiguration, ModelNotFound
from kvforge.worker.config import WorkerConfig
from kvforge.worker.model_path import find_draft_model, find_model


def test_a_missing_draft_model_is_named_as_such(tmp_path: Path) -> None:
    config = WorkerConfig(name="w0", model=str(tmp_path / "model"), draft_model=str(tmp_path / "draft"))
    with pytest.raises(ModelNotFound, match="model: no such file"):
        find_model(config)
    with pytest.raises(
        InvalidConfiguration, match=r"^draft_model: model .*draft: no such file or folder here"
    ) as caught:
        find_draft_model(config)
    assert caught.value.field == "draft_model"


def test_without_a_draft_model_none_is_looked_for(tmp_path: Path) -> None:
    assert find_draft_model(WorkerConfig(name="w0", model=str(tmp_path))) == ""


def test_the_module_of_the_checkpoint_is_no_path(tmp_path: Path) -> None:
    assert find_draft_model(WorkerConfig(name="w0", model=str(tmp_path), draft_model="mtp")) == "mtp"
