"""Maps the field names of the client library and the coordinator to those of a request."""

from __future__ import annotations

import re
from collections.abc import Mapping

from kvforge.gateway.http.errors import ContextOverflow
from kvforge.protocol.errors import InvalidRequest, KvforgeError

from .shapes import ANY, Shape

_HEAD = re.compile(r"(?P<name>[^.\[]*)(?P<rest>.*)", re.DOTALL)
# Names that all APIs have in common.
COMMON = {
    "count": "n",
    "idempotency_key": "idempotency-key",
    "key": "idempotency-key",
    "salt": "cache_salt",
    "stop_tokens": "stop_token_ids",
}


class Names:
    """The field names of one request.

    Args:
        names: The request's name of each field, by the name in an error.

    Attributes:
        shape: The output constraint, set as soon as it is known.
    """

    def __init__(self, names: Mapping[str, str]) -> None:
        self._names = {**COMMON, **names}
        self.shape: Shape = ANY

    def renamed(self, error: InvalidRequest) -> InvalidRequest:
        """Return the error with the field name of the request.

        An error with the token counts of a prompt that does not fit becomes a `ContextOverflow`.
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
