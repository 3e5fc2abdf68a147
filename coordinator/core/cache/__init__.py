"""The KV cache: block contents, block tables, quotas, eviction and prefix lookup.

Invariants:

- A block is in exactly one state, and its reference count equals its number of holders.
- A block is written only while it has one holder and is not indexed.
- A call that raises has changed nothing.

The package knows sequences and tenants. It does not know requests, and it never schedules future work.

A group (`groups`) is one worker and its block pool: the blocks, the resident sequences, the steps in flight, and the
block copies that the next step must carry. A global block id determines the pool and the offset in it.

Layers, top to bottom; a file calls only files below it: kv_cache_manager (composes the parts); block_tables (growth of
sequences); residency (placement of sequences); eviction, indexing, pins; groups; pool_indexing, pool_invariants;
block_pool; entry_eviction; entry_parts, cached_blocks; prefix_cache; blocks, sequences, tenants.

Only the parts of `KVCacheManager` change blocks and block tables. Any module may read its `sequences`, `blocks` and
pools. The scheduler also writes its plan (scheduled, pending, running) into `sequences`.
"""
