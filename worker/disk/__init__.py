"""The disk tier of a worker: KV blocks in a bounded folder, which outlive the process, the service and the host.

records.py    the record of a slot: what its block is, sealed with a checksum
sealing.py    encryption of records and blocks, if a key file is set
folder.py     the locked folder of a worker: one folder for each identity, the least recently used ones are deleted
store.py      the interface of a store of blocks
segments.py   the segment files of one identity: slots of one block each
copying.py    the process that copies; copier.py: the worker's side
recovery.py   which entries of an earlier life can be used

Law: nothing here imports torch, and every file is read as if a crash had left it.
"""
