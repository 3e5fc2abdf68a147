"""The processes that serve one port, and the command that starts them."""
