"""The parts of kvforge are imported by one name."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

REPOSITORY = Path(__file__).parents[1]
PARTS = ("coordinator", "gateway", "loadtest", "protocol", "worker")
FOLDERS = (*PARTS, "benchmarks", "docs", "kvforge", "tests")


def _imported(path: Path) -> set[str]:
    found: set[str] = set()
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
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
    assert {str(path): sorted(names) for path in files if (names := _imported(path) & set(PARTS))} == {}
