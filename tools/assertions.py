"""Count the assertions of the tests per folder: `python -m tools.assertions [COMMIT]`.

Counted are `assert` statements and calls of pytest's `raises`, `warns`, `deprecated_call` and `fail`, in every Python
file of tests/. With a commit, the table has a column for its numbers, and the exit status is 1 where a folder had more.
"""

from __future__ import annotations

import ast
import io
import subprocess
import sys
import tarfile
from collections import Counter
from collections.abc import Iterable, Iterator
from pathlib import Path, PurePosixPath

ROOT = Path(__file__).parents[1]
CALLS = {"raises", "warns", "deprecated_call", "fail"}


def count(source: str) -> int:
    """Return the number of assertions of a file."""
    return sum(map(_is_assertion, ast.walk(ast.parse(source))))


def _is_assertion(node: ast.AST) -> bool:
    if isinstance(node, ast.Assert):
        return True
    called = node.func if isinstance(node, ast.Call) else None
    return (
        isinstance(called, ast.Attribute)
        and called.attr in CALLS
        and isinstance(called.value, ast.Name)
        and called.value.id == "pytest"
    )


def per_folder(files: Iterable[tuple[str, str]]) -> Counter[str]:
    """Return the number of assertions of each folder.

    Args:
        files: Path, relative to the root of the repository, and content of each file.
    """
    found: Counter[str] = Counter()
    for name, source in files:
        if (number := count(source)) != 0:
            found[PurePosixPath(name).parent.as_posix()] += number
    return found


def _files_now() -> Iterator[tuple[str, str]]:
    for path in (ROOT / "tests").rglob("*.py"):
        yield path.relative_to(ROOT).as_posix(), path.read_text(encoding="utf-8")


def _files_of(commit: str) -> Iterator[tuple[str, str]]:
    command = ["git", "-C", str(ROOT), "archive", "--format=tar", commit, "tests"]
    packed = subprocess.run(command, capture_output=True, check=True).stdout
    with tarfile.open(fileobj=io.BytesIO(packed)) as archive:
        for member in archive:
            if member.name.endswith(".py") and (content := archive.extractfile(member)) is not None:
                yield member.name, content.read().decode()


def main(commit: str | None) -> int:
    """Print the table.

    Args:
        commit: The commit to compare with.

    Returns:
        The exit status.
    """
    now = per_folder(_files_now())
    if commit is None:
        for folder, number in sorted(now.items()):
            print(f"{number:6} {folder}")
        print(f"{now.total():6} in total")
        return 0
    before = per_folder(_files_of(commit))
    for folder in sorted(before | now):
        mark = "  fewer" if now[folder] < before[folder] else ""
        print(f"{before[folder]:6} {now[folder]:6} {folder}{mark}")
    print(f"{before.total():6} {now.total():6} in total")
    return 1 if before - now else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1] if len(sys.argv) > 1 else None))
