"""Every Triton version of `torch>=2.9` has the names that the kernels use, also those of Hopper's kernel."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

pytest.importorskip("triton")

from kvforge.worker.attention.prefill_plan import GLUON_VERSIONS
from tests.worker.kernels.triton_names import EITHER, GLUON, TABLE, VERSIONS, is_there, names_used

FOUND = json.loads(TABLE.read_text())


def test_the_table_is_of_what_is_used() -> None:
    used, looked_up = names_used(), set(FOUND["names"])
    assert set(used) <= looked_up, f"run `make triton-versions`: {set(used) - looked_up} of {used.items()}"
    assert {"triton.knobs", "triton.language.extra.cuda.gdc_wait", "triton.language.dot"} <= set(used)
    assert tuple(FOUND["versions"]) == VERSIONS


@pytest.mark.parametrize("version", VERSIONS)
def test_a_version_has_what_is_used(version: str) -> None:
    found = FOUND["versions"][version]
    major, minor, _ = map(int, version.split("."))
    takes_hopper = GLUON_VERSIONS[0] <= (major, minor) <= GLUON_VERSIONS[1]
    lacks = set(found["lacks"]) & set(names_used())
    for pair in EITHER:
        assert not takes_hopper or not set(pair) <= lacks, pair
        lacks -= set(pair)
    if not takes_hopper:
        lacks = {name for name in lacks if not name.startswith(GLUON)}
    assert not lacks
    assert all(not takes_hopper and ("hopper" in each or "gluon" in each) for each in found["failed"]), found["failed"]


def test_the_installed_one_is_as_the_table_says() -> None:
    import triton

    version = triton.__version__
    if version not in VERSIONS:
        pytest.skip(f"Triton {version} is not one of the table's")
    assert {name for name in names_used() if not is_there(name)} == set(FOUND["versions"][version]["lacks"]) & set(
        names_used()
    )


def test_the_range_that_is_published_begins_where_the_table_does() -> None:
    """torch 2.9 brings Triton 3.5; 2.8 has 3.4, which refuses the dependent launches of decode on sm_90."""
    project = Path(__file__).parents[3] / "pyproject.toml"
    assert re.findall(r'"torch>=([\d.]+)"', project.read_text()) == ["2.9"]
    assert VERSIONS[0].startswith("3.5.")
