"""A served model has one name, whatever the source of its files."""

from __future__ import annotations

from pathlib import Path

import pytest

from kvforge.models.naming import name_of


@pytest.mark.parametrize(
    ("path", "name"),
    [
        ("/home/ada/.cache/kvforge/models/smollm2-135m/SmolLM2-135M-Instruct.Q4_1.gguf", "smollm2-135m"),
        ("/var/lib/kvforge/SmolLM2-135M-Instruct.Q4_1.gguf", "smollm2-135m"),
        ("/hub/models--org--repo-1.5/snapshots/0123abc", "org/repo-1.5"),
        ("/hub/models--org--re--po/snapshots/0123abc", "org/re--po"),
        ("/hub/models--org--repo/snapshots/0123abc/Q4.gguf", "org/repo:Q4"),
        ("/srv/llama-3.1-8b", "llama-3.1-8b"),
        ("/srv/llama-3.1-8b.Q8_0.gguf", "llama-3.1-8b.Q8_0"),
    ],
)
def test_a_name_comes_from_where_the_files_are(path: str, name: str) -> None:
    assert name_of(Path(path)) == name
