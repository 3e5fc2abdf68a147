"""Names and files that the coordinator's pages link to exist."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest

from kvforge.coordinator.core.machine import Machine
from tests.coordinator.journal.test_recovery import boot

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


def test_a_decode_step_names_members_that_exist() -> None:
    """Where the page names `Class.member`, a class of this name has it."""
    classes: dict[str, list[ast.ClassDef]] = {}
    for source in (file for part in ("coordinator", "worker", "protocol") for file in (ROOT / part).rglob("*.py")):
        for node in ast.walk(ast.parse(source.read_text())):
            if isinstance(node, ast.ClassDef):
                classes.setdefault(node.name, []).append(node)
    named = set(re.findall(r"`([A-Z]\w+)\.(\w+)`", (ROOT / "docs" / "step.md").read_text()))
    assert len(named) > 30
    missing = [f"{name}.{last}" for name, last in named if not any(last in members(n) for n in classes.get(name, []))]
    assert not missing


def members(node: ast.ClassDef) -> set[str]:
    """Return the names of a class's methods and attributes."""
    methods = {each.name for each in node.body if isinstance(each, ast.FunctionDef | ast.AsyncFunctionDef)}
    fields = {
        each.target.id for each in node.body if isinstance(each, ast.AnnAssign) and isinstance(each.target, ast.Name)
    }
    assigned = {
        each.attr for each in ast.walk(node) if isinstance(each, ast.Attribute) and isinstance(each.ctx, ast.Store)
    }
    return methods | fields | assigned


def test_the_deadlines_of_the_page_are_those_of_the_machine() -> None:
    """The table names every part that waits for time, as `pass_time`, and the scheduler, which acts by `fill`."""
    text = (ROOT / "docs" / "step.md").read_text().split("\n## Deadlines")[1]
    parts = [part.__self__.__class__.__name__ for part in Machine(boot(), 0)._timed]  # type: ignore[attr-defined]
    named = set(re.findall(r"\[`(\w+)\.(?:pass_time|fill)`\]", text))
    assert named == set(parts)


def test_the_glossary_of_the_coordinator_names_files_that_exist() -> None:
    text = (ROOT / "docs" / "glossary.md").read_text()
    rows = re.findall(
        r"^\| [^|]+ \| [^|]+ \| ([^|]+) \|$", text.split("## Coordinator")[1].split("\n## ")[0], re.MULTILINE
    )[1:]
    files = {file for row in rows for file in re.findall(r"`([\w/]+\.py)`", row)}
    assert len(files) > 20
    assert not [file for file in files if not (CORE / file).exists() and not (CORE.parent / file).exists()]
