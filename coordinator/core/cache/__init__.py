"""The KV cache: which blocks hold what, for whom, and who gets the next ones.

Law: every block is in one state and counted once for each holder; a block is written only while it has one holder and
is not indexed; what raises has changed nothing. It knows sequences and tenants, and nothing of requests or time to
come.

A group (`groups`) is one worker and its pool: its blocks, its sequences, the steps that it was sent, and the copies
that it owes before the next one. A block's id says which pool, and where in its memory.

Files, each below those before it: cache (sequences grow), residents (who lives where), eviction, indexing, pins;
groups; pool; prefix; blocks, sequences, tenants. A file asks those below it, and calls nobody above it.

From outside: `cache.Cache` changes blocks and tables, and nobody else does. Its `sequences`, `blocks` and pools may be
read by everyone; the scheduler alone also writes what it plans (scheduled, pending, running) into `sequences`.
"""
