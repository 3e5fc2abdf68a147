"""Shared by all routes: bounded bodies, strict reading of fields, event streams, errors."""
