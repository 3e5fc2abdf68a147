"""Names and files that the coordinator's pages link to exist."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PAGES = ("step.md", "glossary.md")
CORE = ROOT / "coordinator" / "core"


@pytest.mark.parametrize("page", PAGES)
def test_links_lead_to_files(page: str) -> None:
    text = (ROOT / "docs" / page).read_text()
    missing = [link for link in re.findall(r"\]\(([^)#]+)\)", text) if not (ROOT / "docs" / link).exists()]
    assert not missing


def test_a_decode_step_names_what_is_in_the_linked_file() -> None:
    """The linked file defines the name in front of the link."""
    text = (ROOT / "docs" / "step.md").read_text()
    named = re.findall(r"\[`([\w.]+)`\]\(\.\./([^)]+\.py)\)", text)
    assert len(named) > 12
    for name, file in named:
        last = name.removesuffix(".py").split(".")[-1]
        source = (ROOT / file).read_text()
        known = Path(file).stem == last or re.search(rf"^\s*(def|class) {last}\b", source, re.MULTILINE)
        assert known, f"{name} is not in {file}"


def test_the_glossary_of_the_coordinator_names_files_that_exist() -> None:
    text = (ROOT / "docs" / "glossary.md").read_text()
    rows = re.findall(
        r"^\| [^|]+ \| [^|]+ \| ([^|]+) \|$", text.split("## Coordinator")[1].split("\n## ")[0], re.MULTILINE
    )[1:]
    files = {file for row in rows for file in re.findall(r"`([\w/]+\.py)`", row)}
    assert len(files) > 20
    assert not [file for file in files if not (CORE / file).exists() and not (CORE.parent / file).exists()]
