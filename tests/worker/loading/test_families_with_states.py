"""The table of families with recurrent states in docs/models.md: it names all of them, as they are served."""

from __future__ import annotations

from pathlib import Path

import pytest
import transformers

from kvforge.worker.loading.families import FAMILIES
from kvforge.worker.loading.mixer_steps import STEPS
from kvforge.worker.loading.mixers import CALLS

from .random_models import HYBRIDS

PAGE = Path(__file__).parents[3] / "docs" / "models.md"
TITLE, BEHIND = "### Families with recurrent states", "## Windows"
VERSION = "5.24"  # of the table
ELSEWHERE = {"minimax", "recurrent_gemma", "rwkv", "xlstm"}  # their states lie outside transformers' usual cache
TEXT = ("ForCausalLM(", "ForConditionalGeneration(")


def rows() -> dict[str, tuple[str, str]]:
    """Return how the table says that generated tokens and other layers run, by the family."""
    text = PAGE.read_text().partition(TITLE)[2].partition(BEHIND)[0]
    cells = [[cell.strip() for cell in line.strip("|").split("|")] for line in text.splitlines() if line[:1] == "|"]
    return {family: (step, others) for family, _, step, others in cells[2:]}


def found() -> set[str]:
    """Return transformers' folders of models with text that keep a recurrent state."""
    sources = {path: path.read_text() for path in Path(transformers.__file__).parent.glob("models/*/modeling_*.py")}
    keep = {
        path.parent.name
        for path, text in sources.items()
        if any(each in text for each in CALLS) and any(each in text for each in TEXT)
    }
    return keep | ELSEWHERE


@pytest.mark.skipif(not transformers.__version__.startswith(VERSION), reason="the table is of another version")
def test_every_family_is_in_the_table() -> None:
    assert rows().keys() == found()


def test_the_table_says_what_is_described() -> None:
    steps = {name.partition(".")[0] for name in STEPS}
    layers = {name.partition(".")[0] for name, family in FAMILIES.items() if family.mixers}
    table = rows()
    assert {family for family, (step, _) in table.items() if step == "described"} == steps
    assert {family for family, (_, others) in table.items() if others == "described"} == layers
    assert {step for step, _ in table.values()} == {"described", "module", "refused"}
    tested = {model_type.removesuffix("_text") for model_type, _ in HYBRIDS.values()}
    assert not [family for family in tested if table[family][0] == "refused"]
