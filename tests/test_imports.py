"""The parts of kvforge are imported by one name."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest

REPOSITORY = Path(__file__).parents[1]
PARTS = ("coordinator", "gateway", "loadtest", "protocol", "worker")
FOLDERS = (*PARTS, "benchmarks", "docs", "kvforge", "tests")


# The statements are looked for in the sources with such a line alone: parsing takes most of the time.
LINE = re.compile(rf"\b(?:import|from)\b.*(?<![.\w])(?:{'|'.join(PARTS)})\b")


def _imported(source: str) -> set[str]:
    if not LINE.search(source.replace("\\\n", " ")):
        return set()
    found: set[str] = set()
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            found |= {alias.name.partition(".")[0] for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and not node.level and node.module:
            found.add(node.module.partition(".")[0])
    return found


@pytest.mark.parametrize("folder", FOLDERS)
def test_no_part_is_imported_by_the_name_of_its_folder(folder: str) -> None:
    """`import worker` in a checkout would load a second copy of every class of `kvforge.worker`."""
    files = [
        path for path in (REPOSITORY / folder).rglob("*.py") if not path.is_relative_to(REPOSITORY / "kvforge" / folder)
    ]
    assert files
    sources = {str(path): path.read_text(encoding="utf-8") for path in files}
    assert {path: sorted(names) for path, source in sources.items() if (names := _imported(source) & set(PARTS))} == {}


@pytest.mark.parametrize(
    ("source", "names"),
    [
        ("import worker", {"worker"}),
        ("import os, \\\n    worker as w", {"os", "worker"}),
        ("if True: from gateway.http import app", {"gateway"}),
        ("from kvforge.worker import config\nfrom .protocol import errors\nimport kvforge.gateway", set()),
    ],
)
def test_each_way_to_import_is_found(source: str, names: set[str]) -> None:
    assert _imported(source) == names
