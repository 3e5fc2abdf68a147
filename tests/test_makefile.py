"""The Makefile names the tested Pythons to a user of an older or a newer one."""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

import pytest

REPOSITORY = Path(__file__).parents[1]
# An interpreter that reports another version, and installs nothing.
AS_ANOTHER = """#!{python}
import sys
if sys.argv[1] != "-c":
    sys.exit("only the version is asked for")
sys.version_info = {version}
code, sys.argv = sys.argv[2], ["-c", *sys.argv[3:]]
exec(code)
"""


@pytest.mark.parametrize("where", ["system", "environment"])
@pytest.mark.parametrize("minor", [8, 10, 11, 13, 14, 15])
@pytest.mark.skipif(shutil.which("make") is None, reason="needs make")
def test_make_names_the_pythons_that_are_tested(minor: int, where: str, tmp_path: Path) -> None:
    """The environment's Python counts, where it exists: PYTHON of a first call is not repeated in a second one."""
    shutil.copy(REPOSITORY / "Makefile", tmp_path)
    (tmp_path / "pyproject.toml").touch()
    used = ".venv/bin/python" if where == "environment" else "another"
    for path, version in {"another": (3, 12), used: (3, minor)}.items():
        script = tmp_path / path
        script.parent.mkdir(parents=True, exist_ok=True)
        script.write_text(AS_ANOTHER.format(python=sys.executable, version=(*version, 1, "final", 0)))
        script.chmod(0o755)
    ran = subprocess.run(
        ["make", f"PYTHON={tmp_path / 'another'}", "demo"],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    needs = f"kvforge needs Python 3.11 or newer, not 3.{minor}: make PYTHON=python3.13 demo\n"
    note = (
        f"kvforge is tested with Python 3.11 to 3.13, not 3.{minor}. "
        "If the installation fails: make clean && make PYTHON=python3.13 demo\n"
    )
    assert ran.returncode
    assert (needs in ran.stderr) == (minor < 11)
    assert (note in ran.stderr) == (minor > 13)
    assert ("only the version is asked for" in ran.stderr) == (minor >= 11)
