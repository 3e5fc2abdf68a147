"""What a client may do: for which tenant it acts, what rights it has, how much it may have at once."""

from __future__ import annotations

import msgspec

SUBMIT, READ, ADMIN = "submit", "read", "admin"
RIGHTS = (SUBMIT, READ, ADMIN)
EVERY_TENANT = "*"


class Access(msgspec.Struct, frozen=True):
    """Of one entry of the configuration, or of those without.

    name: that of the entry, "" without one. tenant: for whom it acts, EVERY_TENANT for whomever it names.
    rights: SUBMIT: have requests, sequences and holders of blocks, and end them. READ: see them, and read answers.
    ADMIN: both, drain, and see and end what is of other tenants.
    requests_max: requests that are alive at once, of all its connections; 0: no limit but that of all. tokens_per_s,
    messages_per_s: of all its connections; 0: no limit. Messages are the door's to count (`kvforge.coordinator.rate`).
    """

    name: str = ""
    tenant: str = EVERY_TENANT
    rights: tuple[str, ...] = RIGHTS
    requests_max: int = 0
    tokens_per_s: float = 0.0
    messages_per_s: float = 0.0

    @property
    def owner(self) -> str:
        """Its name, for people."""
        return self.name or "who comes by a local socket"

    @property
    def unlimited(self) -> bool:
        """Whether nothing is to be checked."""
        limited = self.requests_max or self.tokens_per_s
        return self.tenant == EVERY_TENANT and not limited and ADMIN in self.rights

    @property
    def sees(self) -> str:
        """The one tenant that it sees; "": every one."""
        return "" if self.tenant == EVERY_TENANT or ADMIN in self.rights else self.tenant
