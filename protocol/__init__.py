"""What crosses a process boundary in kvforge, and nothing else: messages, errors, tables, endpoints, exit statuses.

Its law: it imports nothing of ours, and by relative imports alone, so that it is the same package wherever it lies;
what comes from a peer becomes a message or a typed error, whatever it is. Nobody waits here.

From outside: all of it, as `kvforge.protocol` (`protocol/` itself is not imported: its classes would be there twice).
"""
