"""The command line: one file for each command of `kvforge`, and what they share.

Its law: a command parses its options, calls the library as any user would, and prints. It holds no rule of its own
about the service. Each ends with a status of `kvforge.protocol.exits`; a person is told in one sentence, a program
(`--json`) in one document.

From outside: `cli.main`, which `python -m kvforge` runs. A command file has `add` (its options) and `run`.
"""
