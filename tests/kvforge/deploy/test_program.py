"""Running administrators' programs."""

from __future__ import annotations

from pathlib import Path

import pytest

from kvforge.deploy import program
from kvforge.protocol.errors import Unavailable


def test_a_program_outside_path_is_found_where_administrators_programs_lie(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """`su` without a login keeps the user's PATH, which has no /usr/sbin on Debian."""
    (tmp_path / "userdel").write_text("#!/bin/sh\necho removed $1\n")
    (tmp_path / "userdel").chmod(0o755)
    monkeypatch.setattr(program, "ADMIN_PATH", str(tmp_path))
    monkeypatch.setenv("PATH", "/nowhere")
    assert program.run(["userdel", "kvforge"]).output == "removed kvforge\n"
    with pytest.raises(Unavailable, match="no-such-program is not installed"):
        program.run(["no-such-program"])
