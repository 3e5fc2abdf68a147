"""The documentation builds strictly, fetches nothing from other sites, and its catalogues are current."""

from __future__ import annotations

import asyncio
import re
import runpy
import subprocess
import sys
from pathlib import Path
from urllib.parse import urlsplit

import pytest

from tests.gateway.page.browser import Browser, browser

REPOSITORY = Path(__file__).parents[1]
SOURCES = "https://github.com/kvforge/kvforge/blob/main/"
FETCHED = re.compile(r'<(?:script[^>]*\bsrc|link[^>]*rel="stylesheet"[^>]*\bhref)="?https?:')


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the folder of the built site."""
    folder = tmp_path_factory.mktemp("built") / "site"
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--quiet", "--site-dir", str(folder)]
    built = subprocess.run(command, cwd=REPOSITORY, capture_output=True, text=True, timeout=120, check=False)
    assert built.returncode == 0, built.stderr
    return folder


def test_the_site_builds_strictly_and_needs_no_network(site: Path) -> None:
    pages = list(site.rglob("*.html"))
    assert len(pages) > 8
    assert not [page.name for page in pages if FETCHED.search(page.read_text(encoding="utf-8"))]
    assert not list(site.rglob("*.py"))
    assert [link for page in pages if page.name != "404.html" for link in dead_links(page, site)] == []


def dead_links(page: Path, site: Path) -> list[str]:
    """Return the links of a page that lead to no file of the site, nor to one of the repository."""
    dead = []
    for link in re.findall(r'\bhref="?([^">\s#]+)', page.read_text(encoding="utf-8")):
        if link.startswith(SOURCES):
            found = (REPOSITORY / link.removeprefix(SOURCES)).exists()
        else:
            found = bool(urlsplit(link).scheme) or (page.parent / link).exists()
        if not found:
            dead.append(f"{page.relative_to(site)}: {link}")
    return dead


def test_every_page_is_in_the_navigation() -> None:
    listed = re.findall(r"([\w-]+\.md)$", (REPOSITORY / "mkdocs.yml").read_text(encoding="utf-8"), re.MULTILINE)
    assert sorted(listed) == sorted(path.name for path in (REPOSITORY / "docs").glob("**/*.md"))


# Names in tables that wrap to several lines.
BROKEN = """[...document.querySelectorAll("article table code")].filter((code) =>
    !code.textContent.includes(" ") && code.getClientRects().length > 1).map((code) => code.textContent)"""
WIDER = "document.documentElement.scrollWidth - innerWidth"


@pytest.mark.skipif(browser() is None, reason="needs Chromium")
def test_names_in_tables_are_not_broken(site: Path) -> None:
    async def look() -> None:
        async with Browser() as page:
            for name in ("settings", "metrics", "http", "tuning", "models", "coming-from", "benchmarks"):
                for width in (1280, 400):
                    await page.look(width, 800)
                    await page.go(f"file://{site}/{name}/index.html")
                    await page.until(
                        f"location.href.endsWith('{name}/index.html') && document.readyState === 'complete'"
                    )
                    assert await page.run("document.querySelectorAll('article table code').length") > 3
                    assert await page.run(BROKEN) == [], (name, width)
                    assert await page.run(WIDER) <= 0, (name, width)

    asyncio.run(look())


@pytest.mark.parametrize(("page", "script"), [("errors", "error_catalogue"), ("settings", "settings_catalogue")])
def test_a_catalogue_is_of_today(page: str, script: str) -> None:
    made = runpy.run_path(str(REPOSITORY / "docs" / f"{script}.py"))["catalogue"]()
    assert (REPOSITORY / "docs" / f"{page}.md").read_text(encoding="utf-8") == made


@pytest.mark.parametrize("page", ["serving", "tuning"])
def test_metrics_and_settings_that_a_page_names_are_there(page: str) -> None:
    text, metrics, settings = (
        (REPOSITORY / "docs" / f"{name}.md").read_text(encoding="utf-8") for name in (page, "metrics", "settings")
    )
    assert [name for name in re.findall(r"`(kvforge_\w+)`", text) if f"`{name}`" not in metrics] == []
    named = re.findall(r"`(limits|cache|schedule|journal)\.(\w+)", text)
    assert named
    tables = {part.partition("]")[0]: part for part in settings.split("### [")}
    assert [f"{table}.{name}" for table, name in named if f"| `{name}` |" not in tables[table]] == []
