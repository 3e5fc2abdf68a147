"""Anthropic's API: /v1/messages and count_tokens."""
