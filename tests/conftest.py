"""Fixtures that several packages' tests share."""

from __future__ import annotations

from pathlib import Path

import pytest

from kvforge import models


@pytest.fixture(scope="session")
def smollm2_path() -> Path:
    """The SmolLM2-135M-Instruct GGUF file, fetched into the user's cache folder the first time. For `model` tests."""
    return models.pull("smollm2-135m")
