"""Fields of a request by the names that they have in the client library and in the coordinator."""

from __future__ import annotations

import re
from collections.abc import Mapping

from kvforge.gateway.http.errors import ContextOverflow
from kvforge.protocol.errors import InvalidRequest, KvforgeError

from .shapes import ANY, Shape

_HEAD = re.compile(r"(?P<name>[^.\[]*)(?P<rest>.*)", re.DOTALL)
# Names that all APIs share.
COMMON = {
    "count": "n",
    "key": "idempotency-key",
    "salt": "cache_salt",
    "stop_tokens": "stop_token_ids",
}


class Names:
    """The names of one request's fields.

    Args:
        names: The request's own name of each field, by the name that an error may have for it.

    Attributes:
        shape: The shape of the answer, set as soon as it is known.
    """

    def __init__(self, names: Mapping[str, str]) -> None:
        self._names = {**COMMON, **names}
        self.shape: Shape = ANY

    def renamed(self, error: InvalidRequest) -> InvalidRequest:
        """The same error, of a field by the name that the request has for it.

        An error with the numbers of a prompt that does not fit becomes a `ContextOverflow`.
        """
        full = str(error.field)
        found = _HEAD.fullmatch(full.removeprefix("sampling."))
        assert found is not None, "it matches any text"
        own = self.shape.field if self.shape.name and self.shape.name == found["name"] else ""
        field = (own or self._names.get(found["name"], found["name"])) + found["rest"]
        fields = {**error.fields, "field": field}
        if "context_tokens" in fields and not isinstance(error, ContextOverflow):
            prompt, most, context = (
                int(error.fields[name] or 0) for name in ("prompt_tokens", "max_tokens", "context_tokens")
            )
            problem = error.message.removeprefix(f"{full}: ")
            return ContextOverflow(field, prompt, most, context, problem)
        if field == full:
            return error
        named = type(error).__new__(type(error))
        KvforgeError.__init__(named, f"{field}: {error.message.removeprefix(f'{full}: ')}", **fields)
        return named
