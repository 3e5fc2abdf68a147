"""The command that adds an extra, for each kind of installation."""

from __future__ import annotations

import json
import subprocess
import sys
from importlib import metadata
from importlib.metadata import PathDistribution
from pathlib import Path

import pytest

from kvforge.process.installation import install_command

CASES = {
    "checkout": (
        "pip\n",
        {"url": "file:///home/a%20b/kvforge", "dir_info": {"editable": True}},
        "pip install -e '/home/a b/kvforge[worker]'",
    ),
    "folder": ("uv", {"url": "file:///srv/kvforge", "dir_info": {}}, "uv pip install '/srv/kvforge[worker]'"),
    "wheel": (
        "pip",
        {"url": "file:///tmp/kvforge-0.1.0-py3-none-any.whl", "archive_info": {}},
        "pip install 'kvforge[worker] @ file:///tmp/kvforge-0.1.0-py3-none-any.whl'",
    ),
    "repository": (
        "pip",
        {"url": "https://example.org/kvforge.git", "vcs_info": {"vcs": "git", "commit_id": "ab12"}},
        "pip install 'kvforge[worker] @ git+https://example.org/kvforge.git@ab12'",
    ),
    "index": ("pip", None, "pip install 'kvforge[worker]'"),
    "foreign record": ("pip", ["no object"], "pip install 'kvforge[worker]'"),
}


@pytest.mark.parametrize("name", CASES)
def test_the_command_names_the_source(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    installer, record, command = CASES[name]
    info = tmp_path / "kvforge-0.1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.4\nName: kvforge\nVersion: 0.1.0\n")
    (info / "INSTALLER").write_text(installer)
    if record is not None:
        (info / "direct_url.json").write_text(json.dumps(record))
    monkeypatch.setattr(metadata, "distribution", lambda _name: PathDistribution(info))
    assert install_command("worker") == command


def test_a_source_tree_that_is_not_installed(monkeypatch: pytest.MonkeyPatch) -> None:
    def missing(name: str) -> PathDistribution:
        raise metadata.PackageNotFoundError(name)

    monkeypatch.setattr(metadata, "distribution", missing)
    assert install_command("tcp") == "pip install '.[tcp]' in the source tree"


def test_a_coordinator_imports_no_metadata_of_distributions() -> None:
    code = "import kvforge.coordinator.__main__, sys; sys.exit('importlib.metadata' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
