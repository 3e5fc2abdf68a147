"""The command that adds an extra to this installation of kvforge.

An installer records where a distribution came from (PEP 610, `direct_url.json`) and its own name (`INSTALLER`). The
command repeats that source, so it also works for a checkout, a file or a repository, which no package index knows.
"""

from __future__ import annotations

import json
import shlex
from typing import TYPE_CHECKING
from urllib.parse import unquote, urlsplit

if TYPE_CHECKING:
    from importlib.metadata import Distribution

INSTALLERS = {"uv": "uv pip install"}  # others: pip's own command


def install_command(extra: str) -> str:
    """Return the shell command that installs kvforge's optional dependencies `extra` here.

    Args:
        extra: a name of `[project.optional-dependencies]`, such as "worker".
    """
    # Here, because every service imports this module: for a coordinator this would be a tenth of its imports.
    from importlib.metadata import PackageNotFoundError, distribution

    try:
        found = distribution("kvforge")
    except PackageNotFoundError:  # a source tree on PYTHONPATH
        return f"pip install '.[{extra}]' in the source tree"
    program = INSTALLERS.get((found.read_text("INSTALLER") or "").strip(), "pip install")
    return f"{program} {_requirement(found, extra)}"


def _requirement(found: Distribution, extra: str) -> str:
    try:
        source = json.loads(found.read_text("direct_url.json") or "{}")
        url = str(source["url"])
    except (ValueError, KeyError, TypeError):  # from an index, or a record that PEP 610 does not describe
        return shlex.quote(f"kvforge[{extra}]")
    if "dir_info" in source:
        editable = "-e " if source["dir_info"].get("editable") else ""
        return f"{editable}{shlex.quote(f'{unquote(urlsplit(url).path)}[{extra}]')}"
    if vcs := source.get("vcs_info"):
        url = f"{vcs['vcs']}+{url}@{vcs['commit_id']}"
    return shlex.quote(f"kvforge[{extra}] @ {url}")
