"""The page, laid out by a real browser without a network."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
from pathlib import Path

import pytest

from tests.loadtest.report.everything import PICTURES

NAMES = ("chromium", "chromium-browser", "google-chrome", "chrome", "chrome-headless-shell", "firefox")
LIMIT_S = 120
# No host name resolves: the page gets nothing from outside.
CHROMIUM = (
    "--headless=new", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage", "--hide-scrollbars",
    "--no-first-run", "--disable-extensions", "--host-resolver-rules=MAP * ~NOTFOUND", "--window-size=1200,5000",
)  # fmt: skip


def browser() -> str | None:
    named = os.environ.get("KVFORGE_BROWSER")
    return shutil.which(named) if named else next(filter(None, map(shutil.which, NAMES)), None)


BROWSER = browser()
FIREFOX = BROWSER is not None and "firefox" in Path(BROWSER).name
pytestmark = pytest.mark.skipif(BROWSER is None, reason=f"needs a browser ({', '.join(NAMES)}, or KVFORGE_BROWSER)")


@pytest.fixture
def page(folder: Path) -> Path:
    return folder / "index.html"


@pytest.fixture(scope="module")
def profile(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the browser's profile folder."""
    return tmp_path_factory.mktemp("profile")


def ask(page: Path, profile: Path, *options: str) -> str:
    """Run the browser; return its output."""
    assert BROWSER is not None
    own = ("--headless", "--no-remote", "--profile", str(profile)) if FIREFOX else (
        *CHROMIUM, f"--user-data-dir={profile}")  # fmt: skip
    # A separate home, because a browser writes there whatever its profile is.
    environment = os.environ | {"HOME": str(profile)}
    command = [BROWSER, *own, *options, page.as_uri()]
    done = subprocess.run(command, capture_output=True, text=True, timeout=LIMIT_S, env=environment, check=False)
    assert done.returncode == 0, done.stderr[-2000:]
    return done.stdout


@pytest.mark.skipif(FIREFOX, reason="firefox cannot print the rendered page: needs chromium")
def test_every_figure_is_laid_out_and_nothing_is_fetched(page: Path, profile: Path) -> None:
    said = ask(page, profile, "--virtual-time-budget=5000", "--dump-dom")
    root = re.search(r"<html[^>]*>", said)
    assert root is not None, said[:500]
    assert f'data-figures="{len(PICTURES)}"' in root[0] and 'data-requested="0"' in root[0]


def test_what_is_seen_is_not_blank(page: Path, profile: Path) -> None:
    from matplotlib import image

    picture = profile / "page.png"
    ask(page, profile, *(("--window-size=1200,5000",) if FIREFOX else ()), f"--screenshot={picture}")
    pixels = image.imread(picture)[:, :, :3]
    assert pixels.shape[:2] >= (3000, 1200)
    background = pixels[2, 2]
    drawn = (abs(pixels - background) > 0.1).any(axis=2)
    assert 0.02 < drawn.mean() < 0.7
    # Each visible part shows something, with the colours of lines, not only of text.
    assert all(part.any() for part in (drawn[at : at + 500] for at in range(0, 4500, 500)))
    assert (pixels.max(axis=2) - pixels.min(axis=2) > 0.4).mean() > 1e-3
