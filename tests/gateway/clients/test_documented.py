"""docs/clients.md names the versions that are installed for the tests."""

from __future__ import annotations

import json
import re
import tomllib
from pathlib import Path

HERE = Path(__file__).parent
REPOSITORY = HERE.parents[2]
ROW = re.compile(r"^\|[^|]*`([\w@/.-]+)`[^|]*\| ([\d.]+) \|", re.MULTILINE)
PINNED = re.compile(r"^([\w.-]+)(?:\[[\w,]+\])?==([\w.]+)$")
# Additional packages of the clients.
HELPERS = {"@langchain/core", "zod"}


def npm() -> dict[str, str]:
    return dict(json.loads((HERE / "package.json").read_text())["dependencies"])


def pinned(lines: list[str]) -> dict[str, str]:
    return dict(found.groups() for line in lines if (found := PINNED.match(line)))  # type: ignore[misc]


def test_the_documented_versions_are_those_of_the_tests() -> None:
    documented = set(ROW.findall((REPOSITORY / "docs" / "clients.md").read_text(encoding="utf-8")))
    dev = tomllib.loads((REPOSITORY / "pyproject.toml").read_text())["project"]["optional-dependencies"]["dev"]
    files = [file.read_text().splitlines() for file in (HERE / "requirements").glob("*.txt")]
    tested = {pair for lines in (dev, *files) for pair in pinned(lines).items()} | npm().items()
    assert documented - tested == set()
    assert npm().keys() - HELPERS <= {name for name, _ in documented}


def test_every_version_is_exact() -> None:
    optional = json.loads((HERE / "package.json").read_text())["optionalDependencies"]
    wanted = {**npm(), **optional}
    lock = json.loads((HERE / "package-lock.json").read_text())["packages"]
    assert {name: lock[f"node_modules/{name}"]["version"] for name in wanted} == wanted
    assert not [name for name, entry in lock.items() if "resolved" in entry], "no registry is named"
    for file in (HERE / "requirements").glob("*.txt"):
        lines = file.read_text().splitlines()
        assert len(pinned(lines)) == len(lines) > 0, file.name
