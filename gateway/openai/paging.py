"""Lists in pages, as OpenAI's API has them: `limit`, `order`, `after`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from kvforge.protocol.errors import InvalidRequest

LIMIT, LIMIT_MAX = 20, 100


@dataclass(frozen=True, slots=True)
class Page:
    """The part of a list that a request asks for.

    Attributes:
        limit: How many items at most.
        after: Begin behind the item with this id; "": with the first.
        descending: The newest first.
    """

    limit: int
    after: str
    descending: bool

    @classmethod
    def of(cls, query: Mapping[str, str], *, default: int = LIMIT, most: int = LIMIT_MAX) -> Page:
        """Read the parameters of a query.

        Args:
            query: The query.
            default: The limit if it names none.
            most: The highest limit.

        Raises:
            InvalidRequest: Names the malformed parameter.
        """
        limit = whole_number(query, "limit", default, 1, most)
        order = query.get("order", "desc")
        if order not in ("asc", "desc"):
            raise InvalidRequest("order", f"is {order[:40]!r}; it must be asc or desc")
        return cls(limit, query.get("after", ""), order == "desc")

    def of_items(self, items: Sequence[dict[str, Any]]) -> dict[str, Any]:
        """Return a page of items that are all here, in the order of their creation.

        Raises:
            InvalidRequest: There is no item with the id `after`.
        """
        ordered = list(items[::-1] if self.descending else items)
        if self.after:
            places = [at for at, item in enumerate(ordered) if item["id"] == self.after]
            if not places:
                raise InvalidRequest("after", f"there is no item {self.after[:100]!r}")
            del ordered[: places[0] + 1]
        return listed(ordered[: self.limit], more=len(ordered) > self.limit)


def listed(items: Sequence[dict[str, Any]], *, more: bool) -> dict[str, Any]:
    """Return a list as the API has it. `more`: items follow."""
    return {
        "object": "list",
        "data": list(items),
        "first_id": items[0]["id"] if items else None,
        "last_id": items[-1]["id"] if items else None,
        "has_more": more,
    }


def whole_number(query: Mapping[str, str], name: str, default: int, least: int, most: int) -> int:
    """Return a number of a query.

    Raises:
        InvalidRequest: Names the malformed parameter.
    """
    text = query.get(name)
    if text is None:
        return default
    if not (text.isascii() and text.isdecimal() and len(text) < 10 and least <= int(text) <= most):
        raise InvalidRequest(name, f"is {text[:40]!r}; it must be a whole number from {least} to {most}")
    return int(text)
