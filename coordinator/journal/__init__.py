"""What entered the core, kept so that another process can make the same machine of it.

Law: whatever entered is written before anything that follows from it leaves the process (`TurnLoop` calls `commit`);
reading it back gives the same state, in any interpreter. A journal is a folder: segments of records, and at most one
snapshot that begins one of them. From outside: `keeping.Keeper` (the server's), `log.Journal`, `recovery.recover`.
"""
