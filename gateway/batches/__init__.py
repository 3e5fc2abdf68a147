"""OpenAI's files and batches: JSON lines in, JSON lines out, below all interactive work.

Both live in the storage (`kvforge.gateway.storage`): a file as one document with its content in chunks, a batch as one
document that belongs to one gateway process at a time. `records.py` has what is stored, `runner.py` what is done with
a batch, `run.py` how one batch goes on after any death.
"""
