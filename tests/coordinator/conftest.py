"""Fixtures of the coordinator's tests."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from tests.coordinator.driver import Driver, FakeWorker

MakePool = Callable[..., tuple[Driver, FakeWorker]]


@pytest.fixture
def driver() -> Driver:
    """A machine without workers."""
    return Driver()


@pytest.fixture
def make_pool() -> MakePool:
    """A factory of machines with one worker of `blocks` blocks; further arguments are limits."""

    def make(blocks: int = 16, **limits: object) -> tuple[Driver, FakeWorker]:
        driver = Driver(**limits)
        return driver, driver.add_worker(blocks)

    return make
