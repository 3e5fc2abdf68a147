"""One report with all of its parts, for the tests of the folder and of the browser."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.loadtest.report.everything import write_everything


@pytest.fixture(scope="session")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    where = tmp_path_factory.mktemp("report") / "made" / "here"
    write_everything(where)
    return where
