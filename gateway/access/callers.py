"""Callers and their rights.

Keys are random, of 256 bits: so a plain digest of one says nothing about it, cannot be guessed from, and how long the
look-up takes tells nothing that helps.
"""

from __future__ import annotations

import hashlib
import time
from collections.abc import Mapping
from dataclasses import dataclass

from starlette.datastructures import Headers

from kvforge.gateway.config import RIGHTS, Key, Settings, is_local
from kvforge.protocol.errors import InvalidRequest, NotAllowed, RateExceeded
from kvforge.protocol.salts import check_plain, own_salt

from .errors import Unauthenticated
from .hosts import host_of, plain
from .rates import NO_RATES, Rates

BEARER = "bearer "


@dataclass(frozen=True, slots=True)
class Caller:
    """name: of its key; "" where none is needed."""

    name: str = ""
    tenant: str = "default"
    rights: frozenset[str] = frozenset(RIGHTS)
    priority_max: int = 100
    tokens_per_minute: int = 0
    rates: Rates = NO_RATES

    def need(self, right: str) -> None:
        """Raises NotAllowed."""
        if right not in self.rights:
            raise NotAllowed(right, f"the key {self.name!r} does not have it")

    def check_priority(self, priority: int) -> int:
        """Raises InvalidRequest where it is more than this caller may have."""
        if priority > self.priority_max:
            raise InvalidRequest("priority", f"is {priority}; the key {self.name!r} may have {self.priority_max}")
        return priority

    def own_salt(self, salt: str) -> str:
        """The salt that the prefix cache is given: of a caller with a key its tenant's own.

        Raises:
            InvalidRequest: Names `salt`.
        """
        check_plain(salt)
        return own_salt(self.tenant, salt) if salt and self.name else salt

    def used(self, tokens: int) -> None:
        """It has used so many: of the next minute, where it had no more."""
        if self.tokens_per_minute:
            self.rates.take(f"{self.name}\ntokens", tokens, self.tokens_per_minute, must=True)


class Access:
    """The callers that are known. `settings` may be replaced while it is used."""

    def __init__(self, settings: Settings, rates: Rates = NO_RATES) -> None:
        self._rates = rates
        self.use(settings)

    def use(self, settings: Settings) -> None:
        """From now on these keys."""
        self._keys = {key.hash: (name, key) for name, key in settings.keys.items()}
        self._origins = frozenset(settings.cors_origins)
        self._hosts = frozenset(map(plain, ("localhost", *settings.hosts, settings.host)))
        self._open = settings.open

    def allows_origin(self, origin: str) -> bool:
        """Whether a page of that origin may call."""
        return origin in self._origins or "*" in self._origins

    def caller(self, headers: Mapping[str, str], right: str) -> Caller:
        """The caller of a request. Raises Unauthenticated, NotAllowed where it lacks `right`, RateExceeded."""
        self._check_origin(headers)
        if not self._keys:
            caller = Caller()
            caller.need(right)
            return caller
        name, key = self._key(headers)
        if key.expires is not None and key.expires.timestamp() <= time.time():
            raise Unauthenticated(f"the key {name!r} has expired")
        caller = Caller(name, key.tenant, frozenset(key.rights), key.priority_max, key.tokens_per_minute, self._rates)
        caller.need(right)
        self._take(name, key)
        return caller

    def _key(self, headers: Mapping[str, str]) -> tuple[str, Key]:
        given = headers.get("authorization", "")
        secret = given[len(BEARER) :] if given[: len(BEARER)].lower() == BEARER else headers.get("x-api-key", "")
        if not secret:
            raise Unauthenticated("send the key as `Authorization: Bearer KEY`, or as `x-api-key: KEY`")
        found = self._keys.get("sha256:" + hashlib.sha256(secret.strip().encode()).hexdigest())
        if found is None:
            raise Unauthenticated("the key is none that is known here")
        return found

    def _take(self, name: str, key: Key) -> None:
        for what, per_minute, amount in (
            ("requests", key.requests_per_minute, 1),
            ("tokens", key.tokens_per_minute, 0),
        ):
            if per_minute and (wait_s := self._rates.take(f"{name}\n{what}", amount, per_minute)):
                error = RateExceeded(per_minute / 60, round(wait_s * 1000), f"the key {name!r}")
                text = f"the key {name!r} has used its {per_minute} {what} a minute; try again in {wait_s:.1f} s"
                error.message, error.args = text, (text,)
                raise error

    def _check_origin(self, headers: Mapping[str, str]) -> None:
        """A page that a browser shows must not reach a service of this host that needs no key: neither from another
        origin, nor under a name that was made to mean this host."""
        header, host = headers.get("host", ""), ""
        if not isinstance(headers, Headers) or len(headers.getlist("host")) == 1:
            host = host_of(header)
        origin = headers.get("origin")
        if origin is not None and not self.allows_origin(origin) and not _same_origin(origin, header, host):
            raise NotAllowed(
                "connect", f"pages of {origin[:200]!r} may not call this: see cors_origins in gateway.toml"
            )
        if not self._keys and not self._open and not is_local(host) and host not in self._hosts:
            raise NotAllowed("connect", f"{header[:200]!r} is no name of this host: see hosts in gateway.toml")


def _same_origin(origin: str, header: str, host: str) -> bool:
    """Whether a page came from the host, one that is named, that its call goes to."""
    scheme, _, rest = origin.partition("://")
    return bool(host) and scheme in ("http", "https") and rest.lower() == header.lower()
