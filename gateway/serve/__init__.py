"""Processes that serve one port, and what starts them."""
