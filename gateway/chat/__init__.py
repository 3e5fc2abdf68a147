"""Conversations to the token ids of a prompt: the chat template, tools in it, and what keeps prefixes shared."""
