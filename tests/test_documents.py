"""Files, folders, modules and make targets named in the documents exist."""

from __future__ import annotations

import importlib.util
import re
from pathlib import Path

import pytest

REPOSITORY = Path(__file__).parents[1]
DOCUMENTS = sorted(
    [
        *REPOSITORY.glob("*.md"),
        *(REPOSITORY / "docs").glob("**/*.md"),
        REPOSITORY / "deploy" / "README.md",
        REPOSITORY / "examples" / "README.md",
    ]
)
OURS = (
    *("benchmarks", "coordinator", "deploy", "docs", "examples", "gateway", "kvforge", "loadtest", "protocol", "tests"),
    *("tools", "worker"),
)
README_BYTES_MAX = 8192
LINK = re.compile(r"\]\(([^)#\s]+)(?:#[^)]*)?\)")
PATH = re.compile(rf"(?<![\w/.$:-])(?:{'|'.join(OURS)})/[\w./*-]*[\w/]")
MODULE = re.compile(r"python -m ((?:benchmarks|tests|tools|examples|kvforge)[\w.]*)")
TARGET = re.compile(r"`make ([a-z-]+)")


def test_there_are_documents() -> None:
    names = {path.name for path in DOCUMENTS}
    assert {"README.md", "ARCHITECTURE.md", "CONTRIBUTING.md", "CHANGELOG.md"} <= names


def test_the_readme_is_short() -> None:
    """Details belong into docs/."""
    assert (REPOSITORY / "README.md").stat().st_size <= README_BYTES_MAX


def test_the_readme_links_to_every_page_that_is_not_below_another() -> None:
    text = (REPOSITORY / "README.md").read_text(encoding="utf-8")
    linked = {link.removeprefix("docs/") for link in LINK.findall(text)}
    pages = {path.name for path in (REPOSITORY / "docs").glob("*.md")}
    assert pages - linked <= {"index.md", "clients.md", "python-client.md"}


def _anchors(document: Path) -> set[str]:
    """Return the names of a document's headings, as GitHub and mkdocs make them."""
    titles = re.findall(r"^#+ (.+)$", document.read_text(encoding="utf-8"), re.MULTILINE)
    return {re.sub(r"[^\w -]", "", title).strip().lower().replace(" ", "-") for title in titles}


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda path: str(path.relative_to(REPOSITORY)))
def test_links_lead_to_headings_that_exist(document: Path) -> None:
    links = re.findall(r"\]\(([^)#\s]*\.md)?#([^)\s]+)\)", document.read_text(encoding="utf-8"))
    targets = [(document.parent / path if path else document, name) for path, name in links]
    assert [name for path, name in targets if name not in _anchors(path)] == []


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda path: str(path.relative_to(REPOSITORY)))
def test_what_a_document_names_is_there(document: Path) -> None:
    text = document.read_text(encoding="utf-8")
    links = [link for link in LINK.findall(text) if "://" not in link]
    missing = [link for link in links if not (document.parent / link).exists()]
    if document.name != "CHANGELOG.md":  # it also names removed files
        paths = {path.rstrip("/.") for path in PATH.findall(text) if "NAME" not in path}
        missing += sorted(path for path in paths if not any(REPOSITORY.glob(path)))
        missing += sorted({name for name in MODULE.findall(text) if importlib.util.find_spec(name.rstrip(".")) is None})
        makefile = (REPOSITORY / "Makefile").read_text(encoding="utf-8")
        missing += [name for name in TARGET.findall(text) if not re.search(rf"^{name}:", makefile, re.MULTILINE)]
    assert not missing, f"{document.name} names missing files or targets"


INSTRUCTIONS = [path for path in DOCUMENTS if path.name != "CHANGELOG.md"]


@pytest.mark.parametrize("document", INSTRUCTIONS, ids=lambda path: str(path.relative_to(REPOSITORY)))
def test_no_document_installs_from_an_index(document: Path) -> None:
    """kvforge is not on a package index; docs/install.md describes the installation."""
    commands = re.findall(r"pip install [^\n`]*", document.read_text(encoding="utf-8"))
    assert not [each for each in commands if re.search(r"kvforge(?!\[[a-z,]+\] @ )", each)]
