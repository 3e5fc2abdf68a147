"""The host tiers of all workers, by the identities of their files."""

from __future__ import annotations

from .host_tier import HostTier
from .tenants import Tenants
from .wipes import Wipes


class HostTiers:
    """The tiers of all files that workers have announced, also of those that no worker has mapped now.

    Attributes:
        tiers: By identity, those that were mapped last at the end.
    """

    def __init__(
        self,
        tiers_max: int,
        ancestors_max: int,
        tenants: Tenants | None = None,
        wipes: Wipes | None = None,
        window: int = 0,
    ) -> None:
        self._tiers_max, self._ancestors_max, self._tenants, self._wipes = tiers_max, ancestors_max, tenants, wipes
        self._window = window
        self.tiers: dict[str, HostTier] = {}

    def is_mapped(self, identity: str) -> bool:
        """Return whether a worker that is registered has the file mapped."""
        tier = self.tiers.get(identity)
        return tier is not None and tier.epoch > 0

    def attach(self, identity: str, total: int, epoch: int, new: bool = False) -> HostTier:
        """Return the books of a file that a worker announces: those of an earlier worker, or new ones.

        Args:
            identity: The identity of the file.
            total: Its blocks.
            epoch: The registration of the worker.
            new: The file has no bytes of entries.
        """
        tier = self.tiers.pop(identity, None)
        if tier is None or tier.total != total:
            tier = self.new(identity, total)
            tier.stale.update(() if new else range(total))
        self.tiers[identity] = tier
        tier.attach(epoch)
        unmapped = [known for known, each in self.tiers.items() if not each.epoch]
        for known in unmapped[: max(0, len(self.tiers) - self._tiers_max)]:
            del self.tiers[known]
        return tier

    def new(self, identity: str, total: int) -> HostTier:
        """Return empty books of a file."""
        shares = self._tenants.host_shares if self._tenants is not None else None
        return HostTier(identity, total, 4 * total + self._ancestors_max, shares, self._wipes, self._window)

    def check_invariants(self) -> None:
        """Check the books of each file."""
        for tier in self.tiers.values():
            tier.check_invariants()
