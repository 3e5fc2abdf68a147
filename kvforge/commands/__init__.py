"""The command line: one file for each command of `kvforge`, and their shared parts.

A command parses its options, calls the library as any user would, and prints. It holds no rule of its own about the
service. Each command ends with a status of `kvforge.protocol.exits`; it prints one sentence for people, or one document
for programs (`--json`).

Other code uses `cli.main`, which `python -m kvforge` runs. Each command file has `add` (its options) and `run`.
"""
