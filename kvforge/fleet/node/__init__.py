"""The programs that a keeper runs on a node: a replica, which runs what `kvforge up` runs, and a gateway.

They use no threads and no Ray. After a program's end only files remain that a returning replica needs: the journal, the
key and the port. Secrets are stored only in files that their owner alone can read, never in a command line, an
environment variable or a log.

A keeper starts them as `entry.py kvforge.fleet.node KIND --link DESCRIPTOR`; the link carries orders and status.
"""
