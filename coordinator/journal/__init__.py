"""The journal: a durable log of the events that entered the core, from which another process rebuilds the machine.

Every event is written before any of its effects leaves the process (`TurnLoop` calls `commit`). Replaying the journal
gives the same state in any interpreter. A journal is a folder with segments of records, and at most one snapshot, which
precedes a segment. Entry points: `state_folder.StateFolder` (used by the server), `log.Journal`, `recovery.recover`.
"""
