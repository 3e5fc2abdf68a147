"""Worlds in which a tenant's ceiling holds exactly one request of the longest context: every request ends."""

from __future__ import annotations

from random import Random

import msgspec
import pytest

from kvforge.coordinator.core.limits import Quota
from tests.amount import examples, thinned
from tools.simulation.actions import ActionDrawer
from tools.simulation.draws import Draws
from tools.simulation.runner import drawn, play
from tools.simulation.settings import TENANTS

EVENTS, SEEDS = 600, 60


@pytest.mark.parametrize("windows", [pytest.param(0.0, marks=pytest.mark.soak), 1.0])
def test_every_request_ends_at_a_ceiling_that_just_fits(windows: float) -> None:
    """Blocks counted twice, or kept by steps that nothing awaits, leave a request waiting for ever."""
    for seed in range(0, examples(SEEDS), thinned(2)):
        settings, _ = drawn(seed, states=0.0, windows=windows, hosts=0.0)
        blocks = min(
            settings.context_blocks, -(-(settings.window + settings.step_tokens_max) // settings.block_size) + 1
        )
        ceiling = settings.context_blocks + settings.window_pages * blocks
        random = Random(f"tight/{seed}")
        quotas = {tenant: Quota(ceiling=ceiling) for tenant in TENANTS if random.random() < 0.7}
        settings = msgspec.structs.replace(settings, quotas=quotas)
        drawer = ActionDrawer(settings, Draws(f"tight/{seed}"), Draws(f"tight deaths/{seed}"))
        outcome = play(seed, settings, drawer.actions(), EVENTS, check_every=4 * thinned(4))
        assert not outcome.error, f"seed {seed}: {outcome.error}\n{outcome.where}"
