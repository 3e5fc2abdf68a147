"""What crosses a process boundary in kvforge, and nothing else: messages, errors, shared tables, endpoints."""
