"""Access of a client: its tenant, its rights and its limits."""

from __future__ import annotations

import msgspec

SUBMIT, READ, ADMIN = "submit", "read", "admin"
RIGHTS = (SUBMIT, READ, ADMIN)
EVERY_TENANT = "*"


class Access(msgspec.Struct, frozen=True):
    """The access of one entry in the configuration, or of clients without an entry.

    Attributes:
        name: The name of the entry; "" without one.
        tenant: The tenant it acts for; EVERY_TENANT for any tenant that a command names.
        rights: SUBMIT permits creating and ending requests, sequences and block holders. READ permits seeing them and
            reading answers. ADMIN includes both, draining, and the same for other tenants.
        requests_max: Live requests of all its connections; 0 for no limit of its own.
        tokens_per_s: Tokens of all its connections; 0 for no limit.
        messages_per_s: Messages of all its connections, counted by `kvforge.coordinator.transport.rate_limit`; 0 for
        no limit.
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
        return self.name or "a client on the local socket"

    @property
    def unlimited(self) -> bool:
        """Whether no command needs a check."""
        limited = self.requests_max or self.tokens_per_s
        return self.tenant == EVERY_TENANT and not limited and ADMIN in self.rights

    @property
    def sees(self) -> str:
        """The one tenant that the client sees; "" for all."""
        return "" if self.tenant == EVERY_TENANT or ADMIN in self.rights else self.tenant
