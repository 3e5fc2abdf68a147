"""Names of arguments that are others on the wire, for the coordinator's errors."""

from __future__ import annotations

from kvforge.protocol.errors import InvalidRequest, KvforgeError, restore

_SALT = {"salt": "cache_salt"}
_KEY = {"key": "idempotency_key"}
# The argument by the field of the message, by the message.
ARGUMENTS = {
    "Submit": {**_SALT, **_KEY, "count": "n"},
    "FindPrefix": {**_SALT, **_KEY},
    "CreateSequence": _SALT,
}


def in_terms_of_arguments(error: KvforgeError, message: str) -> KvforgeError:
    """Return an error of the coordinator with the name of the caller's argument in place of the message's field.

    Args:
        error: The error.
        message: The class name of the refused message.
    """
    field = str(error.fields.get("field", ""))
    argument = ARGUMENTS.get(message, {}).get(field)
    if not isinstance(error, InvalidRequest) or argument is None:
        return error
    text = f"{argument}: {error.message.removeprefix(f'{field}: ')}"
    return restore(error.code, text, {**error.fields, "field": argument})
