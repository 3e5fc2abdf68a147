"""Callers, their rights and their rate limits.

Keys are 256 random bits, so a plain digest cannot be inverted by guessing, and the timing of the look-up leaks nothing
useful.
"""

from __future__ import annotations

import hashlib
import time
from collections.abc import Mapping
from dataclasses import dataclass

from starlette.datastructures import Headers

from kvforge.gateway.config import RIGHTS, Key, Settings, is_local
from kvforge.protocol.errors import InvalidRequest, NotAllowed, RateExceeded
from kvforge.protocol.salts import check_salt, tenant_salt

from .errors import Unauthenticated
from .hosts import host_of, plain
from .rates import NO_RATES, Rates

BEARER = "bearer "


@dataclass(frozen=True, slots=True)
class Caller:
    """The sender of a request.

    Attributes:
        name: The name of its key; "" where no key is needed.
        tenant: The tenant that its requests belong to.
        rights: What it may do.
        priority_max: The highest priority of its requests.
        tokens_per_minute: Its token budget; 0 for none.
        rates: The buckets that its tokens are taken from.
    """

    name: str = ""
    tenant: str = "default"
    rights: frozenset[str] = frozenset(RIGHTS)
    priority_max: int = 100
    tokens_per_minute: int = 0
    rates: Rates = NO_RATES

    def need(self, right: str) -> None:
        """Require a right.

        Raises:
            NotAllowed: The caller does not have it.
        """
        if right not in self.rights:
            raise NotAllowed(right, f"the API key {self.name!r} lacks this right")

    def check_priority(self, priority: int) -> int:
        """Return `priority`.

        Raises:
            InvalidRequest: It exceeds the caller's limit.
        """
        if priority > self.priority_max:
            raise InvalidRequest(
                "priority", f"is {priority}; the limit of API key {self.name!r} is {self.priority_max}"
            )
        return priority

    def tenant_salt(self, salt: str) -> str:
        """Return the prefix cache salt, made unique to the tenant where the caller has a key.

        Raises:
            InvalidRequest: The salt is malformed; the error names `salt`.
        """
        check_salt(salt)
        return tenant_salt(self.tenant, salt) if salt and self.name else salt

    def used(self, tokens: int) -> None:
        """Charge tokens to the caller's budget, which may become negative."""
        if self.tokens_per_minute:
            self.rates.consume(f"{self.name}\ntokens", tokens, self.tokens_per_minute, must=True)


class Access:
    """The API keys. `use` may replace the settings at any time."""

    def __init__(self, settings: Settings, rates: Rates = NO_RATES) -> None:
        self._rates = rates
        self.use(settings)

    def use(self, settings: Settings) -> None:
        """Use the keys, origins and hosts of new settings from now on."""
        self._keys = {key.hash: (name, key) for name, key in settings.keys.items()}
        self._origins = frozenset(settings.cors_origins)
        self._hosts = frozenset(map(plain, ("localhost", *settings.hosts, settings.host)))
        self._open = settings.open

    def allows_origin(self, origin: str) -> bool:
        """Return whether pages of this origin may call."""
        return origin in self._origins or "*" in self._origins

    def caller(self, headers: Mapping[str, str], right: str) -> Caller:
        """Authenticate the sender of a request.

        Args:
            headers: The headers of the request.
            right: The right that the request needs.

        Raises:
            Unauthenticated: The key is missing, unknown or expired.
            NotAllowed: The caller lacks `right`, or a web page of a foreign origin sent the request.
            RateExceeded: The key has used up its rate limit.
        """
        self._check_origin(headers)
        if not self._keys:
            caller = Caller()
            caller.need(right)
            return caller
        name, key = self._key(headers)
        if key.expires is not None and key.expires.timestamp() <= time.time():
            raise Unauthenticated(f"the API key {name!r} has expired")
        caller = Caller(name, key.tenant, frozenset(key.rights), key.priority_max, key.tokens_per_minute, self._rates)
        caller.need(right)
        self._consume_rates(name, key)
        return caller

    def _key(self, headers: Mapping[str, str]) -> tuple[str, Key]:
        given = headers.get("authorization", "")
        secret = given[len(BEARER) :] if given[: len(BEARER)].lower() == BEARER else headers.get("x-api-key", "")
        if not secret:
            raise Unauthenticated("API key required: send `Authorization: Bearer KEY` or `x-api-key: KEY`")
        found = self._keys.get("sha256:" + hashlib.sha256(secret.strip().encode()).hexdigest())
        if found is None:
            raise Unauthenticated("unknown API key")
        return found

    def _consume_rates(self, name: str, key: Key) -> None:
        for what, per_minute, amount in (
            ("requests", key.requests_per_minute, 1),
            ("tokens", key.tokens_per_minute, 0),
        ):
            if per_minute and (wait_s := self._rates.consume(f"{name}\n{what}", amount, per_minute)):
                error = RateExceeded(per_minute / 60, round(wait_s * 1000), f"the API key {name!r}")
                text = f"the API key {name!r} has used its {per_minute} {what} per minute; retry in {wait_s:.1f} s"
                error.message, error.args = text, (text,)
                raise error

    def _check_origin(self, headers: Mapping[str, str]) -> None:
        """Refuse calls that a browser makes for a foreign page, by cross-origin requests or DNS rebinding."""
        header, host = headers.get("host", ""), ""
        if not isinstance(headers, Headers) or len(headers.getlist("host")) == 1:
            host = host_of(header)
        origin = headers.get("origin")
        if origin is not None and not self.allows_origin(origin) and not _same_origin(origin, header, host):
            raise NotAllowed(
                "connect", f"origin {origin[:200]!r} is not allowed: add it to cors_origins in gateway.toml"
            )
        if not self._keys and not self._open and not is_local(host) and host not in self._hosts:
            raise NotAllowed("connect", f"unknown host {header[:200]!r}: add it to hosts in gateway.toml")


def _same_origin(origin: str, header: str, host: str) -> bool:
    """Return whether the page comes from the very host that it calls."""
    scheme, _, rest = origin.partition("://")
    return bool(host) and scheme in ("http", "https") and rest.lower() == header.lower()
