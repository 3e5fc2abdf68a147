"""The documentation: it builds strictly, fetches nothing from elsewhere, and its catalogue of errors is of today."""

from __future__ import annotations

import re
import runpy
import subprocess
import sys
from pathlib import Path

REPOSITORY = Path(__file__).parents[1]
FETCHED = re.compile(r'<(?:script[^>]*\bsrc|link[^>]*rel="stylesheet"[^>]*\bhref)="?https?:')


def test_the_site_builds_strictly_and_needs_no_network(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--quiet", "--site-dir", str(tmp_path / "site")]
    built = subprocess.run(command, cwd=REPOSITORY, capture_output=True, text=True, timeout=120, check=False)
    assert built.returncode == 0, built.stderr
    pages = list((tmp_path / "site").rglob("*.html"))
    assert len(pages) > 8
    assert not [page.name for page in pages if FETCHED.search(page.read_text(encoding="utf-8"))]


def test_the_catalogue_of_errors_is_of_today() -> None:
    made = runpy.run_path(str(REPOSITORY / "docs" / "error_catalogue.py"))["catalogue"]()
    assert (REPOSITORY / "docs" / "errors.md").read_text(encoding="utf-8") == made
