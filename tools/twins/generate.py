"""Generate the blocking client from the asyncio client: `python -m tools.twins` (see `kvforge.client.aio`).

Rules:

- `async def` becomes `def`;
- an awaited operation (`await self._calls. ...`) runs to its end, any other `await` is dropped;
- a name loses its `Async`, a dunder method its `a`;
- paragraphs of docstrings that begin with "In asyncio:" are dropped.

Comments, types and order stay unchanged; ruff formats the result.
"""

from __future__ import annotations

import ast
import re
import subprocess
import sys
from pathlib import Path

CLIENT = Path(__file__).parents[2] / "kvforge" / "client"
FILES = ("client.py", "request_handles.py")
HEAD = '"""Made of `aio/{}` by `python -m tools.twins`: change it there."""'


def blocking(name: str) -> str:
    """Return the text of a file of the blocking client."""
    source = (CLIENT / "aio" / name).read_text(encoding="utf-8")
    head = ast.parse(source).body[0]
    edits: list[tuple[int, int, int, int, str]] = [(head.lineno, head.col_offset, *_end(head), HEAD.format(name))]
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.AsyncFunctionDef):
            edits.append((node.lineno, node.col_offset, node.lineno, node.col_offset + len("async "), ""))
        elif isinstance(node, ast.Await):
            driven = ast.unparse(node.value).startswith("self._calls.")
            edits.append(
                (node.lineno, node.col_offset, node.lineno, node.col_offset + len("await "), "drive(" * driven)
            )
            edits.append((*_end(node), *_end(node), ")" * driven))
    lines = source.splitlines(keepends=True)
    for line, start, end_line, end, text in sorted(edits, reverse=True):  # from the end: positions stay valid
        after = lines[end_line - 1][end:]
        lines[line - 1 : end_line] = [lines[line - 1][:start] + text + after]
    made = translated("".join(lines))
    if "drive(" in made:
        made = made.replace("from .waiting import Calls", "from .waiting import Calls, drive")
    for words in (("check", "--fix", "--select", "I"), ("format",)):
        command = [
            sys.executable,
            "-m",
            "ruff",
            *words,
            "--quiet",
            "--stdin-filename",
            str(CLIENT / "blocking" / name),
            "-",
        ]
        made = subprocess.run(command, input=made, capture_output=True, text=True, check=True, timeout=60).stdout
    return made


def _end(node: ast.stmt | ast.expr) -> tuple[int, int]:
    assert node.end_lineno is not None and node.end_col_offset is not None, "parsed from a text"
    return node.end_lineno, node.end_col_offset


def translated(text: str) -> str:
    """Translate code or prose for asyncio to the blocking client."""
    text = re.sub(r"\n\n *In asyncio:[^\n]*(\n(?! *\"\"\")[^\n]+)*", "", text)
    text = re.sub(r"\b_?Async(?=[A-Z])", "", text)
    return re.sub(r"\b__a(?=(iter|enter|exit)__)", "__", text)


def main() -> None:
    """Writes them."""
    for name in FILES:
        (CLIENT / "blocking" / name).write_text(blocking(name), encoding="utf-8")
