"""docs/batches.md, run as it is written, over a coordinator that invents tokens."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

from tests.gateway.serve.test_serving import making_tokens_up
from tests.gateway.served import Gateway

pytestmark = pytest.mark.model  # it needs the model's tokenizer

GUIDE = Path(__file__).parents[2] / "docs" / "batches.md"
SETTINGS = 'tokenizer = "smollm2-135m"\nnames = ["smollm2-135m"]\n'


def test_the_guide_runs_as_written(
    smollm2_path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert smollm2_path.exists()
    text = GUIDE.read_text(encoding="utf-8")
    blocks = re.findall(r"^```python\n(.*?)^```", text, re.MULTILINE | re.DOTALL)
    assert len(blocks) == 5
    monkeypatch.chdir(tmp_path)
    names: dict[str, Any] = {}
    with making_tokens_up(0) as runtime, Gateway(runtime, tmp_path, SETTINGS) as gateway:
        for block in blocks:
            exec(block.replace("http://127.0.0.1:8000", gateway.url), names)  # noqa: S102 - the page of this repository
        names["client"].close()
    assert set(names["answers"]) == {"france", "italy"} and all(names["answers"].values())
    printed = capsys.readouterr().out
    assert "completed BatchRequestCounts(completed=2, failed=0, total=2)" in printed
    assert "bad 400 max_tokens:" in printed
