"""A hook of mkdocs: links out of docs/ lead to the repository, because the site holds the pages alone."""

from __future__ import annotations

import re
from typing import Any

OUTSIDE = re.compile(r"\]\(\.\./([^)\s]+)\)")


def on_page_markdown(markdown: str, *, config: Any, **_: Any) -> str:
    """Return the page's Markdown with links such as `../deploy/README.md` made absolute.

    Args:
        markdown: The page's text.
        config: The site's configuration; `extra.sources` is the address that the paths are appended to.
    """
    return OUTSIDE.sub(rf"]({config['extra']['sources']}\1)", markdown)
