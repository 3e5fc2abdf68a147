"""Builds a wheel of the running kvforge, so that the service gets this version, from a checkout or an installation."""

from __future__ import annotations

import base64
import hashlib
import zipfile
from importlib.metadata import Distribution, PackageNotFoundError, distribution
from pathlib import Path

from kvforge.protocol.errors import Unavailable

PACKAGE = "kvforge"
METADATA = ("METADATA", "WHEEL", "entry_points.txt")
LEFT_OUT = ("__pycache__",)
MADE = (1980, 1, 1, 0, 0, 0)  # the time of every file in it, so that equal contents give equal wheels


class Wheel:
    """A wheel and its digest.

    Raises:
        Unavailable: This kvforge is not installed.
    """

    def __init__(self, root: Path | None = None) -> None:
        """Collect the files.

        Args:
            root: The folder of the packages; None: that of this one.
        """
        found = _installed()
        self.version = found.version
        self._members = _packages(root if root is not None else Path(__file__).absolute().parents[2])
        info = f"kvforge-{self.version}.dist-info"
        for name in METADATA:
            if (text := found.read_text(name)) is not None:
                self._members[f"{info}/{name}"] = text.encode()
        rows = [f"{name},{_record(content)},{len(content)}" for name, content in self._members.items()]
        self._members[f"{info}/RECORD"] = "\n".join([*rows, f"{info}/RECORD,,", ""]).encode()
        self.digest = hashlib.sha256(self._members[f"{info}/RECORD"]).hexdigest()

    def write(self, folder: Path) -> Path:
        """Write the wheel into a folder; return its path."""
        path = folder / f"kvforge-{self.version}-py3-none-any.whl"
        with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as archive:
            for name, content in self._members.items():
                archive.writestr(zipfile.ZipInfo(name, MADE), content, zipfile.ZIP_DEFLATED)
        return path


def _installed() -> Distribution:
    try:
        return distribution("kvforge")
    except PackageNotFoundError:
        problem = "this kvforge is not installed, so its dependencies are unknown: pip install it first"
        raise Unavailable(f"{problem} (from a checkout: make venv)") from None


def _packages(root: Path) -> dict[str, bytes]:
    """Return every file of the packages by its name in the wheel; links are followed."""
    members = {}
    stack = [root / PACKAGE]
    while stack:
        for path in sorted(stack.pop().iterdir()):
            if path.name in LEFT_OUT:
                continue
            if path.is_dir():
                stack.append(path)
            else:
                members[str(path.relative_to(root))] = path.read_bytes()
    return dict(sorted(members.items()))


def _record(content: bytes) -> str:
    encoded = base64.urlsafe_b64encode(hashlib.sha256(content).digest()).decode().rstrip("=")
    return f"sha256={encoded}"
