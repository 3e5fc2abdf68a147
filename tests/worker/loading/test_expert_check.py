"""A rank with the wrong experts is refused at load: comparing layers over the same weights would not find it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

from kvforge.protocol.errors import InvalidConfiguration, UnsupportedModel
from kvforge.worker.loading.expert_check import StoredExperts, check_experts_of_ranks
from kvforge.worker.loading.slices import Slices, slices_of
from kvforge.worker.loading.split_experts import FIRST_HELD
from tests.worker.loading.random_models import DESCRIBED, save

KINDS = ("qwen3_moe", "gpt_oss", "granitemoe")  # stored alone, together, and under other names


class Recording(Exception):
    pass


class OneOfTwo:
    """Rank 0 of two. said: the other rank's texts in turn; empty: record what a rank says, and end its check."""

    def __init__(self, *said: str) -> None:
        self._said, self.first = list(said), ""

    def texts(self, text: str) -> list[str]:
        if not self._said:
            self.first = text
            raise Recording
        return [text, self._said.pop(0)]


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    root = tmp_path_factory.mktemp("models")
    return {kind: save(root / kind, *DESCRIBED[kind]) for kind in KINDS}


def part_of(folder: Path, first: int, stop: int, said_first: int | None = None) -> tuple[Any, Slices]:
    """The experts from `first` to `stop` of a model, which it holds as if they began at `said_first`."""
    module = transformers.AutoModelForCausalLM.from_pretrained(folder)
    mine = slices_of(module, 0, 2, expert_parallel=True)
    for path in mine.experts:
        experts = module.get_submodule(path)
        experts.down_proj = torch.nn.Parameter(experts.down_proj[first:stop].detach(), requires_grad=False)
        setattr(experts, FIRST_HELD, first if said_first is None else said_first)
    return module, mine


def said_by_another(module: Any, mine: Slices) -> str:
    recording = OneOfTwo()
    with pytest.raises(Recording):
        check_experts_of_ranks(module, mine, recording, "", None)  # type: ignore[arg-type]
    return recording.first


def check(folder: Path, said: str, later: str = "", files: Path | None = None) -> None:
    """Check as rank 0, which holds the experts 0 to 3 of 8."""
    module, mine = part_of(folder, 0, 4)
    weights = tuple((files or folder).glob("*.safetensors"))
    with StoredExperts(weights, torch.float32) as checksum:
        check_experts_of_ranks(module, mine, OneOfTwo(said, later), "m", checksum)  # type: ignore[arg-type]


@pytest.mark.parametrize("kind", KINDS)
def test_the_right_experts_are_accepted(kind: str, folders: dict[str, Path]) -> None:
    check(folders[kind], said_by_another(*part_of(folders[kind], 4, 8)))


@pytest.mark.parametrize("kind", KINDS)
def test_the_weights_of_other_experts_are_refused(kind: str, folders: dict[str, Path]) -> None:
    """Rank 1 takes its experts for 4 to 7, and has read 0 to 3."""
    with pytest.raises(UnsupportedModel, match=r"rank 1 has other weights of expert 4 of .*experts than the files of"):
        check(folders[kind], said_by_another(*part_of(folders[kind], 0, 4, said_first=4)))


def test_experts_that_no_rank_has_are_refused(folders: dict[str, Path]) -> None:
    with pytest.raises(UnsupportedModel, match=r"rank 1 has experts 4 to 6 of .*, where it should have 4 to 7"):
        check(folders["gpt_oss"], said_by_another(*part_of(folders["gpt_oss"], 4, 7)))


def test_another_model_on_another_rank_is_refused(folders: dict[str, Path], tmp_path: Path) -> None:
    """As if two hosts had different files under one name: the last expert of rank 1 differs alone."""
    module, mine = part_of(folders["gpt_oss"], 4, 8)
    module.get_submodule("model.layers.2.mlp.experts").down_proj[3] += 1
    with pytest.raises(UnsupportedModel, match=r"expert 7 of model\.layers\.2.*; give all ranks the same files"):
        check(folders["gpt_oss"], said_by_another(module, mine))


def test_a_fault_that_another_rank_found_is_raised_here_too(folders: dict[str, Path]) -> None:
    with pytest.raises(UnsupportedModel, match="rank 0 has other weights"):
        check(folders["gpt_oss"], said_by_another(*part_of(folders["gpt_oss"], 4, 8)), "rank 0 has other weights")


def test_ranks_with_different_settings_are_refused(folders: dict[str, Path]) -> None:
    with pytest.raises(InvalidConfiguration, match="expert_parallel: some ranks divide the experts and others do not"):
        check(folders["gpt_oss"], "{}")
