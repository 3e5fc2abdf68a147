"""Everything that crosses a process boundary in kvforge: messages, errors, tables, endpoints, exit statuses.

Rules of this package:

- It imports no other package of kvforge, and uses relative imports only, so that it works wherever it is installed.
- Any input from a peer becomes a message or a typed error.
- Nothing here waits.

Other code imports it as `kvforge.protocol`. Importing `protocol/` itself would load its classes twice.
"""
