"""Constants of the generators behind a token's draw, for every implementation of `sampling.draws` outside Triton.

Philox4x32-10: Salmon et al., "Parallel Random Numbers: As Easy as 1, 2, 3", SC 2011. SplitMix64: Steele, Lea, Flood,
OOPSLA 2014. All are unsigned, of 32 bits for Philox and of 64 for SplitMix64.
"""

from __future__ import annotations

PHILOX_ROUNDS = 10
PHILOX_MULTIPLIERS = (0xD2511F53, 0xCD9E8D57)
PHILOX_WEYL = (0x9E3779B9, 0xBB67AE85)
SPLITMIX_GAMMA = 0x9E3779B97F4A7C15
SPLITMIX_MULTIPLIERS = (0xBF58476D1CE4E5B9, 0x94D049BB133111EB)
